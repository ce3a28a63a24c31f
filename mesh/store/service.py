"""The embedded store served to the neighbouring processes over gRPC (`penstock.v1.State`)."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeAlias

import grpc

from mesh.errors import LeaseLost, StoreCompacted, StoreError, StoreUnavailable
from mesh.identity.doors import may_write
from mesh.identity.guard import identity_of
from mesh.store.host import StoreHost
from mesh.store.interface import KeyValue, Listing, WatchEvent
from penstock.v1 import state_pb2 as pb
from penstock.v1 import state_pb2_grpc

log = logging.getLogger(__name__)

MAX_WATCHES = 8192
"""At once, of all clients: each member has one for its own announcement and one for whom it may meet."""
_KINDS: Final = {"put": pb.StateEvent.KIND_PUT, "delete": pb.StateEvent.KIND_DELETE}

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class StateService(state_pb2_grpc.StateServicer):
    """A thin shell around a `StoreHost`; the host stays its owner's to close."""

    def __init__(self, host: StoreHost, *, asks_who_writes: bool = False) -> None:
        """`asks_who_writes`: clients have identities, and write only the keys that are theirs."""
        self._host = host
        self._asks_who_writes = asks_who_writes
        self._watches = 0

    async def Range(self, request: pb.StateRangeRequest, context: Context) -> pb.StateRangeResponse:
        async with _refusals(context):
            listing = self._list(request)
        entries = [_entry(entry, with_value=not request.keys_only) for entry in listing.entries]
        return pb.StateRangeResponse(revision=listing.revision, entries=entries)

    async def Put(self, request: pb.StatePutRequest, context: Context) -> pb.StatePutResponse:
        await self._check_writer(request.key, context)
        async with _refusals(context):
            revision = self._host.put(request.key, request.value, request.incarnation_id)
        return pb.StatePutResponse(revision=revision)

    async def CompareAndSwap(
        self, request: pb.StateCompareAndSwapRequest, context: Context
    ) -> pb.StateCompareAndSwapResponse:
        await self._check_writer(request.key, context)
        async with _refusals(context):
            revision = self._host.compare_and_swap(
                request.key, request.expected_mod_revision, request.value, request.incarnation_id
            )
        return pb.StateCompareAndSwapResponse(revision=revision)

    async def Delete(self, request: pb.StateDeleteRequest, context: Context) -> pb.StateDeleteResponse:
        await self._check_writer(request.select.prefix or request.select.key, context)
        async with _refusals(context):
            if request.select.WhichOneof("selector") == "prefix":
                deleted = self._host.delete_prefix(request.select.prefix)
            else:
                deleted = int(self._host.delete(request.select.key))
        return pb.StateDeleteResponse(deleted=deleted)

    async def GrantLease(self, request: pb.StateGrantLeaseRequest, context: Context) -> pb.StateGrantLeaseResponse:
        async with _refusals(context):
            incarnation_id = self._host.grant_lease(request.ttl_s)
        return pb.StateGrantLeaseResponse(incarnation_id=incarnation_id, ttl_s=request.ttl_s)

    async def RefreshLease(
        self, request: pb.StateRefreshLeaseRequest, context: Context
    ) -> pb.StateRefreshLeaseResponse:
        async with _refusals(context):
            alive = self._host.refresh_lease(request.incarnation_id)
        return pb.StateRefreshLeaseResponse(alive=alive)

    async def RevokeLease(self, request: pb.StateRevokeLeaseRequest, context: Context) -> pb.StateRevokeLeaseResponse:
        async with _refusals(context):
            self._host.revoke_lease(request.incarnation_id)
        return pb.StateRevokeLeaseResponse()

    async def Watch(self, request: pb.StateWatchRequest, context: Context) -> AsyncGenerator[pb.StateWatchResponse]:
        if self._watches >= MAX_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"at most {MAX_WATCHES} watches at once")
        self._watches += 1
        try:
            async with (
                _refusals(context),
                aclosing(self._host.changes(request.prefix, request.from_revision)) as changes,
            ):
                async for events in changes:
                    yield pb.StateWatchResponse(events=[_event(event) for event in events])
        finally:
            self._watches -= 1

    async def _check_writer(self, key: str, context: Context) -> None:
        if not self._asks_who_writes:
            return
        writer = identity_of(context)
        if writer is None or not may_write(writer, key):
            log.error("a write was refused", extra={"key": key, "writer": str(writer), "peer": context.peer()})
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{writer} may not write {key}")

    def _list(self, request: pb.StateRangeRequest) -> Listing:
        if request.select.WhichOneof("selector") == "prefix":
            return self._host.range(request.select.prefix, request.at_revision)
        entry = self._host.get(request.select.key)
        return Listing(self._host.revision, (entry,) if entry else ())


@asynccontextmanager
async def _refusals(context: Context) -> AsyncIterator[None]:
    """Ends the call with the status that tells the client which error of the store it was."""
    try:
        yield
    except StoreError as error:
        await context.abort(_status(error), str(error))


def _status(error: StoreError) -> grpc.StatusCode:
    match error:
        case StoreCompacted():
            return grpc.StatusCode.OUT_OF_RANGE
        case LeaseLost():
            return grpc.StatusCode.NOT_FOUND
        case StoreUnavailable():
            return grpc.StatusCode.UNAVAILABLE
        case _:
            return grpc.StatusCode.INVALID_ARGUMENT


def _entry(entry: KeyValue, *, with_value: bool) -> pb.StateEntry:
    return pb.StateEntry(
        key=entry.key,
        value=entry.value if with_value else b"",
        mod_revision=entry.mod_revision,
        incarnation_id=entry.incarnation_id,
    )


def _event(event: WatchEvent) -> pb.StateEvent:
    entry = KeyValue(event.key, event.value, event.mod_revision, event.incarnation_id)
    return pb.StateEvent(kind=_KINDS[event.kind], entry=_entry(entry, with_value=True))
