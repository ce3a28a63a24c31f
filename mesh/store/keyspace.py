"""A revisioned key space with leases and bounded history, meaning what etcd means. Pure; time is an argument."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from mesh.errors import StoreCompacted, StoreError
from mesh.store.history import Change, History
from mesh.store.interface import KeyValue, Listing, WatchEvent
from mesh.store.lease_table import LeaseTable
from mesh.store.limits import MAX_STORE_BYTES, check_value, key_bytes

MOST_BATCH_EVENTS = 256
MOST_BATCH_BYTES = 1 << 20


class KeySpace:
    """Keys and leases; each write makes one new revision.

    `before_commit` sees the events of a write just before they take effect; if it raises, nothing has changed.
    """

    def __init__(
        self,
        start_revision: int = 1,
        entries: Iterable[KeyValue] = (),
        *,
        before_commit: Callable[[list[WatchEvent]], None] = lambda events: None,
        history_changes: int = 10_000,
        history_bytes: int = MAX_STORE_BYTES,
    ) -> None:
        self.revision = start_revision
        self._entries = {entry.key: entry for entry in entries}
        self._sorted_keys = sorted(self._entries)
        self._size_bytes = sum(_size_bytes(entry) for entry in self._entries.values())
        self._history = History(start_revision, history_changes, history_bytes)
        self._leases = LeaseTable()
        self._before_commit = before_commit

    def get(self, key: str) -> KeyValue | None:
        """The newest value of a key."""
        return self._entries.get(key)

    def range(self, prefix: str, at_revision: int = 0) -> Listing:
        """Keys under a prefix as they stood at a revision (0: now). Raises `StoreCompacted`."""
        if at_revision in (0, self.revision):
            return Listing(self.revision, tuple(self._entries[key] for key in self._keys_under(prefix)))
        if at_revision > self.revision:
            raise StoreCompacted(f"revision {at_revision} is ahead of the store's {self.revision}; list again")
        entries = {key: self._entries[key] for key in self._keys_under(prefix)}
        for change in self._history.newest_first(at_revision):
            if change.before is not None and change.before.key.startswith(prefix):
                entries[change.before.key] = change.before
            elif change.before is None:
                entries.pop(change.event.key, None)
        return Listing(self.revision, tuple(entries[key] for key in sorted(entries)))

    def put(self, key: str, value: bytes, incarnation_id: str = "") -> int:
        """Write and return the revision. Raises `StoreError` (limits) and `LeaseLost`."""
        key_bytes(key)
        check_value(key, value)
        self._leases.check(incarnation_id)
        growth_bytes = len(value) + len(key) - _size_bytes(self._entries.get(key))
        if growth_bytes > 0 and self._size_bytes + growth_bytes > MAX_STORE_BYTES:
            raise StoreError(f"the store is full ({MAX_STORE_BYTES} bytes); delete keys before writing {key!r}")
        self._commit([WatchEvent("put", key, value, self.revision + 1, incarnation_id)])
        return self.revision

    def compare_and_swap(
        self, key: str, expected_mod_revision: int, value: bytes, incarnation_id: str = ""
    ) -> int | None:
        """Write only if the key's last write was at `expected_mod_revision` (0: it is absent)."""
        entry = self._entries.get(key)
        if (entry.mod_revision if entry else 0) != expected_mod_revision:
            return None
        return self.put(key, value, incarnation_id)

    def delete(self, key: str) -> bool:
        """Delete a key; False, and no new revision, if there was none."""
        return self._delete([key] if key in self._entries else []) > 0

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys under a prefix at one revision; returns how many there were."""
        return self._delete(self._keys_under(prefix))

    def events(self, prefix: str, from_revision: int) -> tuple[tuple[WatchEvent, ...], int]:
        """The next batch of events from a revision on, and the revision to go on from. Raises `StoreCompacted`."""
        events, next_revision = self._history.since(prefix, from_revision, MOST_BATCH_EVENTS, MOST_BATCH_BYTES)
        return events, next_revision or max(from_revision, self.revision + 1)

    def compact(self, revision: int) -> None:
        """Forget what happened up to and including `revision`; the keys stay."""
        self._history.compact(min(revision, self.revision))

    def grant_lease(self, incarnation_id: str, ttl_s: float, now_s: float) -> None:
        """Add a lease under an id never used before. Raises `StoreError`."""
        self._leases.grant(incarnation_id, ttl_s, now_s)

    def refresh_lease(self, incarnation_id: str, now_s: float) -> bool:
        """Let a lease live for its ttl from now; False if it is gone."""
        return self._leases.refresh(incarnation_id, now_s)

    def revoke_lease(self, incarnation_id: str) -> None:
        """End a lease and delete its keys at one revision. Raises `LeaseLost`."""
        self._delete(self._leases.remove(incarnation_id))

    def expire_leases(self, now_s: float) -> None:
        """Revoke every lease whose time is over."""
        for incarnation_id in self._leases.expired(now_s):
            self.revoke_lease(incarnation_id)

    def next_expiry_s(self) -> float | None:
        """When the first lease ends unless it is refreshed."""
        return self._leases.next_expiry_s()

    def _keys_under(self, prefix: str) -> list[str]:
        # Python compares strings by code point, which is the order of their UTF-8 bytes and so etcd's.
        first = end = bisect_left(self._sorted_keys, prefix)
        while end < len(self._sorted_keys) and self._sorted_keys[end].startswith(prefix):
            end += 1
        return self._sorted_keys[first:end]

    def _delete(self, keys: Iterable[str]) -> int:
        events = [WatchEvent("delete", key, b"", self.revision + 1) for key in keys]
        if events:
            self._commit(events)
        return len(events)

    def _commit(self, events: list[WatchEvent]) -> None:
        self._before_commit(events)
        self._history.record([Change(event, self._entries.get(event.key)) for event in events])
        for event in events:
            self._apply(event)
        self.revision += 1

    def _apply(self, event: WatchEvent) -> None:
        before = self._entries.pop(event.key, None)
        self._leases.move_key(event.key, before.incarnation_id if before else "", event.incarnation_id)
        self._size_bytes -= _size_bytes(before)
        if event.kind == "put":
            if before is None:
                insort(self._sorted_keys, event.key)
            entry = KeyValue(event.key, event.value, event.mod_revision, event.incarnation_id)
            self._entries[event.key] = entry
            self._size_bytes += _size_bytes(entry)
        else:
            del self._sorted_keys[bisect_left(self._sorted_keys, event.key)]


def _size_bytes(entry: KeyValue | None) -> int:
    return len(entry.key) + len(entry.value) if entry else 0
