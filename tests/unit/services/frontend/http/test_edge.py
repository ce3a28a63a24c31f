"""Clients that send too much, too slowly, or nothing; and the endpoint's certificate."""

import asyncio
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mesh.errors import ConfigurationError
from mesh.tasks import TaskSet
from services.frontend.http import server as http_server
from services.frontend.http.server import MAX_PIPELINED, EdgeLimits, HttpServer
from services.frontend.http.tls import TlsFiles
from services.frontend.settings import FrontendSettings

pytestmark = pytest.mark.live

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"


class App:
    """Answers each request with its path, once it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        await self.may_answer.wait()
        body = scope["path"].encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:-2])
        return int(head.split()[1]), await self.reader.readexactly(int(fields["content-length"]))

    async def refusal(self) -> tuple[int, str]:
        """Status and code of an error, behind which the connection ends."""
        status, body = await self.answer()
        assert await self.reader.read() == b""
        return status, json.loads(body)["error"]["code"]


class Edge:
    def __init__(self, server: HttpServer, app: App, closed: list[str]) -> None:
        self.server, self.app, self.closed = server, app, closed
        self.host, _, self.port = server.address.rpartition(":")

    async def connect(self, **options: Any) -> Client:
        return Client(*await asyncio.open_connection(self.host, int(self.port), **options))


@asynccontextmanager
async def edge(tls: TlsFiles | None = None, **limits: Any) -> AsyncIterator[Edge]:
    app, tasks, closed, failures = App(), TaskSet("test"), list[str](), list[BaseException]()
    server = HttpServer(app, "127.0.0.1", 0, EdgeLimits(on_closed=closed.append, **limits), tls)
    server.start(tasks, failures.append)
    try:
        yield Edge(server, app, closed)
    finally:
        app.may_answer.set()
        await server.stop()
        await tasks.cancel()
    assert not failures


@pytest.fixture
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "TICK_S", 0.01)


async def test_requests_one_after_the_other_are_answered() -> None:
    async with edge() as served:
        client = await served.connect()
        for _ in range(3):
            await client.send(GET + b"\r\n")
            assert await client.answer() == (200, b"/")
        await client.send(b"POST /p HTTP/1.1\r\ncontent-length: 5\r\n\r\nab")
        assert await client.answer() == (200, b"/p"), "it did not wait for the body"
        await client.send(b"cde" + GET + b"\r\n")
        assert await client.answer() == (200, b"/")
        assert not served.closed


@pytest.mark.parametrize(
    "head",
    [
        GET + b"x: " + b"y" * 5000,
        GET + b"x: " + b"y" * 5000 + b"\r\n\r\n",
        GET + b"a: b\r\n" * 700,
        b"GET /" + b"z" * 5000,
        GET + b"".join(b"h%d: v\r\n" % number for number in range(600)) + b"\r\n",
    ],
)
async def test_a_head_that_is_too_large_is_refused(head: bytes) -> None:
    async with edge(max_header_bytes=4000) as served:
        client = await served.connect()
        for start in range(0, len(head), 1000):
            await client.send(head[start : start + 1000])
            await asyncio.sleep(0)
        assert await client.refusal() == (431, "request_header_fields_too_large")
        assert served.closed == ["large_head"]
        assert not served.app.asked
        await (other := await served.connect()).send(GET + b"\r\n")
        assert await other.answer() == (200, b"/")


async def test_a_large_body_is_no_large_head() -> None:
    async with edge(max_header_bytes=4000) as served:
        client = await served.connect()
        for _ in range(2):
            await client.send(b"POST /p HTTP/1.1\r\ncontent-length: 90000\r\n\r\n" + b"x" * 90000)
            assert await client.answer() == (200, b"/p")
        assert not served.closed


async def test_what_is_no_http_is_refused_in_openais_form_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with edge() as served:
        client = await served.connect()
        await client.send(b"\x16\x03\x01 is no HTTP\r\n\r\n")
        assert await client.refusal() == (400, None)
        assert served.closed == ["not_http"]
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"", GET, b"POST / HTTP/1.1\r\ncontent-le"])
async def test_a_head_that_does_not_come_is_waited_for_so_long(sent: bytes, quick_ticks: None) -> None:
    async with edge(header_timeout_s=0.05) as served:
        client = await served.connect()
        await client.send(sent)
        async with asyncio.timeout(5):
            assert await client.refusal() == (408, "request_timeout")
        assert served.closed == ["late"]


async def test_the_next_head_and_the_rest_of_a_body_have_as_long(quick_ticks: None) -> None:
    async with edge(header_timeout_s=0.05) as served:
        for rest in (b"GET", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nx"):
            client = await served.connect()
            await client.send(GET + b"\r\n")
            assert (await client.answer())[0] == 200
            await client.send(rest)
            async with asyncio.timeout(5):
                if rest.startswith(b"POST"):
                    assert (await client.answer())[0] == 200
                assert await client.refusal() == (408, "request_timeout")


async def test_slow_clients_make_way_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.http.connections.SUSPECT_S", 0.0)
    async with edge(max_connections=5) as served:
        slow = [await served.connect() for _ in range(5)]
        for client in slow:
            await client.send(GET)
        for number in range(8):
            client = await served.connect()
            await client.send(GET + b"\r\n")
            assert await client.answer() == (200, b"/"), number
            client.writer.close()
        for client in slow[:1]:
            assert await client.reader.read() == b""
        assert set(served.closed) == {"shed"}


async def test_those_that_are_served_do_not_make_way() -> None:
    async with edge(max_connections=2) as served:
        served.app.may_answer.clear()
        busy = [await served.connect() for _ in range(2)]
        for client in busy:
            await client.send(GET + b"\r\n")
        async with asyncio.timeout(5):
            while served.app.asked < 2:  # noqa: ASYNC110 - a counter of another part has no event
                await asyncio.sleep(0.001)
        assert await (await served.connect()).refusal() == (503, "too_many_connections")
        served.app.may_answer.set()
        for client in busy:
            assert await client.answer() == (200, b"/")
        assert served.closed == ["full"]


async def test_only_so_many_requests_wait_on_one_connection() -> None:
    async with edge() as served:
        served.app.may_answer.clear()
        client = await served.connect()
        await client.send((GET + b"\r\n") * (MAX_PIPELINED + 10))
        assert await client.reader.read() == b"", "cut: an answer had begun"
        assert served.closed == ["pipelined"]
        served.app.may_answer.set()
        few = await served.connect()
        await few.send((GET + b"\r\n") * MAX_PIPELINED)
        for _ in range(MAX_PIPELINED):
            assert await few.answer() == (200, b"/")


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make a certificate with")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


async def common_name(served: Edge, trusted: Path) -> bytes:
    client = await served.connect(ssl=ssl.create_default_context(cafile=str(trusted)))
    await client.send(GET + b"\r\n")
    assert await client.answer() == (200, b"/")
    shown: ssl.SSLObject = client.writer.get_extra_info("ssl_object")
    subject: Any = (shown.getpeercert() or {})["subject"]
    client.writer.close()
    return str(subject[0][0][1]).encode()


@pytest.mark.slow
async def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    used = tmp_path / "tls.pem", tmp_path / "tls.key"
    for link, target in zip(used, first, strict=True):
        link.symlink_to(target)
    tls = TlsFiles(*used)
    async with edge(tls) as served:
        assert await common_name(served, first[0]) == b"first"
        kept = await served.connect(ssl=ssl.create_default_context(cafile=str(first[0])))
        assert not tls.look()
        used[0].unlink()
        used[0].symlink_to(second[0])
        assert not tls.look(), "it does not fit its key yet"
        assert "cannot be used" in caplog.text
        assert await common_name(served, first[0]) == b"first"
        used[1].unlink()
        used[1].symlink_to(second[1])
        assert tls.look()
        assert await common_name(served, second[0]) == b"second"
        await kept.send(GET + b"\r\n")
        assert await kept.answer() == (200, b"/")


@pytest.mark.slow
async def test_a_handshake_that_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HANDSHAKE_S", 0.05)
    async with edge(TlsFiles(*make_certificate(tmp_path, "first"))) as served:
        silent = await served.connect()
        async with asyncio.timeout(5):
            assert await silent.reader.read() == b""


def test_files_that_are_no_certificate_are_refused_at_the_start(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(ConfigurationError, match="--tls-certificate"):
        TlsFiles(missing, missing)
    missing.write_text("nothing")
    with pytest.raises(ConfigurationError, match="PEM"):
        TlsFiles(missing, missing)
    with pytest.raises(ConfigurationError, match="belong together"):
        FrontendSettings(tls_key=missing)
    assert os.path.exists(missing)


async def test_several_servers_share_a_port_until_the_last_one_has_gone() -> None:
    apps, tasks = (App(), App()), TaskSet("test")
    first = HttpServer(apps[0], "127.0.0.1", 0)
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(ConfigurationError, match="is the port in use"):
        HttpServer(apps[1], "127.0.0.1", 0, shared_port=port)  # it is not one that is shared
    await first.stop()
    servers = [HttpServer(app, "127.0.0.1", 0, shared_port=port) for app in apps]
    with pytest.raises(ConfigurationError, match="is the port in use"):
        HttpServer(App(), "127.0.0.1", port)
    for server in servers:
        server.start(tasks, lambda error: pytest.fail(repr(error)))

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = Client(reader, writer)
        await client.send(GET + b"\r\n")
        assert await client.answer() == (200, b"/")
        writer.close()

    for _ in range(40):
        await ask()
    assert min(app.asked for app in apps) > 0, "the kernel shares connections out"
    await servers[0].stop()
    before = apps[1].asked
    for _ in range(10):
        await ask()
    assert apps[1].asked == before + 10
    await servers[1].stop()
    with pytest.raises(ConnectionRefusedError):
        await ask()
