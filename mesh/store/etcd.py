"""The state store on etcd 3.4 or newer, one to several endpoints of one cluster.

Only aetcd's generated stubs are used. Its own client has one timeout for all calls, and its watcher does not tell when
the server ends the stream or cancels a watch, so nothing could resume there.
"""

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from aetcd import rpc

from mesh.errors import LeaseLost, StoreCompacted, StoreUnavailable
from mesh.runtime import GrpcTransport, Runtime
from mesh.store.connection import Connection, Peer
from mesh.store.interface import DEFAULT_TIMEOUT_S, KeyValue, Listing, WatchEvent
from mesh.store.lease import HeldLeases, Lease, incarnation_of
from mesh.store.limits import check_value, key_bytes
from mesh.store.watching import watch_resuming

# Has a member that lost its leader end our watches instead of leaving them silent.
_WATCH_METADATA: Final = (("hasleader", "true"),)
_WATCH_START_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class _Stubs:
    kv: Any
    lease: Any
    watch: Any


class EtcdStore:
    """`StateStore` on etcd. Reads are linearizable; leases have whole seconds.

    An etcd that comes back empty is noticed by its lower revision only: a watch that is cut off until the new data has
    as many revisions as the old had takes it for the old one.
    """

    def __init__(self, endpoints: Sequence[str], runtime: Runtime, *, tls: bool = False) -> None:
        """`endpoints`: "host:port" of members of one cluster, the preferred one first. `tls`: with this process's
        certificate, whose common name, its role, is the user that etcd knows."""
        self._clock = runtime.clock
        if tls:
            transport = runtime.transport.to_others()
        else:
            transport = GrpcTransport() if runtime.transport.identity else runtime.transport
        self._connection = Connection(endpoints, _make_stubs, runtime, transport)
        self._source = _EtcdSource(self._connection)
        self._leases = HeldLeases(self._refresh, self._revoke, self._clock)

    async def get(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> KeyValue | None:
        request = rpc.RangeRequest(key=key_bytes(key))
        answer = await self._connection.call(
            lambda stubs, left_s: stubs.kv.Range(request, timeout=left_s), timeout_s, resend=True
        )
        return _key_value(answer.kvs[0]) if answer.kvs else None

    async def range(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Listing:
        return await self._source.list(prefix, 0, False, timeout_s)

    async def put(
        self, key: str, value: bytes, *, lease: Lease | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> int:
        request = _put_request(key, value, lease)
        answer = await self._connection.call(
            lambda stubs, left_s: stubs.kv.Put(request, timeout=left_s), timeout_s, resend=False
        )
        return int(answer.header.revision)

    async def compare_and_swap(
        self,
        key: str,
        expected_mod_revision: int,
        value: bytes,
        *,
        lease: Lease | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int | None:
        unchanged = rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key_bytes(key), mod_revision=expected_mod_revision
        )
        write = rpc.RequestOp(request_put=_put_request(key, value, lease))
        request = rpc.TxnRequest(compare=[unchanged], success=[write])
        answer = await self._connection.call(
            lambda stubs, left_s: stubs.kv.Txn(request, timeout=left_s), timeout_s, resend=False
        )
        return int(answer.header.revision) if answer.succeeded else None

    async def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        return await self._delete(rpc.DeleteRangeRequest(key=key_bytes(key)), timeout_s) > 0

    async def delete_prefix(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        first, end = _prefix_range(prefix)
        return await self._delete(rpc.DeleteRangeRequest(key=first, range_end=end), timeout_s)

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Lease:
        granted_at_s = self._clock.now_s()
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        # Sent twice it may leave a lease without keys behind, which ends by itself.
        answer = await self._connection.call(
            lambda stubs, left_s: stubs.lease.LeaseGrant(request, timeout=left_s), timeout_s, resend=True
        )
        return self._leases.hold(_incarnation_id(answer.ID), float(answer.TTL), granted_at_s)

    def watch(
        self, prefix: str, from_revision: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncGenerator[WatchEvent]:
        return watch_resuming(self._source, prefix, from_revision, self._connection.backoff(), timeout_s)

    async def close(self) -> None:
        self._leases.abandon_all()
        await self._connection.close()

    async def _delete(self, request: Any, timeout_s: float) -> int:
        answer = await self._connection.call(
            lambda stubs, left_s: stubs.kv.DeleteRange(request, timeout=left_s), timeout_s, resend=False
        )
        return int(answer.deleted)

    async def _refresh(self, incarnation_id: str, timeout_s: float) -> bool:
        request = rpc.LeaseKeepAliveRequest(ID=_lease_id(incarnation_id))

        async def send(stubs: _Stubs, left_s: float) -> bool:
            # A stream per refresh: at three refreshes per ttl, one more thing to resume would not pay.
            async for answer in stubs.lease.LeaseKeepAlive(iter((request,)), timeout=left_s):
                return bool(answer.TTL > 0)
            raise StoreUnavailable("etcd ended the keep-alive stream without an answer")

        return await self._connection.call(send, timeout_s, resend=True)

    async def _revoke(self, incarnation_id: str, timeout_s: float) -> None:
        request = rpc.LeaseRevokeRequest(ID=_lease_id(incarnation_id))
        try:
            await self._connection.call(
                lambda stubs, left_s: stubs.lease.LeaseRevoke(request, timeout=left_s), timeout_s, resend=True
            )
        except LeaseLost:
            return


class _EtcdSource:
    """etcd as a source of watches."""

    def __init__(self, connection: Connection[_Stubs]) -> None:
        self._connection = connection

    @property
    def closed(self) -> bool:
        return self._connection.closed

    async def head(self, timeout_s: float) -> int:
        request = rpc.RangeRequest(key=b"\0", limit=1, keys_only=True)
        answer = await self._connection.call(
            lambda stubs, left_s: stubs.kv.Range(request, timeout=left_s), timeout_s, resend=True
        )
        return int(answer.header.revision)

    async def list(self, prefix: str, at_revision: int, keys_only: bool, timeout_s: float) -> Listing:
        first, end = _prefix_range(prefix)
        request = rpc.RangeRequest(key=first, range_end=end, revision=at_revision, keys_only=keys_only)
        answer = await self._connection.call(
            lambda stubs, left_s: stubs.kv.Range(request, timeout=left_s), timeout_s, resend=True
        )
        return Listing(int(answer.header.revision), tuple(_key_value(pair) for pair in answer.kvs))

    async def stream(self, prefix: str, from_revision: int) -> AsyncGenerator[Sequence[WatchEvent]]:
        first, end = _prefix_range(prefix)
        # `fragment` keeps messages small: events of one revision may then arrive in several.
        create = rpc.WatchCreateRequest(key=first, range_end=end, start_revision=from_revision, fragment=True)
        peer = await self._connection.connected(_WATCH_START_S)
        call = peer.stubs.watch.Watch(metadata=_WATCH_METADATA)
        try:
            with self._connection.failures(peer):
                await call.write(rpc.WatchRequest(create_request=create))
            while (answer := await self._read(peer, call)) is not grpc.aio.EOF:
                if answer.compact_revision:
                    raise StoreCompacted(f"etcd has compacted up to revision {answer.compact_revision}")
                if answer.canceled:
                    raise StoreUnavailable(f"etcd cancelled the watch: {answer.cancel_reason or 'no reason given'}")
                yield [_watch_event(event) for event in answer.events]
            raise StoreUnavailable("etcd ended the watch")
        finally:
            call.cancel()

    async def _read(self, peer: Peer[_Stubs], call: Any) -> Any:
        with self._connection.failures(peer):
            return await call.read()


def _make_stubs(channel: grpc.aio.Channel) -> _Stubs:
    return _Stubs(rpc.KVStub(channel), rpc.LeaseStub(channel), rpc.WatchStub(channel))


def _prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """First key and first key after the prefix, as etcd wants them; two zero bytes mean every key."""
    if not prefix:
        return b"\0", b"\0"
    # UTF-8 never holds the byte 0xff, so the last one can always be counted up.
    first = key_bytes(prefix)
    return first, first[:-1] + bytes([first[-1] + 1])


def _put_request(key: str, value: bytes, lease: Lease | None) -> Any:
    check_value(key, value)
    return rpc.PutRequest(key=key_bytes(key), value=value, lease=_lease_id(incarnation_of(lease)))


def _lease_id(incarnation_id: str) -> int:
    return int(incarnation_id, 16) if incarnation_id else 0


def _incarnation_id(lease_id: int) -> str:
    return f"{lease_id:016x}" if lease_id else ""


def _key_value(pair: Any) -> KeyValue:
    return KeyValue(_text(pair.key), pair.value, pair.mod_revision, _incarnation_id(pair.lease))


def _watch_event(event: Any) -> WatchEvent:
    pair = event.kv
    if event.type == rpc.Event.DELETE:
        return WatchEvent("delete", _text(pair.key), b"", pair.mod_revision)
    return WatchEvent("put", _text(pair.key), pair.value, pair.mod_revision, _incarnation_id(pair.lease))


def _text(key: bytes) -> str:
    # Somebody else's keys in a shared etcd need not be UTF-8; they must not break a listing.
    return key.decode(errors="backslashreplace")
