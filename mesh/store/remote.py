"""The state store of another process, over gRPC (`penstock.v1.State`)."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc

from mesh.errors import LeaseLost, StoreUnavailable
from mesh.runtime import Runtime
from mesh.store.connection import Connection, Peer
from mesh.store.interface import DEFAULT_TIMEOUT_S, KeyValue, Listing, WatchEvent
from mesh.store.lease import HeldLeases, Lease, incarnation_of
from mesh.store.limits import check_value, key_bytes
from mesh.store.watching import watch_resuming
from penstock.v1 import state_pb2 as pb
from penstock.v1 import state_pb2_grpc

_WATCH_START_S = 3.0


class RemoteStore:
    """`StateStore` on a `StateService` elsewhere."""

    def __init__(self, endpoint: str, runtime: Runtime) -> None:
        """`endpoint` is the "host:port" of a store service. No connection is made before the first call."""
        self._clock = runtime.clock
        self._connection: Connection[Any] = Connection([endpoint], state_pb2_grpc.StateStub, runtime)
        self._source = _RemoteSource(self._connection)
        self._leases = HeldLeases(self._refresh, self._revoke, self._clock)

    async def get(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> KeyValue | None:
        key_bytes(key)
        request = pb.StateRangeRequest(select=pb.StateSelector(key=key))
        answer = await self._connection.call(
            lambda stub, left_s: stub.Range(request, timeout=left_s), timeout_s, resend=True
        )
        return _key_value(answer.entries[0]) if answer.entries else None

    async def range(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Listing:
        return await self._source.list(prefix, 0, False, timeout_s)

    async def put(
        self, key: str, value: bytes, *, lease: Lease | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> int:
        key_bytes(key)
        check_value(key, value)
        request = pb.StatePutRequest(key=key, value=value, incarnation_id=incarnation_of(lease))
        answer = await self._connection.call(
            lambda stub, left_s: stub.Put(request, timeout=left_s), timeout_s, resend=False
        )
        return int(answer.revision)

    async def compare_and_swap(
        self,
        key: str,
        expected_mod_revision: int,
        value: bytes,
        *,
        lease: Lease | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int | None:
        key_bytes(key)
        check_value(key, value)
        request = pb.StateCompareAndSwapRequest(
            key=key, expected_mod_revision=expected_mod_revision, value=value, incarnation_id=incarnation_of(lease)
        )
        answer = await self._connection.call(
            lambda stub, left_s: stub.CompareAndSwap(request, timeout=left_s), timeout_s, resend=False
        )
        return int(answer.revision) if answer.HasField("revision") else None

    async def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        key_bytes(key)
        return await self._delete(pb.StateSelector(key=key), timeout_s) > 0

    async def delete_prefix(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        return await self._delete(pb.StateSelector(prefix=prefix), timeout_s)

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Lease:
        granted_at_s = self._clock.now_s()
        request = pb.StateGrantLeaseRequest(ttl_s=ttl_s)
        # Sent twice it may leave a lease without keys behind, which ends by itself.
        answer = await self._connection.call(
            lambda stub, left_s: stub.GrantLease(request, timeout=left_s), timeout_s, resend=True
        )
        return self._leases.hold(answer.incarnation_id, answer.ttl_s, granted_at_s)

    def watch(
        self, prefix: str, from_revision: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncGenerator[WatchEvent]:
        return watch_resuming(self._source, prefix, from_revision, self._connection.backoff(), timeout_s)

    async def close(self) -> None:
        self._leases.abandon_all()
        await self._connection.close()

    async def _delete(self, select: pb.StateSelector, timeout_s: float) -> int:
        request = pb.StateDeleteRequest(select=select)
        answer = await self._connection.call(
            lambda stub, left_s: stub.Delete(request, timeout=left_s), timeout_s, resend=False
        )
        return int(answer.deleted)

    async def _refresh(self, incarnation_id: str, timeout_s: float) -> bool:
        request = pb.StateRefreshLeaseRequest(incarnation_id=incarnation_id)
        answer = await self._connection.call(
            lambda stub, left_s: stub.RefreshLease(request, timeout=left_s), timeout_s, resend=True
        )
        return bool(answer.alive)

    async def _revoke(self, incarnation_id: str, timeout_s: float) -> None:
        request = pb.StateRevokeLeaseRequest(incarnation_id=incarnation_id)
        try:
            await self._connection.call(
                lambda stub, left_s: stub.RevokeLease(request, timeout=left_s), timeout_s, resend=True
            )
        except LeaseLost:
            return


class _RemoteSource:
    """The other process as a source of watches."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection

    @property
    def closed(self) -> bool:
        return self._connection.closed

    async def head(self, timeout_s: float) -> int:
        request = pb.StateRangeRequest(select=pb.StateSelector(key="-"), keys_only=True)
        answer = await self._connection.call(
            lambda stub, left_s: stub.Range(request, timeout=left_s), timeout_s, resend=True
        )
        return int(answer.revision)

    async def list(self, prefix: str, at_revision: int, keys_only: bool, timeout_s: float) -> Listing:
        request = pb.StateRangeRequest(
            select=pb.StateSelector(prefix=prefix), at_revision=at_revision, keys_only=keys_only
        )
        answer = await self._connection.call(
            lambda stub, left_s: stub.Range(request, timeout=left_s), timeout_s, resend=True
        )
        return Listing(answer.revision, tuple(_key_value(entry) for entry in answer.entries))

    async def stream(self, prefix: str, from_revision: int) -> AsyncGenerator[Sequence[WatchEvent]]:
        peer = await self._connection.connected(_WATCH_START_S)
        call = peer.stubs.Watch(pb.StateWatchRequest(prefix=prefix, from_revision=from_revision))
        try:
            while (answer := await self._read(peer, call)) is not grpc.aio.EOF:
                yield [_watch_event(event) for event in answer.events]
            raise StoreUnavailable("the state store ended the watch")
        finally:
            call.cancel()

    async def _read(self, peer: Peer[Any], call: Any) -> Any:
        with self._connection.failures(peer):
            return await call.read()


def _key_value(entry: pb.StateEntry) -> KeyValue:
    return KeyValue(entry.key, entry.value, entry.mod_revision, entry.incarnation_id)


def _watch_event(event: pb.StateEvent) -> WatchEvent:
    entry = event.entry
    if event.kind == pb.StateEvent.KIND_DELETE:
        return WatchEvent("delete", entry.key, b"", entry.mod_revision)
    return WatchEvent("put", entry.key, entry.value, entry.mod_revision, entry.incarnation_id)
