"""The embedded store at work: a key space, the clock that ends its leases, its journal and its watchers."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from mesh.errors import StoreUnavailable
from mesh.runtime import Clock, Entropy
from mesh.store.disk import Disk, SystemDisk
from mesh.store.interface import KeyValue, Listing, WatchEvent
from mesh.store.journal import Journal
from mesh.store.keyspace import KeySpace
from mesh.store.limits import key_bytes


class StoreHost:
    """One per store, shared by every `EmbeddedStore` and gRPC service of the process; lives on one event loop.

    With `path`, keys without a lease are kept in that file; each write of one waits for the disk. Errors as in
    `StateStore`; after `close` every call raises `StoreUnavailable`.
    """

    def __init__(
        self,
        clock: Clock,
        entropy: Entropy,
        path: Path | None = None,
        *,
        disk: Disk | None = None,
        start_revision: int | None = None,
    ) -> None:
        self.clock = clock
        self.entropy = entropy
        self._journal = Journal(path, disk or SystemDisk()) if path else None
        # A store that restarts has forgotten its leased keys and its history. Counting on from the wall clock puts it
        # ahead of every revision that its predecessor gave out, so a watcher that reconnects is told to list again.
        # Where the clock was set back meanwhile, it is what the journal has reserved that keeps revisions apart.
        epoch = int(1e6 * clock.unix_s()) if start_revision is None else start_revision
        start = max(epoch, self._journal.reserved_revision + 1 if self._journal else 1)
        if self._journal is not None:
            self._journal.reserve(start)
        self._keys = KeySpace(
            start,
            self._journal.entries.values() if self._journal else (),
            before_commit=self._journal.record if self._journal else lambda events: None,
        )
        self._changed = asyncio.Event()
        self._expiry: asyncio.Task[None] | None = None
        self._expiry_at_s = 0.0
        self._announced_revision = self._keys.revision
        self.closed = False

    @property
    def revision(self) -> int:
        """Revision of the newest write."""
        return self._keys.revision

    def get(self, key: str) -> KeyValue | None:
        """The newest value of a key."""
        self._begin()
        key_bytes(key)
        return self._keys.get(key)

    def range(self, prefix: str, at_revision: int = 0) -> Listing:
        """Keys under a prefix as they stood at a revision (0: now)."""
        self._begin()
        return self._keys.range(prefix, at_revision)

    def put(self, key: str, value: bytes, incarnation_id: str = "") -> int:
        """Write and return the revision."""
        self._begin()
        revision = self._keys.put(key, value, incarnation_id)
        self._announce()
        return revision

    def compare_and_swap(
        self, key: str, expected_mod_revision: int, value: bytes, incarnation_id: str = ""
    ) -> int | None:
        """Write only if the key's last write was at `expected_mod_revision` (0: it is absent)."""
        self._begin()
        revision = self._keys.compare_and_swap(key, expected_mod_revision, value, incarnation_id)
        self._announce()
        return revision

    def delete(self, key: str) -> bool:
        """Delete a key; False if there was none."""
        self._begin()
        key_bytes(key)
        deleted = self._keys.delete(key)
        self._announce()
        return deleted

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys under a prefix at one revision; returns how many there were."""
        self._begin()
        deleted = self._keys.delete_prefix(prefix)
        self._announce()
        return deleted

    def compact(self, revision: int) -> None:
        """Forget what happened up to and including `revision`."""
        self._begin()
        self._keys.compact(revision)

    def grant_lease(self, ttl_s: float) -> str:
        """Add a lease; returns its incarnation id."""
        self._begin()
        incarnation_id = self.entropy.token_hex(8)
        self._keys.grant_lease(incarnation_id, ttl_s, self.clock.now_s())
        self._watch_expiry()
        return incarnation_id

    def refresh_lease(self, incarnation_id: str) -> bool:
        """Let a lease live for its ttl from now; False if it is gone."""
        self._begin()
        return self._keys.refresh_lease(incarnation_id, self.clock.now_s())

    def revoke_lease(self, incarnation_id: str) -> None:
        """End a lease and delete its keys."""
        self._begin()
        self._keys.revoke_lease(incarnation_id)
        self._announce()

    async def changes(self, prefix: str, from_revision: int) -> AsyncGenerator[tuple[WatchEvent, ...]]:
        """Batches of whole revisions, in order; the first, perhaps empty, comes at once.

        Nothing is queued: a slow reader reads the shared history, and gets `StoreCompacted` when it falls out of it.
        """
        self._begin()
        events, from_revision = self._keys.events(prefix, from_revision)
        yield events
        while True:
            changed = self._changed
            events, from_revision = self._keys.events(prefix, from_revision)
            if events:
                yield events
            elif from_revision > self._keys.revision:
                await changed.wait()
            self._begin()

    def close(self) -> None:
        """End all watches and let go of the journal."""
        if self.closed:
            return
        self.closed = True
        self._changed.set()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._journal is not None:
            self._journal.close()

    def _begin(self) -> None:
        """Before every operation: what should have expired has, however late the clock's own call comes."""
        if self.closed:
            raise StoreUnavailable("the embedded store is closed; open a new one")
        self._keys.expire_leases(self.clock.now_s())
        self._announce()

    def _announce(self) -> None:
        if self._keys.revision != self._announced_revision:
            self._announced_revision = self._keys.revision
            self._changed.set()
            self._changed = asyncio.Event()

    def _watch_expiry(self) -> None:
        next_s = self._keys.next_expiry_s()
        if next_s is None:
            return
        if self._expiry is None or self._expiry.done() or next_s < self._expiry_at_s:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry = asyncio.create_task(self._expire(), name="store lease expiry")

    async def _expire(self) -> None:
        while (next_s := self._keys.next_expiry_s()) is not None:
            self._expiry_at_s = next_s
            await self.clock.sleep(max(0.0, next_s - self.clock.now_s()))
            self._begin()
