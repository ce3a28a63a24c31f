"""Frames between hosts: who gets in by which certificate, what a port does with garbage, silence and half a frame."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from prometheus_client import CollectorRegistry

from mesh.identity.authority import Authority
from mesh.identity.contexts import TlsContexts
from mesh.identity.doors import DOORS
from mesh.identity.files import IdentityFolder
from mesh.identity.tls import TlsTransport
from mesh.rpc.client import open_channel
from mesh.rpc.framed.frames import Frame, FrameKind, FrameReader, encode
from mesh.rpc.framed.ways import CLOSED_S, MAX_CLOSED_PORTS, ClosedPorts
from mesh.runtime import Transport
from penstock.v1 import frames_pb2, frames_pb2_grpc
from tests.in_time import still
from tests.unit.mesh.framed.worlds import PATHS, World, fallbacks, framed, letters, port_of, world
from tests.unit.mesh.identity.identities import an_authority, issued

pytestmark = pytest.mark.live

Code = grpc.StatusCode


@pytest.fixture(autouse=True)
def doors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open to frontends only."""
    for path in PATHS:
        monkeypatch.setitem(DOORS, path, frozenset({"frontend"}))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return an_authority(tmp_path)


def over_tls(folder: Path, registry: CollectorRegistry | None = None) -> Transport:
    """Of whoever has the identity in a folder."""
    return framed(registry, TlsTransport(IdentityFolder(folder)), "tcp")


def context(folder: Path) -> ssl.SSLContext:
    """Of a caller with this identity."""
    return TlsContexts(IdentityFolder(folder)).client()


@asynccontextmanager
async def a_worker(authority: Authority, folder: Path) -> AsyncIterator[World]:
    """It serves; a frontend calls it."""
    serves = over_tls(issued(authority, folder / "worker", "worker", "w-0"))
    calls = over_tls(issued(authority, folder / "frontend", "frontend"))
    async with world(serves, calls) as it:
        yield it


async def upper(channel: grpc.aio.Channel) -> Any:
    """Use a stream; returns the call."""
    call: Any = channel.stream_stream("/test.Service/Upper", bytes, bytes)(letters(b"a"))
    assert [message async for message in call] == [b"A"]
    return call


async def carrier(it: World) -> str:
    return str((await upper(it.channel)).transport_name)


async def ticket(channel: grpc.aio.Channel) -> frames_pb2.OpenFramesResponse:
    """As a caller gets it."""
    stub = frames_pb2_grpc.FramesStub(channel)  # type: ignore[no-untyped-call]
    answer: frames_pb2.OpenFramesResponse = await stub.Open(frames_pb2.OpenFramesRequest())
    return answer


async def knock(port: int, sent: bytes, tls: ssl.SSLContext | None = None) -> list[Frame]:
    """What the port answers to bytes, until it says the status of a call or ends the connection."""
    name = "member.penstock" if tls is not None else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name)
    writer.write(sent)
    frames, pieces = [], FrameReader()
    async with asyncio.timeout(10):
        while (FrameKind.STATUS not in dict(frames)) and (answer := await reader.read(1 << 16)):
            frames += pieces.feed(answer)
    writer.close()
    return frames


def a_call(ticket: bytes, method: str = "/test.Service/Upper") -> bytes:
    return encode(FrameKind.CALL, frames_pb2.FramedCall(ticket=ticket, method=method).SerializeToString())


def refusal(frames: list[Frame]) -> frames_pb2.FramedStatus:
    [(kind, payload)] = frames
    assert kind is FrameKind.STATUS
    return frames_pb2.FramedStatus.FromString(payload)


# -- who gets in


async def test_a_role_gets_in_where_it_may_on_the_event_loop_of_roles(authority: Authority, tmp_path: Path) -> None:
    def run() -> None:
        async def both() -> None:
            registry = CollectorRegistry()
            async with a_worker(authority, tmp_path) as it:
                assert await carrier(it) == "tcp"
                other = over_tls(issued(authority, tmp_path / "monitor", "monitor"), registry)
                async with open_channel(other, it.address, "worker") as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await upper(channel)
                assert raised.value.code() is Code.PERMISSION_DENIED
                assert "spiffe://mesh/monitor may not call" in str(raised.value.details())
                opened = {"method": "/test.Service/Upper", "transport": "tcp"}
                assert registry.get_sample_value("penstock_rpc_streams_opened_total", opened) == 1

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(both())

    await asyncio.to_thread(run)


def _none(folder: Path) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


def _trusting(folder: Path) -> ssl.SSLContext:
    """Takes whatever answers, so that it is the server that refuses."""
    made = context(folder)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


def _of_another_authority(folder: Path) -> ssl.SSLContext:
    return _trusting(issued(an_authority(folder, "other"), folder / "other", "frontend"))


def _of_the_same_name_by_another_authority(folder: Path) -> ssl.SSLContext:
    return _trusting(issued(an_authority(folder / "forged", "mesh"), folder / "forged/frontend", "frontend"))


