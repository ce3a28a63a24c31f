"""The simulated gRPC behaves as grpc.aio does: each scenario runs in both worlds, with the same assertions."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from mesh.rpc.client import DefaultDeadline
from mesh.rpc.metrics import RpcMetrics
from tests.unit.fault_simulation.grpc_servicer import Servicer
from tests.unit.fault_simulation.grpc_worlds import RealWorld, SimulatedWorld, answer_of

pytestmark = pytest.mark.live

FAST = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
)
Code = grpc.StatusCode
State = grpc.ChannelConnectivity


@pytest.fixture(params=[RealWorld, SimulatedWorld], ids=["real", "simulated"])
def world(request: pytest.FixtureRequest) -> Any:
    return request.param()


async def _serve(world: Any, options: Any = (), interceptors: Any = ()) -> tuple[Servicer, grpc.aio.Server, str]:
    servicer = Servicer()
    server = world.new_server(options, interceptors)
    server.add_generic_rpc_handlers((servicer.handlers(),))
    return servicer, server, await world.serve(server)


def _method(channel: grpc.aio.Channel, name: str) -> Callable[..., Any]:
    kind = {"Count": "unary_stream", "Sum": "stream_unary"}.get(name)
    if kind is None:
        unary = name in ("Echo", "Fail", "Refuse", "Hang", "CancelItself", "Large", "Missing")
        kind = "unary_unary" if unary else "stream_stream"
    return getattr(channel, kind)(f"/test.Service/{name}")  # type: ignore[no-any-return]


async def _failure(awaitable: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await awaitable
    return raised.value


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event in one of the two worlds
            await asyncio.sleep(0.005)


def test_all_kinds_of_calls(world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, server, address = await _serve(world)
        async with world.channel(address) as channel:
            assert await _method(channel, "Echo")(b"x") == b"x"
            assert [message async for message in _method(channel, "Count")(b"3")] == [b"0", b"1", b"2"]

            async def numbers() -> AsyncIterator[bytes]:
                for number in (b"1", b"2", b"39"):
                    yield number

            assert await _method(channel, "Sum")(numbers()) == b"42"
            for name in ("Upper", "UpperByContext"):
                assert [message async for message in _method(channel, name)(numbers())] == [b"1", b"2", b"39"]
                call = _method(channel, name)()
                await call.write(b"a")
                assert await call.read() == b"A"
                await call.write(b"b")
                await call.done_writing()
                assert await call.read() == b"B"
                assert await call.read() is grpc.aio.EOF
                assert await call.code() is Code.OK
        await server.stop(None)

    world.run(scenario)


def test_errors_of_servicers(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    async def scenario(world: Any) -> None:
        _, server, address = await _serve(world)
        async with world.channel(address) as channel:
            error = await _failure(_method(channel, "Refuse")(b""))
            assert (error.code(), error.details()) == (Code.NOT_FOUND, "no such thing")
            assert ("reason", "gone") in list(error.trailing_metadata())
            error = await _failure(_method(channel, "Fail")(b""))
            assert error.code() is Code.UNKNOWN
            assert "a bug" in error.details()
            assert (await _failure(_method(channel, "Missing")(b""))).code() is Code.UNIMPLEMENTED
            call = _method(channel, "RefuseLate")()
            assert await call.read() == b"first"
            error = await _failure(call.read())
            assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, "enough")
            assert (await _failure(call.read())).code() is Code.RESOURCE_EXHAUSTED
            assert await call.code() is Code.RESOURCE_EXHAUSTED
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(b"late")
            # A handler that cancels itself leaves its client without an answer.
            error = await _failure(_method(channel, "CancelItself")(b"", timeout=0.3))
            assert error.code() is Code.DEADLINE_EXCEEDED
        await server.stop(None)

    world.run(scenario)


def test_a_server_that_ends_early(world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, server, address = await _serve(world)
        async with world.channel(address) as channel:
            call = _method(channel, "One")()
            assert await call.read() == b"one"
            assert await call.read() is grpc.aio.EOF
            assert await call.read() is grpc.aio.EOF
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(b"late")
            assert call.cancel() is False
            assert call.done()
            assert not call.cancelled()
        await server.stop(None)

    world.run(scenario)


def test_deadlines(world: Any) -> None:
    async def scenario(world: Any) -> None:
        servicer, server, address = await _serve(world)
        async with world.channel(address) as channel:
            error = await _failure(_method(channel, "Hang")(b"", timeout=0.2))
            assert (error.code(), error.details()) == (Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
            await _until(lambda: servicer.seen == ["cancelled"])
            call = _method(channel, "Listen")(timeout=0.3)
            assert await call.read() == b"listening"
            assert (await _failure(call.read())).code() is Code.DEADLINE_EXCEEDED
            await _until(lambda: servicer.seen == ["cancelled"] * 2)
            await _method(channel, "Echo")(b"", timeout=5)
            assert 4 < servicer.seen.pop() <= 5.2
            await _method(channel, "Echo")(b"")
            assert servicer.seen.pop() is None
        await server.stop(None)

    world.run(scenario)


def test_the_default_deadline_of_the_mesh(world: Any) -> None:
    async def scenario(world: Any) -> None:
        servicer, server, address = await _serve(world)
        async with world.channel(address, interceptors=[DefaultDeadline()]) as channel:
            assert await _method(channel, "Echo")(b"x") == b"x"
            assert 4 < servicer.seen.pop() <= 5.2
            assert await _method(channel, "Echo")(b"x", timeout=60) == b"x"
            assert 59 < servicer.seen.pop() <= 61
            assert (await _failure(_method(channel, "Refuse")(b""))).code() is Code.NOT_FOUND
            call = asyncio.ensure_future(_method(channel, "Hang")(b""))
            await asyncio.sleep(0.1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await _until(lambda: servicer.seen == ["cancelled"])
        await server.stop(None)

    world.run(scenario)


def test_cancelling(world: Any) -> None:
    async def scenario(world: Any) -> None:
        servicer, server, address = await _serve(world)
        async with world.channel(address) as channel:
            call = _method(channel, "Listen")()
            await call.write(b"x")
            assert await call.read() == b"listening"
            assert call.cancel() is True
            assert call.cancel() is False
            assert call.done()
            assert call.cancelled()
            for _ in range(2):
                with pytest.raises(asyncio.CancelledError):
                    await call.read()
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(b"late")
            assert await call.code() is Code.CANCELLED
            await _until(lambda: servicer.seen[-1:] == ["cancelled"])
            servicer.seen.clear()
            # Cancelling who reads cancels the call.
            call = _method(channel, "Listen")()
            assert await call.read() == b"listening"
            reader = asyncio.create_task(call.read())
            await asyncio.sleep(0.05)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert call.cancelled()
            await _until(lambda: servicer.seen == ["cancelled"])
            # As does the end of the channel.
            call = _method(channel, "Listen")()
            assert await call.read() == b"listening"
            reader = asyncio.create_task(call.read())
            unary = asyncio.ensure_future(_method(channel, "Hang")(b""))
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await reader
        with pytest.raises(asyncio.CancelledError):
            await unary
        await _until(lambda: servicer.seen == ["cancelled"] * 3)
        assert channel.get_state() is State.SHUTDOWN
        with pytest.raises(grpc.aio.UsageError):
            await _method(channel, "Echo")(b"")
        await server.stop(None)

    world.run(scenario)


def test_half_close(world: Any) -> None:
    async def scenario(world: Any) -> None:
        servicer, server, address = await _serve(world)
        async with world.channel(address) as channel:
            servicer.tells_half_close = True
            call = _method(channel, "Listen")()
            await call.write(b"x")
            await call.done_writing()
            await call.done_writing()
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(b"y")
            await _until(lambda: servicer.seen == [b"x", "half-closed"])
            assert not call.done()

            async def breaks() -> AsyncIterator[bytes]:
                yield b"x"
                raise ValueError("a bug of the client")

            call = _method(channel, "Listen")(breaks())

            async def read_on() -> None:
                while True:
                    await call.read()

            with pytest.raises(asyncio.CancelledError):
                await read_on()
        await server.stop(None)

    world.run(scenario)


@pytest.mark.slow
def test_a_writer_waits_for_who_does_not_read(world: Any) -> None:
    async def scenario(world: Any) -> None:
        servicer, server, address = await _serve(world)
        async with world.channel(address) as channel:
            call = _method(channel, "Ignore")()
            assert await call.read() == b"ignoring"
            written = 0

            async def write() -> None:
                nonlocal written
                for _ in range(2048):
                    await call.write(bytes(16384))
                    written += 16384
                await call.done_writing()

            writer = asyncio.create_task(write())
            await asyncio.sleep(0.7)
            assert 65536 - 16384 <= written <= 16 * 2**20
            blocked = written
            await asyncio.sleep(0.3)
            assert written == blocked
            servicer.go_on.set()
            await writer
            assert await call.read() == str(2048 * 16384).encode()

            call = _method(channel, "Pour")()
            assert len(await call.read()) == 16384
            await asyncio.sleep(0.7)
            poured = sum(servicer.seen)
            assert 65536 - 16384 <= poured <= 16 * 2**20
            for _ in range(2047):
                assert len(await call.read()) == 16384
            assert await call.read() is grpc.aio.EOF
        await server.stop(None)

    world.run(scenario)


def test_a_cancelled_writer_cancels_its_call(world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, server, address = await _serve(world)
        async with world.channel(address) as channel:
            call = _method(channel, "Ignore")()
            assert await call.read() == b"ignoring"

            async def write() -> None:
                while True:
                    await call.write(bytes(16384))

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(write(), 0.7)
            assert call.cancelled()
        await server.stop(None)

    world.run(scenario)


def test_messages_that_are_too_large(world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, server, address = await _serve(world, (("grpc.max_receive_message_length", 1000),))
        options = (("grpc.max_send_message_length", 5000), ("grpc.max_receive_message_length", 2000))
        async with world.channel(address, options) as channel:
            assert len(await _method(channel, "Large")(b"2000")) == 2000
            for method, request in (("Large", b"2001"), ("Echo", bytes(1001)), ("Echo", bytes(5001))):
                error = await _failure(_method(channel, method)(request))
                assert error.code() is Code.RESOURCE_EXHAUSTED
                assert "larger than max" in error.details()
        await server.stop(None)

    world.run(scenario)


@pytest.mark.slow
def test_what_the_server_sent_before_its_end_is_read(world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, server, address = await _serve(world)
        async with world.channel(address) as channel:
            call = _method(channel, "Count")(b"3")
            await asyncio.sleep(0.3)
            assert not call.done()
            assert [await call.read() for _ in range(3)] == [b"0", b"1", b"2"]
            assert await call.read() is grpc.aio.EOF
            assert call.done()
        await server.stop(None)

    world.run(scenario)


def test_stopping_a_server(world: Any) -> None:
    async def scenario(world: Any) -> None:
        servicer, server, address = await _serve(world)
        async with world.channel(address, FAST) as channel:
            call = _method(channel, "Listen")()
            assert await call.read() == b"listening"
            unary = asyncio.ensure_future(_method(channel, "Hang")(b""))
            ending = _method(channel, "Ignore")()
            assert await ending.read() == b"ignoring"
            await ending.done_writing()
            await asyncio.sleep(0.05)
            stopping = asyncio.create_task(server.stop(0.5))
            await asyncio.sleep(0.1)
            assert channel.get_state() is State.IDLE
            assert not call.done()
            servicer.go_on.set()
            assert await ending.read() == b"0"
            assert await ending.read() is grpc.aio.EOF
            error = await _failure(call.read())
            assert error.code() is Code.UNAVAILABLE
            assert (await _failure(unary)).code() is Code.UNAVAILABLE
            await stopping
            assert servicer.seen == ["cancelled", "cancelled"]
            assert (await _failure(_method(channel, "Echo")(b"", timeout=2))).code() is Code.UNAVAILABLE

    world.run(scenario)


def test_a_connection_that_is_reset(world: Any) -> None:
    async def scenario(world: Any) -> None:
        servicer, server, address = await _serve(world)
        async with world.channel(address, FAST) as channel:
            call = _method(channel, "Listen")()
            assert await call.read() == b"listening"
            unary = asyncio.ensure_future(_method(channel, "Hang")(b""))
            await asyncio.sleep(0.1)
            world.break_connections()
            assert (await _failure(call.read())).code() is Code.UNAVAILABLE
            assert (await _failure(unary)).code() is Code.UNAVAILABLE
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(b"x")
            await _until(lambda: servicer.seen == ["cancelled", "cancelled"])
            assert await answer_of(lambda: _method(channel, "Echo")(b"again", timeout=2)) == b"again"
        await server.stop(None)

    world.run(scenario)


def test_nobody_listens_and_then_somebody_does(world: Any) -> None:
    async def scenario(world: Any) -> None:
        address = await world.free_address()
        async with world.channel(address, FAST) as channel:
            assert channel.get_state() is State.IDLE
            assert channel.get_state(try_to_connect=True) is State.IDLE
            await channel.wait_for_state_change(State.IDLE)
            while (state := channel.get_state()) is not State.TRANSIENT_FAILURE:
                assert state is State.CONNECTING
                await channel.wait_for_state_change(state)
            error = await _failure(_method(channel, "Echo")(b"", timeout=2))
            assert error.code() is Code.UNAVAILABLE
            assert "failed to connect" in error.details()
            # It stays so while it tries on by itself.
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(channel.wait_for_state_change(State.TRANSIENT_FAILURE), 0.6)
            patient = asyncio.ensure_future(_method(channel, "Echo")(b"patient", timeout=5, wait_for_ready=True))
            await asyncio.sleep(0.05)
            servicer = Servicer()
            server = world.new_server()
            server.add_generic_rpc_handlers((servicer.handlers(),))
            await world.serve(server, address)
            async with asyncio.timeout(2):
                await channel.wait_for_state_change(State.TRANSIENT_FAILURE)
                assert channel.get_state() is State.READY
                await channel.channel_ready()
                assert await patient == b"patient"
            await server.stop(None)
            async with asyncio.timeout(2):
                await channel.wait_for_state_change(State.READY)
            assert channel.get_state() is State.IDLE

    world.run(scenario)


def test_keep_alive_ends_a_connection_that_is_cut(world: Any) -> None:
    keepalive = (
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 500),
        ("grpc.http2.ping_timeout_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
    )

    async def scenario(world: Any) -> None:
        servicer, server, address = await _serve(world, keepalive)
        async with world.channel(address, (*FAST, *keepalive)) as channel:
            call = _method(channel, "Listen")()
            assert await call.read() == b"listening"
            await asyncio.sleep(2.2)
            assert not call.done()
            world.cut()
            cut_s = asyncio.get_running_loop().time()
            await call.write(b"lost")
            assert (await _failure(call.read())).code() is Code.UNAVAILABLE
            assert 0.3 < asyncio.get_running_loop().time() - cut_s < 2.5
            await _until(lambda: servicer.seen == ["cancelled"])
            error = await _failure(_method(channel, "Echo")(b"", timeout=0.8))
            assert error.code() in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
            world.heal()
            assert await _method(channel, "Echo")(b"back", timeout=5, wait_for_ready=True) == b"back"
        await server.stop(None)

    world.run(scenario)


def test_a_short_cut_only_delays(world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, server, address = await _serve(world)
        async with world.channel(address) as channel:
            call = _method(channel, "Upper")()
            await call.write(b"a")
            assert await call.read() == b"A"
            world.cut()
            await call.write(b"b")
            await call.write(b"c")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(first := asyncio.ensure_future(call.read())), 0.4)
            world.heal()
            assert await first == b"B"
            assert await call.read() == b"C"
        await server.stop(None)

    world.run(scenario)


def test_interceptors_and_health_of_the_mesh(world: Any) -> None:
    async def scenario(world: Any) -> None:
        registry = CollectorRegistry()
        server = world.new_server((), [RpcMetrics(registry)])
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        await checks.set("it", health_pb2.HealthCheckResponse.SERVING)
        address = await world.serve(server)
        async with world.channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="it"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="it"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await checks.set("it", health_pb2.HealthCheckResponse.NOT_SERVING)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        labels = {"method": "/grpc.health.v1.Health/Check"}
        assert registry.get_sample_value("penstock_rpc_calls_total", labels) == 1
        await server.stop(None)

    world.run(scenario)
