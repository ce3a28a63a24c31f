"""One watcher's way from the initial state to the changes, without a gap and with a bounded backlog."""

from collections import deque
from collections.abc import Iterable

from penstock.v1 import monitor_pb2

MESSAGE_WEIGHT = 20_000
"""Changes and block hashes in one message: at most about 200 KB, one oversized change aside."""


class Watcher:
    """What one watcher has yet to be told.

    The initial state is handed out instance by instance, because copying all of it at once would stop the
    monitor for as long as it takes. Until an instance has had its turn its changes are not queued: they will
    be in its state then.
    """

    def __init__(self, watcher_id: str, present: Iterable[str], max_backlog: int) -> None:
        self.watcher_id = watcher_id
        self.cut_off = False
        """The backlog grew too long and was dropped: the watcher must start again."""
        self._undescribed = dict.fromkeys(present)
        self._backlog: deque[monitor_pb2.InstanceUpdate] = deque()
        self._backlog_weight = 0
        self._max_backlog = max_backlog

    @property
    def backlog_weight(self) -> int:
        """Changes and block hashes that wait."""
        return self._backlog_weight

    def next_undescribed(self) -> str | None:
        """The next instance whose state must be handed out (now: its changes are queued from here on)."""
        instance_id = next(iter(self._undescribed), None)
        if instance_id is not None:
            del self._undescribed[instance_id]
        return instance_id

    def offer(self, change: monitor_pb2.InstanceUpdate) -> None:
        """Queue a change, unless its instance's state is yet to come."""
        if self.cut_off or change.instance_id in self._undescribed:
            return
        self._backlog.append(change)
        self._backlog_weight += _weight(change)
        if self._backlog_weight > self._max_backlog:
            self.cut_off = True
            self._backlog.clear()
            self._backlog_weight = 0

    def take(self) -> list[monitor_pb2.InstanceUpdate]:
        """The next message's worth of changes."""
        taken: list[monitor_pb2.InstanceUpdate] = []
        weight = 0
        while self._backlog and weight < MESSAGE_WEIGHT:
            change = self._backlog.popleft()
            weight += _weight(change)
            taken.append(change)
        self._backlog_weight -= weight
        return taken


def _weight(change: monitor_pb2.InstanceUpdate) -> int:
    return 1 + len(change.kv.stored) + len(change.kv.removed) + 4 * len(change.decode.request_ids)