def _expired(folder: Path) -> ssl.SSLContext:
    authority = Authority.open(folder / "authority of mesh")
    return _trusting(issued(authority, folder / "expired", "frontend", ago=timedelta(days=2), days=1))


def _not_yet_valid(folder: Path) -> ssl.SSLContext:
    authority = Authority.open(folder / "authority of mesh")
    return _trusting(issued(authority, folder / "early", "frontend", ago=-timedelta(days=2), days=9))


def _of_an_old_protocol(folder: Path) -> ssl.SSLContext:
    made = _trusting(folder / "frontend")
    made.minimum_version, made.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    return made


@pytest.mark.parametrize(
    "of",
    [
        None,
        _none,
        _of_another_authority,
        _of_the_same_name_by_another_authority,
        _expired,
        _not_yet_valid,
        _of_an_old_protocol,
    ],
)
async def test_each_wrong_certificate_opens_nothing_even_with_a_ticket(
    of: Callable[[Path], ssl.SSLContext] | None, authority: Authority, tmp_path: Path
) -> None:
    async with a_worker(authority, tmp_path) as it:
        given = await ticket(it.channel)
        tls = None if of is None else of(tmp_path)
        rest = encode(FrameKind.MESSAGE, b"a") + encode(FrameKind.HALF_CLOSE)
        with suppress(OSError):
            assert await knock(given.tcp_port, a_call(given.ticket) + rest, tls) == []
        given = await ticket(it.channel)
        frames = await knock(given.tcp_port, a_call(given.ticket) + rest, context(tmp_path / "frontend"))
        assert [kind for kind, _ in frames] == [FrameKind.ACCEPT, FrameKind.MESSAGE, FrameKind.STATUS], "the right one"


async def test_a_ticket_is_of_use_to_nobody_else(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with a_worker(authority, tmp_path) as it:
        given = await ticket(it.channel)
        thief = context(issued(authority, tmp_path / "thief", "worker", "w-1"))
        status = refusal(await knock(given.tcp_port, a_call(given.ticket), thief))
        assert (status.code, status.details) == (Code.UNAUTHENTICATED.value[0], "the ticket is somebody else's")
        status = refusal(await knock(given.tcp_port, a_call(given.ticket), context(tmp_path / "frontend")))
        assert status.details == "the ticket is unknown, used or has expired"
    assert "spiffe://mesh/worker/w-1" in str([record.__dict__ for record in caplog.records])


async def test_another_trust_domain_is_refused_though_its_authority_is_believed(
    authority: Authority, tmp_path: Path
) -> None:
    theirs = an_authority(tmp_path, "other")
    both = b"".join((each.folder / "ca.pem").read_bytes() for each in (authority, theirs))
    worker, stranger = issued(authority, tmp_path / "w", "worker"), issued(theirs, tmp_path / "s", "frontend")
    for folder in (worker, stranger):
        (folder / "ca.pem").write_bytes(both)
    async with world(over_tls(worker), over_tls(stranger)) as it:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await upper(it.channel)
        assert raised.value.code() is Code.PERMISSION_DENIED


async def test_a_caller_makes_sure_who_answers(authority: Authority, tmp_path: Path) -> None:
    """A port that somebody of another role has taken gets nothing, not even the ticket."""
    heard: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1 << 16))
        writer.close()

    registry = CollectorRegistry()
    rogue = TlsContexts(IdentityFolder(issued(authority, tmp_path / "rogue", "monitor"))).server()
    async with a_worker(authority, tmp_path) as it:
        listening = await asyncio.start_server(hear, "127.0.0.1", 0, ssl=rogue)
        async with listening:
            it.server.frames.tcp_port = listening.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
            calls = over_tls(tmp_path / "frontend", registry)
            async with open_channel(calls, it.address, "worker") as channel:
                assert (await upper(channel)).transport_name == "grpc"
    assert not any(heard)
    assert fallbacks(registry) == 1


