"""What the framed transport does where the other end is not as it should be: another release, a stranger, a thief."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from mesh.errors import ConfigurationError, PeerUnavailable, ProtocolViolation
from mesh.rpc.client import open_channel
from mesh.rpc.framed.frames import Frame, FrameKind, FrameReader, encode
from mesh.rpc.framed.sockets import connected_socket
from mesh.rpc.framed.stream import WINDOW_BYTES, FramedStream
from mesh.rpc.framed.tickets import MAX_TICKETS, VALID_S, Caller, Tickets
from mesh.rpc.framed.transport import FRAMED_METHODS, FramedAndGrpcServer, FramedTransport
from mesh.rpc.limits import SERVER_OPTIONS
from mesh.runtime import GrpcTransport
from penstock.v1 import (
    cascade_pb2,
    frames_pb2,
    frames_pb2_grpc,
    monitor_pb2,
    monitor_pb2_grpc,
    predictor_pb2,
    scheduler_pb2,
    worker_pb2,
)
from tests.unit.mesh.framed.worlds import fallbacks, framed, letters, socket_of, world
from tests.unit.mesh.identity.identities import an_authority, transport

pytestmark = pytest.mark.live

Code = grpc.StatusCode


async def _upper(it: Any) -> str:
    """Use a stream; what carried it."""
    call = it.call("Upper", letters(b"a"))
    assert [message async for message in call] == [b"A"]
    return getattr(call, "transport_name", "grpc")


async def test_releases_with_and_without_frames_understand_each_other() -> None:
    registry = CollectorRegistry()
    async with world(GrpcTransport(), framed(registry)) as it:
        assert await _upper(it) == "grpc"
    async with world(framed(), GrpcTransport()) as it:
        assert await _upper(it) == "grpc"
    async with world(framed(), framed()) as it:
        assert await _upper(it) == "unix"
    assert fallbacks(registry) == 0
    opened = {"method": "/test.Service/Upper", "transport": "grpc"}
    assert registry.get_sample_value("penstock_rpc_streams_opened_total", opened) == 1


@pytest.mark.parametrize(("bind", "carrier"), [("127.0.0.1", "grpc"), ("0.0.0.0", "tcp"), ("[::]", "tcp")])
async def test_another_host_is_reached_over_tcp_where_others_reach_the_address(
    monkeypatch: pytest.MonkeyPatch, bind: str, carrier: str
) -> None:
    registry = CollectorRegistry()
    serves = framed()
    monkeypatch.setattr("mesh.rpc.framed.transport.host_id", lambda: "another host")
    async with world(serves, framed(registry), bind=bind) as it:
        assert await _upper(it) == carrier
    assert fallbacks(registry) == 0


async def test_a_socket_that_takes_no_connection_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    async with world(framed(), framed(registry)) as it:
        assert isinstance(it.server, FramedAndGrpcServer)
        await it.server.framed.stop(None)
        assert await _upper(it) == "grpc"
    assert fallbacks(registry) == 1
    assert "the framed one could not be opened" in caplog.text


async def test_a_peer_that_cannot_be_reached_fails_as_by_grpc() -> None:
    registry = CollectorRegistry()
    async with open_channel(framed(registry), "127.0.0.1:1") as channel:
        call = channel.stream_stream("/test.Service/Upper", bytes, bytes)()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is Code.UNAVAILABLE
    assert fallbacks(registry) == 0


async def test_the_switch_says_what_carries_streams() -> None:
    for serves, calls, carrier in (("1", "0", "grpc"), ("0", "1", "grpc"), ("tcp", "1", "tcp"), ("tcp", "tcp", "tcp")):
        async with world(framed(switch=serves), framed(switch=calls)) as it:
            assert await _upper(it) == carrier
    with pytest.raises(ConfigurationError, match="PENSTOCK_FRAMED_STREAMS=no"):
        framed(switch="no")


@pytest.mark.parametrize("path", sorted(FRAMED_METHODS))
def test_each_framed_method_exists_and_is_of_a_kind_that_goes_in_frames(path: str) -> None:
    modules = (cascade_pb2, monitor_pb2, predictor_pb2, scheduler_pb2, worker_pb2)
    services = {each.full_name: each for module in modules for each in module.DESCRIPTOR.services_by_name.values()}
    _, service, name = path.split("/")
    method = services[service].methods_by_name[name]
    assert method.server_streaming or not method.client_streaming


# -- who may call


class _Reports(monitor_pb2_grpc.MonitorServicer):
    async def Report(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            yield monitor_pb2.ReportAck(monitor_id="m")


async def test_the_doors_of_roles_are_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = an_authority(tmp_path)

    registries: list[CollectorRegistry] = []

    def of(role: str) -> FramedTransport:
        registries.append(CollectorRegistry())
        return FramedTransport(transport(authority, tmp_path, role), registries[-1])

    serves = of("monitor")
    server = serves.server(SERVER_OPTIONS, [])
    monitor_pb2_grpc.add_MonitorServicer_to_server(_Reports(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{serves.listen(server, '127.0.0.1:0')}"
    await server.start()
    try:
        for role, code in (("worker", Code.OK), ("frontend", Code.PERMISSION_DENIED)):
            async with open_channel(of(role), address, "monitor") as channel:
                call: Any = monitor_pb2_grpc.MonitorStub(channel).Report()  # type: ignore[no-untyped-call]
                if code is Code.OK:
                    await call.write(monitor_pb2.WorkerReport())
                    assert (await call.read()).monitor_id == "m"
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await call.read()
                    assert raised.value.code() is code
                    assert "spiffe://mesh/frontend may not call" in str(raised.value.details())
                assert call.transport_name == "unix"
    finally:
        await server.stop(0)
    assert sum(map(fallbacks, registries)) == 0


# -- strangers at the socket


async def _raw(name: str, *frames: bytes) -> list[Frame]:
    """What the socket answers to bytes until it ends the connection."""
    reader, writer = await asyncio.open_unix_connection(sock=connected_socket(name))
    writer.write(b"".join(frames))
    async with asyncio.timeout(10):
        answer = await reader.read(1 << 20)
    writer.close()
    return FrameReader().feed(answer)


def _call(ticket: bytes, method: str = "/test.Service/Upper") -> bytes:
    return encode(FrameKind.CALL, frames_pb2.FramedCall(ticket=ticket, method=method).SerializeToString())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        encode(FrameKind.MESSAGE, b"a"),
        encode(FrameKind.ACCEPT),
        encode(FrameKind.STATUS),
        encode(FrameKind.CALL, b"\xff\xff"),
        encode(FrameKind.WINDOW, b"12345678"),
        (65 << 20).to_bytes(4, "big") + b"\1",
    ],
)
async def test_garbage_ends_its_connection_only(sent: bytes) -> None:
    async with world(framed(), framed()) as it:
        with suppress(ConnectionResetError):
            assert await _raw(socket_of(it.server), sent) == []
        assert await _upper(it) == "unix"


async def test_tickets_are_asked_for_and_used_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    transport_ = framed()
    async with world(transport_, framed()) as it:
        name = socket_of(it.server)
        [(kind, payload)] = await _raw(name, _call(b"guessed"))
        assert kind is FrameKind.STATUS
        assert frames_pb2.FramedStatus.FromString(payload).code == Code.UNAUTHENTICATED.value[0]
        stub = frames_pb2_grpc.FramesStub(it.channel)  # type: ignore[no-untyped-call]
        own = transport_._host_id
        answer = await stub.Open(frames_pb2.OpenFramesRequest(host_id=own))
        frames = await _raw(name, _call(answer.ticket), encode(FrameKind.MESSAGE, b"a"), encode(FrameKind.HALF_CLOSE))
        assert frames[0] == (FrameKind.ACCEPT, frames_pb2.FramedAccept(proof=answer.proof).SerializeToString())
        [(kind, _)] = await _raw(name, _call(answer.ticket))
        assert kind is FrameKind.STATUS
        assert (await stub.Open(frames_pb2.OpenFramesRequest(host_id="elsewhere"))).ticket == b""


def test_tickets_expire_and_are_bounded() -> None:
    now_s, secrets = 0.0, iter(range(10**6))
    tickets = Tickets(lambda: now_s, lambda _: str(next(secrets)))
    caller = Caller((b"name",), "peer")
    early, _ = tickets.give(caller)
    late, proof = tickets.give(caller)
    found = tickets.use(late)
    assert found is not None
    assert (found.caller, found.proof) == (caller, proof)
    assert tickets.use(late) is None
    now_s = VALID_S + 1
    assert tickets.use(early) is None
    now_s = 0.0
    first, _ = tickets.give(caller)
    for _ in range(MAX_TICKETS):
        tickets.give(caller)
    assert tickets.use(first) is None


async def test_a_thief_of_the_name_gets_no_messages(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody who listens under the name that a ticket is for cannot know its proof."""
    received: list[bytes] = []

    async def steal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1 << 16))
        writer.write(encode(FrameKind.ACCEPT, frames_pb2.FramedAccept(proof=b"made up").SerializeToString()))
        received.append(await reader.read(1 << 16))
        writer.close()

    registry = CollectorRegistry()
    async with world(framed(), framed(registry)) as it:
        assert isinstance(it.server, FramedAndGrpcServer)
        name = socket_of(it.server)
        await it.server.framed.stop(None)
        thief = await asyncio.start_unix_server(steal, path="\0" + name)
        async with thief:
            assert await _upper(it) == "grpc"
    assert fallbacks(registry) == 1
    assert [kind for kind, _ in FrameReader().feed(received[0])] == [FrameKind.CALL]
    assert b"".join(received[1:]) == b""


