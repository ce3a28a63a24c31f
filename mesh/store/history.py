"""The recent past of a key space: what changed at which revision, as far back as the bounds allow. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from mesh.errors import StoreCompacted
from mesh.store.interface import KeyValue, WatchEvent


@dataclass(frozen=True, slots=True)
class Change:
    """An event, and the key as it stood before."""

    event: WatchEvent
    before: KeyValue | None

    @property
    def size_bytes(self) -> int:
        return 2 * len(self.event.key) + len(self.event.value) + (len(self.before.value) if self.before else 0)


def _revision(change: Change) -> int:
    return change.event.mod_revision


class History:
    """Changes in order of revision; those up to `compacted_revision` are forgotten."""

    def __init__(self, start_revision: int, most_changes: int, most_bytes: int) -> None:
        self.compacted_revision = start_revision
        self._most_changes = most_changes
        self._most_bytes = most_bytes
        self._changes: list[Change] = []
        self._size_bytes = 0

    def record(self, changes: list[Change]) -> None:
        """Append the changes of one new revision; forget the oldest revisions where a bound is passed."""
        self._changes += changes
        self._size_bytes += sum(change.size_bytes for change in changes)
        if len(self._changes) > self._most_changes or self._size_bytes > self._most_bytes:
            self._trim()

    def compact(self, revision: int) -> None:
        """Forget the changes up to and including `revision`."""
        cut = bisect_right(self._changes, revision, key=_revision)
        self._size_bytes -= sum(change.size_bytes for change in self._changes[:cut])
        del self._changes[:cut]
        self.compacted_revision = max(self.compacted_revision, revision)

    def since(
        self, prefix: str, from_revision: int, most_events: int, most_bytes: int
    ) -> tuple[tuple[WatchEvent, ...], int | None]:
        """Events under a prefix from a revision on, and the revision to go on from (None: the end was reached).

        Stops after the first whole revision that passes a bound. Raises `StoreCompacted`.
        """
        self._check_kept(from_revision)
        events: list[WatchEvent] = []
        size_bytes = 0
        for index in range(bisect_left(self._changes, from_revision, key=_revision), len(self._changes)):
            change = self._changes[index]
            full = len(events) >= most_events or size_bytes >= most_bytes
            if full and change.event.mod_revision != events[-1].mod_revision:
                return tuple(events), change.event.mod_revision
            if change.event.key.startswith(prefix):
                events.append(change.event)
                size_bytes += change.size_bytes
        return tuple(events), None

    def newest_first(self, down_to_revision: int) -> Iterator[Change]:
        """The changes after `down_to_revision`, newest first: undone in this order they lead back to it.

        Raises `StoreCompacted`.
        """
        self._check_kept(down_to_revision + 1)
        for change in reversed(self._changes):
            if change.event.mod_revision <= down_to_revision:
                return
            yield change

    def _check_kept(self, from_revision: int) -> None:
        if from_revision <= self.compacted_revision:
            raise StoreCompacted(
                f"revision {from_revision} is gone, history begins after {self.compacted_revision}; list again"
            )

    def _trim(self) -> None:
        """Forget the older half, so that trimming costs little per change."""
        self.compact(self._changes[len(self._changes) // 2].event.mod_revision)
