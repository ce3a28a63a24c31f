"""A framed stream behaves as gRPC's does: each scenario runs over all of them, with the same assertions."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from mesh.identity.doors import DOORS
from mesh.runtime import Transport
from tests.unit.mesh.framed.worlds import CARRIERS, PATHS, fallbacks, framed, letters, transport_named, world

pytestmark = pytest.mark.live

Code = grpc.StatusCode


@pytest.fixture(params=CARRIERS)
def transport(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    for path in (*PATHS, "/test.Service/Missing"):
        monkeypatch.setitem(DOORS, path, frozenset({"worker"}))
    registry = CollectorRegistry()
    yield transport_named(request.param, tmp_path, registry)
    assert fallbacks(registry) == 0


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event in one of the two
            await asyncio.sleep(0.005)


async def _failure(awaitable: object) -> tuple[Code, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await awaitable  # type: ignore[misc]
    return raised.value.code(), raised.value.details() or ""


async def test_messages_both_ways(transport: Transport) -> None:
    async with world(transport, transport) as it:
        for name in ("Upper", "UpperByContext"):
            assert [message async for message in it.call(name, letters(b"a", b"", b"c"))] == [b"A", b"", b"C"]
            call = it.call(name)
            await call.write(b"a")
            assert await call.read() == b"A"
            assert not call.done()
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert call.done()
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(b"late")
        assert [message async for message in it.call("One")] == [b"one"]


async def test_how_answers_end(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with world(transport, transport) as it:
        call = it.call("RefuseLate")
        assert await call.read() == b"first"
        assert await _failure(call.read()) == (Code.RESOURCE_EXHAUSTED, "enough")
        call = it.call("Fail")
        assert await call.read() == b"first"
        code, details = await _failure(call.read())
        assert code is Code.UNKNOWN
        assert "a bug" in details
        assert not call.cancel()
        assert (await _failure(it.call("Missing").read()))[0] is Code.UNIMPLEMENTED


async def test_a_call_that_is_given_up(transport: Transport) -> None:
    async with world(transport, transport) as it:
        call = it.call("Listen")
        assert await call.read() == b"listening"
        await call.write(b"heard")
        await _until(lambda: it.servicer.seen == [b"heard"])
        reading = asyncio.ensure_future(call.read())
        await asyncio.sleep(0)
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert call.cancelled()
        assert call.done()
        await _until(lambda: it.servicer.seen == [b"heard", "cancelled"])
        with pytest.raises(asyncio.CancelledError):
            await call.read()


async def test_a_call_that_is_given_up_before_it_is_open(transport: Transport) -> None:
    async with world(transport, transport) as it:
        call = it.call("Listen")
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()


async def test_a_reader_that_is_cancelled_gives_its_call_up(transport: Transport) -> None:
    async with world(transport, transport) as it:
        call = it.call("Listen")
        assert await call.read() == b"listening"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call.read()
        await _until(lambda: it.servicer.seen == ["cancelled"])


async def test_who_does_not_read_holds_up_who_writes(transport: Transport) -> None:
    async with world(transport, transport) as it:
        call = it.call("Pour")
        assert len(await call.read()) == 16384
        await asyncio.sleep(0.3)
        # 32 MiB are to come; what is under way is bounded by the windows of either transport
        assert sum(it.servicer.seen) < 16 << 20
        before = sum(it.servicer.seen)
        for _ in range(512):
            assert len(await call.read()) == 16384
        await _until(lambda: sum(it.servicer.seen) > before)
        call.cancel()


async def test_a_servicer_that_does_not_read_holds_up_who_writes(transport: Transport) -> None:
    async with world(transport, transport) as it:
        call = it.call("Ignore")
        assert await call.read() == b"ignoring"
        written = 0

        async def write() -> None:
            nonlocal written
            for _ in range(600):
                await call.write(bytes(16384))
                written += 1
            await call.done_writing()

        writing = asyncio.ensure_future(write())
        await asyncio.sleep(0.3)
        assert 0 < written < 600
        it.servicer.go_on.set()
        assert await call.read() == str(600 * 16384).encode()
        await writing
        assert await call.read() is grpc.aio.EOF


async def test_deadlines(transport: Transport) -> None:
    async with world(transport, transport) as it:
        call = it.call("Listen", timeout=1.0)
        assert await call.read() == b"listening"
        assert (await _failure(call.read()))[0] is Code.DEADLINE_EXCEEDED
        await _until(lambda: it.servicer.seen == ["cancelled"])


async def test_the_server_says_which_deadline_has_passed() -> None:
    """Its clock began first: a caller whose own is late hears of the deadline, not of a cancelled handler."""
    async with world(framed(), framed()) as it:
        call = it.call("Listen", timeout=0.2)
        assert await call.read() == b"listening"
        assert call._deadline is not None
        call._deadline.cancel()
        assert await _failure(call.read()) == (Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
        await _until(lambda: it.servicer.seen == ["cancelled"])


async def test_stopping_a_server(transport: Transport) -> None:
    async with world(transport, transport) as it:
        lasting, ending = it.call("Listen"), it.call("Ignore")
        assert await lasting.read() == b"listening"
        assert await ending.read() == b"ignoring"
        await ending.done_writing()
        stopping = asyncio.create_task(it.server.stop(0.5))
        await asyncio.sleep(0.1)
        assert not lasting.done()
        it.servicer.go_on.set()
        assert await ending.read() == b"0"
        assert await ending.read() is grpc.aio.EOF
        assert (await _failure(lasting.read()))[0] is Code.UNAVAILABLE
        await stopping
        assert it.servicer.seen == ["cancelled"]


async def test_a_message_that_cannot_be_read(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    def decode(message: bytes) -> bytes:
        if message == b"garbage":
            raise DecodeError("no message")
        return message

    async with world(transport, transport, decode) as it:
        for name in ("Upper", "UpperByContext"):
            call = it.call(name, letters(b"a", b"garbage"))
            assert await call.read() == b"A"
            code, details = await _failure(call.read())
            assert code is Code.INVALID_ARGUMENT
            assert "no message" in details
    assert "Traceback" not in caplog.text


async def test_closing_a_channel_gives_its_calls_up(transport: Transport) -> None:
    async with world(transport, transport) as it:
        call = it.call("Listen")
        assert await call.read() == b"listening"
        await it.channel.close()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        await _until(lambda: it.servicer.seen == ["cancelled"])


async def test_requests_that_never_end_are_left_when_the_answer_ends() -> None:
    waits = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        yield b"a"
        try:
            await waits.wait()
        finally:
            waits.set()

    async with world(framed(), framed()) as it:
        call = it.call("Listen", requests())
        assert await call.read() == b"listening"
        await _until(lambda: it.servicer.seen == [b"a"])
        await it.server.stop(None)
        assert (await _failure(call.read()))[0] is Code.UNAVAILABLE
        await asyncio.wait_for(waits.wait(), 5)


async def test_many_messages_stay_in_order(transport: Transport) -> None:
    count = 1000

    async def requests() -> AsyncIterator[bytes]:
        for number in range(count):
            yield str(number).encode() * (number % 50)

    async with world(transport, transport) as it:
        answers = [answer async for answer in it.call("Upper", requests())]
        assert answers == [str(number).encode() * (number % 50) for number in range(count)]


async def test_each_is_carried_by_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DOORS, "/test.Service/One", frozenset({"worker"}))
    for name, carrier in (("unix", "unix"), ("tcp", "tcp"), ("tls", "tcp"), ("grpc", None)):
        transport = transport_named(name, tmp_path)
        async with world(transport, transport) as it:
            call = it.call("One")
            assert await call.read() == b"one"
            assert getattr(call, "transport_name", None) == carrier