async def test_an_authority_is_replaced_while_streams_go_on(authority: Authority, tmp_path: Path) -> None:
    """Both believed, certificates of the new one, only the new one believed: then the old one opens nothing."""
    new = an_authority(tmp_path / "new")
    both = b"".join((each.folder / "ca.pem").read_bytes() for each in (authority, new))
    async with a_worker(authority, tmp_path) as it:
        lasting = it.call("Listen")
        assert await lasting.read() == b"listening"
        old = context(tmp_path / "frontend")
        for believed in (both, both, (new.folder / "ca.pem").read_bytes()):
            for role, name in (("worker", "w-0"), ("frontend", "")):
                issued(new if believed is not both else authority, tmp_path / role, role, name)
                (tmp_path / role / "ca.pem").write_bytes(believed)
            assert await carrier(it) == "tcp"
        given = await ticket(it.channel)
        with suppress(OSError):
            assert await knock(given.tcp_port, a_call(given.ticket), old) == []
        await lasting.write(b"still")
        async with asyncio.timeout(10):
            while it.servicer.seen != [b"still"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        lasting.cancel()


# -- the port


async def test_a_port_that_is_blocked_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    async with world(framed(switch="tcp"), framed(registry, switch="tcp")) as it:
        for door in it.server.framed._doors:  # type: ignore[attr-defined]
            await door.close()
        for _ in range(3):
            assert await carrier(it) == "grpc"
    assert fallbacks(registry) == 1
    assert caplog.text.count("the framed one could not be opened") == 1


async def test_a_port_that_cannot_be_had_leaves_streams_to_grpc(caplog: pytest.LogCaptureFixture) -> None:
    async with world(framed(switch="tcp"), framed(switch="tcp")) as taken:
        serves = framed(switch="tcp")
        serves._frames_port = port_of(taken.server)
        async with world(serves, framed(switch="tcp")) as it:
            assert await carrier(it) == "grpc"
    assert "their port cannot be had" in caplog.text


def test_closed_ports_are_forgotten_in_time_and_bounded() -> None:
    now_s = 0.0
    ports = ClosedPorts(lambda: now_s)
    ports.add("a", 1)
    assert ports.has("a", 1)
    assert not ports.has("a", 2)
    now_s = CLOSED_S
    assert not ports.has("a", 1)
    for number in range(MAX_CLOSED_PORTS + 1):
        ports.add("b", number)
    assert not ports.has("b", 0)
    assert ports.has("b", 1)


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    encode(FrameKind.MESSAGE, b"a"),
    encode(FrameKind.CALL, b"\xff\xff"),
    (65 << 20).to_bytes(4, "big") + b"\1",
]


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: Authority, tmp_path: Path) -> ssl.SSLContext | None:
    issued(authority, tmp_path / "frontend", "frontend")
    return context(tmp_path / "frontend") if request.param == "tls" else None


@asynccontextmanager
async def either(tls: ssl.SSLContext | None, authority: Authority, folder: Path) -> AsyncIterator[World]:
    """Behind TLS or not."""
    if tls is not None:
        async with a_worker(authority, folder) as it:
            yield it
    else:
        async with world(framed(switch="tcp"), framed(switch="tcp")) as it:
            yield it


async def test_garbage_ends_its_connection_only(
    tls: ssl.SSLContext | None, authority: Authority, tmp_path: Path
) -> None:
    async with either(tls, authority, tmp_path) as it:
        for sent in GARBAGE:
            with suppress(OSError):
                assert await knock(port_of(it.server), sent, tls) == []
        still(await carrier(it) == "tcp", "it is there before its caller gives up and takes gRPC")


async def test_who_shows_no_ticket_in_time_is_left(
    tls: ssl.SSLContext | None, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TLS spoken, after the handshake, and in the middle of a frame."""
    monkeypatch.setattr("mesh.rpc.framed.server.CALL_TIMEOUT_S", 0.3)
    async with either(tls, authority, tmp_path) as it:
        for sent, with_tls in ((b"", None), (b"", tls), (a_call(b"guessed")[:-3], tls)):
            with suppress(OSError):
                assert await knock(port_of(it.server), sent, with_tls) == []
        assert await carrier(it) == "tcp"


async def test_a_crowd_without_tickets_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mesh.rpc.framed.server.MAX_STRANGERS", 3)
    async with world(framed(switch="tcp"), framed(switch="tcp")) as it:
        crowd = [await asyncio.open_connection("127.0.0.1", port_of(it.server)) for _ in range(5)]
        async with asyncio.timeout(10):
            for reader, _ in crowd[3:]:
                assert await reader.read(1) == b""
        assert "too many have shown no ticket" in caplog.text
        for _, writer in crowd:
            writer.transport.abort()
        async with asyncio.timeout(10):
            while it.server.framed._calls:  # type: ignore[attr-defined] # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert await carrier(it) == "tcp"


async def test_a_caller_that_is_cut_in_mid_frame_ends_its_call(
    tls: ssl.SSLContext | None, authority: Authority, tmp_path: Path
) -> None:
    async with either(tls, authority, tmp_path) as it:
        given = await ticket(it.channel)
        sent = a_call(given.ticket, "/test.Service/Listen") + encode(FrameKind.MESSAGE, b"whole")
        sent += encode(FrameKind.MESSAGE, b"never whole")[:-1]
        # an end of the connection, not an abort: bytes before an abort may be lost on their way
        name = "member.penstock" if tls is not None else None
        _, writer = await asyncio.open_connection("127.0.0.1", given.tcp_port, ssl=tls, server_hostname=name)
        writer.write(sent)
        writer.close()
        async with asyncio.timeout(10):
            while it.servicer.seen != [b"whole", "cancelled"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert await carrier(it) == "tcp"


async def test_a_server_that_is_cut_ends_the_call_at_once(
    tls: ssl.SSLContext | None, authority: Authority, tmp_path: Path
) -> None:
    async with either(tls, authority, tmp_path) as it:
        call = it.call("Listen")
        assert await call.read() == b"listening"
        for each in list(it.server.framed._calls):  # type: ignore[attr-defined]
            each.stream._transport.abort()
        async with asyncio.timeout(5):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
        assert raised.value.code() is Code.UNAVAILABLE
