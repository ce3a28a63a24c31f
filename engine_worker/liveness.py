"""Signs of life: heartbeats of the worker on its streams, steps of its engine. Pure; time is an argument."""

from collections.abc import Collection, Mapping
from typing import Final

from controlplane.model.instance import LoadReport


class HangDetector:
    """An engine hangs when it has had requests for `hang_s` and made no step in that time.

    A step counts whether or not it brought a token: a long prompt is prefilled over many steps, and these show
    only in the load's totals.
    """

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._last_progress_s = 0.0
        self._last_marks: tuple[float, ...] = ()
        self.hung = False

    def stalled_s(self, now_s: float) -> float:
        """Since the engine's last step, or since it had nothing to do."""
        return max(0.0, now_s - self._last_progress_s)

    def note_step(self, now_s: float) -> None:
        """The engine brought a step's output."""
        self._last_progress_s = now_s

    def observe(self, now_s: float, *, busy: bool, load: LoadReport) -> bool:
        """Look at the engine; call it some ten times within `hang_s`. Returns whether `hung` has changed."""
        marks = (
            load.generated_tokens_total,
            load.prefilled_tokens_total,
            load.preemptions_total,
            load.finished_requests_total,
            load.step_ms,
        )
        if marks != self._last_marks or not busy:
            self._last_marks = marks
            self._last_progress_s = now_s
        was_hung, self.hung = self.hung, now_s - self._last_progress_s > self._hang_s
        return self.hung != was_hung


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
