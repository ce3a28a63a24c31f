"""The state store inside this process."""

import asyncio
from collections.abc import AsyncGenerator

from mesh.backoff import Backoff
from mesh.errors import LeaseLost
from mesh.store.host import StoreHost
from mesh.store.interface import DEFAULT_TIMEOUT_S, KeyValue, Listing, WatchEvent
from mesh.store.lease import HeldLeases, Lease, incarnation_of
from mesh.store.watching import watch_resuming


class EmbeddedStore:
    """`StateStore` on a `StoreHost` of the same process, which it closes when it is closed.

    Deadlines never strike, but every call lets the other tasks run first, as one to a server does: a loop of calls
    must not hold up the event loop, and races that can happen on a server happen here too.
    """

    def __init__(self, host: StoreHost) -> None:
        self._host = host
        self._rng = host.entropy.generator()
        self._source = _HostSource(host)
        self._leases = HeldLeases(self._refresh, self._revoke, host.clock)

    async def get(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> KeyValue | None:
        await asyncio.sleep(0)
        return self._host.get(key)

    async def range(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Listing:
        await asyncio.sleep(0)
        return self._host.range(prefix)

    async def put(
        self, key: str, value: bytes, *, lease: Lease | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> int:
        await asyncio.sleep(0)
        return self._host.put(key, value, incarnation_of(lease))

    async def compare_and_swap(
        self,
        key: str,
        expected_mod_revision: int,
        value: bytes,
        *,
        lease: Lease | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int | None:
        await asyncio.sleep(0)
        return self._host.compare_and_swap(key, expected_mod_revision, value, incarnation_of(lease))

    async def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        await asyncio.sleep(0)
        return self._host.delete(key)

    async def delete_prefix(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        await asyncio.sleep(0)
        return self._host.delete_prefix(prefix)

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Lease:
        await asyncio.sleep(0)
        granted_at_s = self._host.clock.now_s()
        return self._leases.hold(self._host.grant_lease(ttl_s), ttl_s, granted_at_s)

    def watch(
        self, prefix: str, from_revision: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncGenerator[WatchEvent]:
        backoff = Backoff(draw=self._rng.random)
        return watch_resuming(self._source, prefix, from_revision, backoff, timeout_s)

    async def close(self) -> None:
        self._source.closed = True
        self._leases.abandon_all()
        self._host.close()

    async def _refresh(self, incarnation_id: str, timeout_s: float) -> bool:
        return self._host.refresh_lease(incarnation_id)

    async def _revoke(self, incarnation_id: str, timeout_s: float) -> None:
        try:
            self._host.revoke_lease(incarnation_id)
        except LeaseLost:
            return


class _HostSource:
    """The host as a source of watches; it never loses its connection."""

    def __init__(self, host: StoreHost) -> None:
        self._host = host
        self.closed = False

    async def head(self, timeout_s: float) -> int:
        return self._host.revision

    async def list(self, prefix: str, at_revision: int, keys_only: bool, timeout_s: float) -> Listing:
        await asyncio.sleep(0)
        return self._host.range(prefix, at_revision)

    def stream(self, prefix: str, from_revision: int) -> AsyncGenerator[tuple[WatchEvent, ...]]:
        return self._host.changes(prefix, from_revision)