# -- one end of a stream alone


class _Socket(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_aborted = self.is_closing_ = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closing_ = True

    def abort(self) -> None:
        self.is_aborted = True

    def frames(self) -> list[Frame]:
        return FrameReader().feed(b"".join(self.written))


def _stream(**options: float) -> tuple[FramedStream, _Socket, list[str]]:
    lost: list[str] = []
    stream, socket = FramedStream(lambda kind, payload: None, lost.append, **options), _Socket()
    stream.connection_made(socket)
    stream.takes_messages = True
    return stream, socket, lost


async def test_what_is_sent_in_one_turn_is_one_write() -> None:
    stream, socket, _ = _stream()
    for _ in range(10):
        await stream.write(b"a")
    assert not socket.written
    await asyncio.sleep(0)
    assert len(socket.written) == 1
    assert socket.frames() == [(FrameKind.MESSAGE, b"a")] * 10
    stream.close()


async def test_frames_that_come_together_wake_the_reader_once() -> None:
    stream, _, _ = _stream()
    turns, read = 0, 0

    async def take() -> None:
        nonlocal read
        while await stream.read() is not None:
            read += 1

    async def count() -> None:
        nonlocal turns
        while read < 10:
            turns += 1
            await asyncio.sleep(0)

    taking = asyncio.create_task(take())
    await asyncio.sleep(0)
    stream.data_received(encode(FrameKind.MESSAGE, b"a") * 10)
    await count()
    assert turns == 1
    stream.close()
    await taking


async def test_silence_is_asked_about_and_ends_the_stream() -> None:
    stream, socket, lost = _stream(keepalive_s=0.02, ping_timeout_s=0.04)
    async with asyncio.timeout(10):
        while (FrameKind.PING, b"") not in socket.frames():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        stream.data_received(encode(FrameKind.PONG))
        assert not lost
        while not lost:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert "answers no ping" in lost[0]
    assert socket.is_aborted
    assert await stream.read() is None
    with pytest.raises(PeerUnavailable):
        await stream.write(b"a")


async def test_a_ping_is_answered() -> None:
    stream, socket, _ = _stream()
    stream.data_received(encode(FrameKind.PING))
    await asyncio.sleep(0)
    assert socket.frames() == [(FrameKind.PONG, b"")]
    stream.close()


async def test_a_window_is_kept_and_opened() -> None:
    stream, socket, lost = _stream()
    await stream.write(bytes(WINDOW_BYTES))
    writing = asyncio.create_task(stream.write(b"more"))
    await asyncio.sleep(0)
    assert not writing.done()
    stream.data_received(encode(FrameKind.WINDOW, WINDOW_BYTES.to_bytes(8, "big")))
    await writing
    stream.data_received(encode(FrameKind.WINDOW, (1 << 40).to_bytes(8, "big")))
    assert lost == ["the peer says that it has read more than it was sent"]
    assert socket.is_aborted


async def test_a_message_that_is_too_large_is_not_sent() -> None:
    stream, socket, _ = _stream()
    with pytest.raises(ProtocolViolation, match="are taken at most"):
        await stream.write(bytes((64 << 20) + 1))
    stream.close()
    assert not socket.written


async def test_a_peer_that_keeps_to_no_window_is_left() -> None:
    stream, _, lost = _stream()
    frame = encode(FrameKind.MESSAGE, bytes(32 << 20))
    for _ in range(3):
        stream.data_received(frame)
    assert lost == ["the peer sends messages more than its window allows"]
