"""When a stream that has nothing to say is to show that its worker lives. Pure; time is an argument."""

from collections.abc import Collection, Mapping
from typing import Final

HEARTBEAT_S: Final = 0.15
"""While the stream has requests. A third of the shortest silence by which a frontend takes a worker for frozen: two may
be late."""
IDLE_HEARTBEAT_S: Final = 1.0
"""While it has none: a frontend is to know of a frozen worker before it sends it the next request."""


class Heartbeats:
    """A step's output is as good a sign of life as a heartbeat: streams whose requests decode quickly cost nothing."""

    def __init__(self) -> None:
        self._quiet: dict[int, tuple[int, float]] = {}
        """By stream: how many messages it had been given when we last found it changed, and when that was."""

    def due(self, now_s: float, sent: Mapping[int, int], busy: Collection[int]) -> list[int]:
        """The streams to send a heartbeat on; `sent`: how many messages each stream was given so far; `busy`: those
        that have requests. Call it a few times within `HEARTBEAT_S`."""
        quiet, self._quiet = self._quiet, {}
        due: list[int] = []
        for stream_id, messages in sent.items():
            before, since_s = quiet.get(stream_id, (-1, now_s))
            if messages != before:
                since_s = now_s
            elif now_s - since_s >= (HEARTBEAT_S if stream_id in busy else IDLE_HEARTBEAT_S):
                due.append(stream_id)
            self._quiet[stream_id] = messages, since_s
        return due
