"""Unary calls and answered streams in frames behave as gRPC's do, over whatever carries them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from mesh.identity.doors import DOORS
from mesh.rpc.client import open_channel
from mesh.rpc.framed.unary import MAX_CALLS, MAX_REQUEST_BYTES
from mesh.rpc.garbage import GarbageGuard
from mesh.rpc.limits import DEFAULT_DEADLINE_S, SERVER_OPTIONS
from mesh.runtime import Transport
from tests.unit.fault_simulation.grpc_servicer import Servicer
from tests.unit.mesh.framed.worlds import CARRIERS, METHODS, framed, transport_named
from tests.unit.mesh.identity.identities import an_authority
from tests.unit.mesh.identity.identities import transport as identified

pytestmark = pytest.mark.live

Code = grpc.StatusCode
UNARY = ("Echo", "Fail", "Refuse", "Hang", "Wait", "Large", "Soft", "Missing", "Count")


class World:
    """A server of unary methods, and a channel on which their calls already go as they are to go."""

    def __init__(self, server: grpc.aio.Server, servicer: Servicer, channel: Any, address: str) -> None:
        self.server = server
        self.servicer = servicer
        self.channel = channel
        self.address = address

    def call(self, name: str, request: Any = b"a", **options: Any) -> Any:
        return self.channel.unary_unary(f"/test.Service/{name}", bytes, bytes)(request, **options)

    @property
    def is_framed(self) -> bool:
        unary = getattr(self.channel, "_unary", None)
        return unary is not None and unary._is_open

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def handlers(servicer: Servicer) -> dict[str, grpc.RpcMethodHandler]:
    def decode(message: bytes) -> bytes:
        if message == b"garbage":
            raise DecodeError("no message")
        return message

    async def wait(request: bytes, context: Any) -> bytes:
        servicer.hung += 1
        await servicer.go_on.wait()
        return request

    async def soft(request: bytes, context: Any) -> bytes:
        context.set_code(Code.ABORTED)
        context.set_details("softly")
        return b""

    def unary(behaviour: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(behaviour, request_deserializer=decode, response_serializer=bytes)

    return {
        "Echo": unary(servicer.echo),
        "Fail": unary(servicer.fail),
        "Refuse": unary(servicer.refuse),
        "Hang": unary(servicer.hang),
        "Wait": unary(wait),
        "Large": unary(servicer.large),
        "Soft": unary(soft),
        "Count": grpc.unary_stream_rpc_method_handler(
            servicer.count, request_deserializer=decode, response_serializer=bytes
        ),
    }


@asynccontextmanager
async def world(transport: Transport, calls: Transport | None = None) -> AsyncIterator[World]:
    servicer = Servicer()
    server = transport.server(SERVER_OPTIONS, [GarbageGuard()])
    server.add_registered_method_handlers("test.Service", handlers(servicer))
    address = f"127.0.0.1:{transport.listen(server, '127.0.0.1:0')}"
    await server.start()
    try:
        async with open_channel(calls or transport, address) as channel:
            it = World(server, servicer, channel, address)
            assert await it.call("Echo", b"first") == b"first"
            if hasattr(channel, "_unary"):
                await it.until(lambda: it.is_framed)
            yield it
    finally:
        await server.stop(None)


@pytest.fixture(autouse=True)
def methods(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [f"/test.Service/{name}" for name in (*METHODS, *UNARY)]
    monkeypatch.setattr("tests.unit.mesh.framed.worlds.PATHS", paths)
    for path in paths:
        monkeypatch.setitem(DOORS, path, frozenset({"worker"}))


@pytest.fixture(params=CARRIERS)
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    return transport_named(request.param, tmp_path)


async def code_of(awaitable: Any) -> tuple[Code, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await awaitable
    return raised.value.code(), raised.value.details() or ""


async def test_answers(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with world(transport) as it:
        assert await it.call("Echo", b"") == b""
        requests = [str(number).encode() * (number % 40) for number in range(200)]
        assert await asyncio.gather(*(it.call("Echo", request) for request in requests)) == requests
        assert await code_of(it.call("Refuse")) == (Code.NOT_FOUND, "no such thing")
        assert await code_of(it.call("Soft")) == (Code.ABORTED, "softly")
        code, details = await code_of(it.call("Fail"))
        assert code is Code.UNKNOWN
        assert "a bug" in details
        assert (await code_of(it.call("Missing")))[0] is Code.UNIMPLEMENTED
        code, details = await code_of(it.call("Echo", b"garbage"))
        assert code is Code.INVALID_ARGUMENT
        assert "no message" in details


async def test_deadlines_and_calls_that_are_given_up(transport: Transport) -> None:
    async with world(transport) as it:
        assert (await code_of(it.call("Hang", timeout=1.0)))[0] is Code.DEADLINE_EXCEEDED
        await it.until(lambda: it.servicer.seen[-1] == "cancelled")
        hanging = asyncio.ensure_future(it.call("Hang", timeout=60))
        await it.until(lambda: it.servicer.hung == 2)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        await it.until(lambda: it.servicer.seen[-2:] == ["cancelled", "cancelled"])
        assert await it.call("Echo", b"still") == b"still"
        left_s = it.servicer.seen[-1]
        # gRPC rounds a deadline up on its way: 5.009 of 5 s were left.
        assert 0 < left_s <= 1.01 * DEFAULT_DEADLINE_S


async def test_a_server_that_ends_ends_its_calls(transport: Transport) -> None:
    async with world(transport) as it:
        hanging = asyncio.ensure_future(it.call("Hang", timeout=60))
        await it.until(lambda: it.servicer.hung == 1)
        await it.server.stop(None)
        assert (await code_of(hanging))[0] in (Code.UNAVAILABLE, Code.CANCELLED)
        assert (await code_of(it.call("Echo", timeout=5)))[0] is Code.UNAVAILABLE


async def test_closing_a_channel_gives_its_calls_up(transport: Transport) -> None:
    async with world(transport) as it:
        hanging = asyncio.ensure_future(it.call("Hang", timeout=60))
        await it.until(lambda: it.servicer.hung == 1)
        await it.channel.close()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        await it.until(lambda: "cancelled" in it.servicer.seen)


async def test_closing_a_channel_with_grace_lets_its_calls_have_their_answers(transport: Transport) -> None:
    async with world(transport) as it:
        waiting = asyncio.ensure_future(it.call("Wait", timeout=60))
        await it.until(lambda: it.servicer.hung == 1)
        closing = asyncio.create_task(it.channel.close(30))
        await asyncio.sleep(0)
        it.servicer.go_on.set()
        assert await waiting == b"a"
        await closing


async def test_a_call_that_outlasts_the_grace_is_given_up(transport: Transport) -> None:
    async with world(transport) as it:
        hanging = asyncio.ensure_future(it.call("Hang", timeout=60))
        await it.until(lambda: it.servicer.hung == 1)
        await it.channel.close(0.01)
        with pytest.raises(asyncio.CancelledError):
            await hanging


async def test_a_stream_of_answers(transport: Transport) -> None:
    async with world(transport) as it:
        call = it.channel.unary_stream("/test.Service/Count", bytes, bytes)(b"3")
        grpc_answers = [b"0", b"1", b"2"]
        assert [message async for message in call] == grpc_answers
        call = it.channel.unary_stream("/test.Service/Count", bytes, bytes)(b"garbage")
        assert (await code_of(call.read()))[0] is Code.INVALID_ARGUMENT


async def test_large_requests_and_crowds_take_grpc() -> None:
    async with world(framed()) as it:
        unary = it.channel._unary
        assert unary.takes(bytes(100))
        assert not unary.takes(bytes(MAX_REQUEST_BYTES + 1))
        hanging = [asyncio.ensure_future(it.call("Hang", timeout=60)) for _ in range(MAX_CALLS)]
        await it.until(lambda: len(unary._waiting) == MAX_CALLS)
        assert not unary.takes(b"")
        assert await it.call("Echo", b"over gRPC", timeout=30) == b"over gRPC"
        for each in hanging:
            each.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        assert unary.takes(b"")


async def test_a_peer_without_frames_is_called_over_grpc() -> None:
    registry = CollectorRegistry()
    plain = transport_named("grpc", Path())
    servicer = Servicer()
    server = plain.server(SERVER_OPTIONS, [])
    server.add_registered_method_handlers("test.Service", handlers(servicer))
    address = f"127.0.0.1:{plain.listen(server, '127.0.0.1:0')}"
    await server.start()
    async with open_channel(framed(registry), address) as channel:
        call: Any = channel.unary_unary("/test.Service/Echo", bytes, bytes)
        for _ in range(3):
            assert await call(b"a") == b"a"
            await asyncio.sleep(0.05)
        assert channel._unary._outbox is None, "and is asked again some time later"  # type: ignore[attr-defined]
    await server.stop(None)


@pytest.mark.parametrize("name", ["unix", "tcp"])
async def test_each_call_is_asked_at_its_own_door(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DOORS, "/test.Service/Refuse", frozenset({"planner"}))
    authority, switch = an_authority(tmp_path), "1" if name == "unix" else "tcp"
    serves = framed(inner=identified(authority, tmp_path, "worker", "w-0"), switch=switch)
    calls = framed(inner=identified(authority, tmp_path, "worker", "w-1"), switch=switch)
    async with world(serves, calls) as it:
        code, details = await code_of(it.call("Refuse"))
        assert code is Code.PERMISSION_DENIED
        assert "spiffe://mesh/worker/w-1 may not call /test.Service/Refuse" in details
        assert await it.call("Echo") == b"a"
        assert it.is_framed
