"""Orders over a real server, with identities and without, and what the store remembers of them."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fault_simulation.loop import VirtualLoop
from mesh.audit.log import KEPT, MAX_UNWRITTEN, AuditLog, Unwritten, put_order, read_orders
from mesh.audit.orders import MAX_TEXT, ORDER_METHODS, Order, shown_parameters
from mesh.audit.recorder import OrderRecorder
from mesh.backoff import Backoff
from mesh.errors import StoreUnavailable
from mesh.identity.doors import AUDIT, SERVICES, may_write
from mesh.identity.identity import Identity
from mesh.rpc.client import open_channel
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemClock, SystemEntropy, Transport
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from penstock.v1 import cascade_pb2, scheduler_pb2, worker_pb2, worker_pb2_grpc
from tests.unit.mesh.identity.identities import an_authority, transport

LOOKS = {"Worker/WatchSteps", "Cascade/ExportSamples"}
"""Open to operators alone, and change nothing."""


class Moves(worker_pb2_grpc.WorkerServicer):
    """Moves one request only, and drains never."""

    async def Migrate(self, request: worker_pb2.MigrateRequest, context: Any) -> worker_pb2.MigrateResponse:
        if request.request_id == "r":
            return worker_pb2.MigrateResponse(moved=True)
        return worker_pb2.MigrateResponse(reason="it has ended")

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it drains already")
        raise AssertionError("abort raises")


@asynccontextmanager
async def ordered(by: Transport, audit: AuditLog) -> AsyncIterator[str]:
    """The address of a server that remembers orders."""
    server = RpcServer(by, watchers=(OrderRecorder(audit, lambda: 12.0),))
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, Moves(), "penstock.v1.Worker")
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


async def send(client: Transport, address: str, method: str, message: Any) -> None:
    async with open_channel(client, address, "worker") as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        try:
            await getattr(stub, method)(message, timeout=10)
        except grpc.aio.AioRpcError:
            return


@pytest.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    host = StoreHost(SystemClock(), SystemEntropy())
    opened = EmbeddedStore(host)
    yield opened
    await opened.close()
    host.close()


@pytest.mark.live
async def test_orders_of_operators_are_remembered_with_their_outcome(
    tmp_path: Path, store: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    authority, audit = an_authority(tmp_path), AuditLog("worker", "w-0")
    operator = transport(authority, tmp_path, "operator", "alice")
    caplog.set_level(logging.WARNING)
    async with ordered(transport(authority, tmp_path, "worker"), audit) as address:
        await send(operator, address, "Migrate", worker_pb2.MigrateRequest(request_id="r", target_instance_id="w-1"))
        await send(operator, address, "Migrate", worker_pb2.MigrateRequest(request_id="gone"))
        await send(operator, address, "Drain", worker_pb2.DrainRequest(migrate=True))
        scheduler = transport(authority, tmp_path, "scheduler")
        await send(scheduler, address, "Migrate", worker_pb2.MigrateRequest(request_id="r"))
        await send(transport(authority, tmp_path, "frontend"), address, "Drain", worker_pb2.DrainRequest())
    await audit.flush(store)
    who = "spiffe://mesh/operator/alice"
    assert await read_orders(store) == [
        Order(12_000, who, "migrate", "worker/w-0", {"request_id": "r", "target_instance_id": "w-1"}, "done"),
        Order(12_000, who, "migrate", "worker/w-0", {"request_id": "gone"}, "not moved: it has ended"),
        Order(12_000, who, "drain", "worker/w-0", {"migrate": "true"}, "FAILED_PRECONDITION: it drains already"),
    ], "neither what a scheduler orders in the course of its duty, nor what the guard refused"
    logged = [record for record in caplog.records if record.getMessage() == "an order"]
    assert [vars(record)["who"] for record in logged] == [who] * 3
    refused = [record for record in caplog.records if record.getMessage() == "a call was refused"]
    assert [vars(record)["caller"] for record in refused] == ["spiffe://mesh/frontend"]


@pytest.mark.live
async def test_without_identities_the_address_is_told_and_a_rescheduler_is_none(store: EmbeddedStore) -> None:
    audit = AuditLog("worker", "w-0")
    async with ordered(GrpcTransport(), audit) as address:
        by_duty = worker_pb2.MigrateRequest(request_id="r", fencing=worker_pb2.MigrateRequest().fencing)
        by_duty.fencing.SetInParent()
        await send(GrpcTransport(), address, "Migrate", by_duty)
        await send(GrpcTransport(), address, "Migrate", worker_pb2.MigrateRequest(request_id="r"))
    await audit.flush(store)
    (order,) = await read_orders(store)
    assert order.who.startswith("without identity, at ipv4:127.0.0.1:")


@pytest.mark.live
async def test_a_store_that_was_away_gets_the_orders_later(store: EmbeddedStore) -> None:
    audit, failures = AuditLog("worker", "w-0"), 3

    class Flaky(EmbeddedStore):
        async def get(self, key: str, **options: Any) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise StoreUnavailable("away")
            return await super().get(key, **options)

    flaky = Flaky(store._host)
    for number in range(MAX_UNWRITTEN + 2):
        audit.add(Order(number, "o", "drain", "worker/w-0"))
    writing = asyncio.create_task(audit.write(flaky, Backoff(0, 0)))
    async with asyncio.timeout(30):
        while len(await read_orders(store)) < MAX_UNWRITTEN:  # noqa: ASYNC110 (the store has no event for it)
            await asyncio.sleep(0)
    writing.cancel()
    assert [order.unix_ms for order in await read_orders(store)] == list(range(2, MAX_UNWRITTEN + 2)), "the newest"
    assert await read_orders(store, since_unix_ms=MAX_UNWRITTEN) == [
        Order(number, "o", "drain", "worker/w-0") for number in (MAX_UNWRITTEN, MAX_UNWRITTEN + 1)
    ]


class Halting(EmbeddedStore):
    """Stops for ever in one of its calls, before or after it has been carried out."""

    def __init__(self, host: StoreHost, calls_before: int, *, is_done: bool) -> None:
        super().__init__(host)
        self._calls_left = calls_before
        self._is_done = is_done
        self.halted = asyncio.Event()

    async def get(self, key: str, **options: Any) -> Any:
        return await self._answer(super().get, key, **options)

    async def compare_and_swap(self, *arguments: Any, **options: Any) -> Any:
        return await self._answer(super().compare_and_swap, *arguments, **options)

    async def put(self, *arguments: Any, **options: Any) -> Any:
        return await self._answer(super().put, *arguments, **options)

    async def _answer(self, call: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
        self._calls_left -= 1
        halts = self._calls_left < 0
        answer = await call(*arguments, **options) if self._is_done or not halts else None
        if halts:
            self.halted.set()
            await asyncio.Event().wait()
        return answer


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("calls_before", range(6))
def test_an_order_whose_writing_is_cancelled_is_there_once(calls_before: int, is_done: bool) -> None:
    """A process ends in any call that writes two orders, before the store has done it or before its answer comes."""

    async def play() -> None:
        host = StoreHost(SystemClock(), SystemEntropy())
        store, halting = EmbeddedStore(host), Halting(host, calls_before, is_done=is_done)
        audit = AuditLog("worker", "w-0")
        orders = [Order(number, "o", "drain", "worker/w-0") for number in range(2)]
        for order in orders:
            audit.add(order)
        writing = asyncio.create_task(audit.write(halting, Backoff(0, 0)))
        await halting.halted.wait()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await audit.flush(store)
        assert await read_orders(store) == orders
        for each in (store, halting):
            await each.close()
        host.close()

    VirtualLoop().run(play())


async def test_the_store_remembers_the_last_orders_of_each_role(store: EmbeddedStore) -> None:
    for number in range(KEPT + 3):
        await put_order(store, f"{AUDIT}worker/", Unwritten(Order(number, "o", "drain", "worker/w")))
    await put_order(store, f"{AUDIT}scheduler/", Unwritten(Order(0, "o", "policy", "scheduler/s")))
    await store.put(f"{AUDIT}worker/0007", b"whatever")
    orders = await read_orders(store)
    assert len(orders) == KEPT, "those of the ring but the broken one, and the scheduler's"
    assert [order.unix_ms for order in orders if order.order == "drain"][-1] == KEPT + 2
    assert min(order.unix_ms for order in orders if order.order == "drain") == 3


async def test_writers_at_once_overwrite_nothing(store: EmbeddedStore) -> None:
    orders = [Order(number, "o", "drain", f"worker/{number}") for number in range(4)]
    await asyncio.gather(*(put_order(store, f"{AUDIT}worker/", Unwritten(order)) for order in orders))
    assert await read_orders(store) == orders


def test_every_door_of_operators_alone_is_an_order_or_a_look() -> None:
    for_operators = {
        f"{service}/{method}" for service, methods in SERVICES.items() for method, roles in methods.items()
        if roles == {"operator"}
    }  # fmt: skip
    known = {path.removeprefix("/penstock.v1.") for path in ORDER_METHODS}
    assert for_operators - LOOKS <= known
    assert not LOOKS & known
    assert all(method in SERVICES[service] for service, method in (path.split("/") for path in known))


def test_members_write_what_their_own_role_was_ordered() -> None:
    worker = Identity("mesh", "worker", "w-0")
    assert may_write(worker, f"{AUDIT}worker/0001")
    assert not may_write(worker, f"{AUDIT}scheduler/0001")
    assert not may_write(worker, AUDIT)


def test_no_prompt_of_a_judge_is_told() -> None:
    cascade = cascade_pb2.CascadeDescription(
        name="c", tiers=["a", "b"], judges=["chat:http://user:password@judge"], rubric="my secret"
    )
    told = shown_parameters(
        ORDER_METHODS["/penstock.v1.Cascade/SetCascade"], cascade_pb2.SetCascadeRequest(cascade=cascade)
    )
    assert told == {"name": "c", "tiers": '["a", "b"]'}


@given(st.text(max_size=2 * MAX_TEXT), st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3))
def test_what_is_told_is_bounded_and_can_be_kept(policy: str, parameters: dict[str, float]) -> None:
    request = scheduler_pb2.SetPolicyRequest(policy=policy, parameters=parameters)
    told = shown_parameters(ORDER_METHODS["/penstock.v1.Scheduler/SetPolicy"], request)
    assert all(len(value) <= MAX_TEXT for value in told.values())
    assert told.get("policy", "") == (policy if len(policy) <= MAX_TEXT else f"{policy[: MAX_TEXT - 3]}...")
    json.dumps(told)
