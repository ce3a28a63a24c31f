import asyncio
from collections.abc import Mapping

import pytest

from mesh.errors import ConfigurationError, DeadlineExceeded, PeerUnavailable, RpcError
from services.cli.replay.completions import complete, request_head, served_model
from services.cli.replay.pool import ConnectionPool, Endpoint, parse_endpoint
from tests.unit.services.cli.fake_endpoint import Answer, FakeEndpoint, serving

pytestmark = pytest.mark.live


class Body:
    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def on_body(self, chunk: bytes) -> None:
        self.body += chunk


async def exchange_with(raw: bytes) -> Body:
    """One exchange with a server that answers `raw` and closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        pool = ConnectionPool(parse_endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        body = Body()
        await asyncio.wait_for(pool.exchange(request_head(pool.endpoint, "GET", "/", "", 0), body), 10)
        pool.close()
        return body


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    body = await exchange_with(b"HTTP/1.1 200 OK\r\n\r\nhello")
    assert (body.status, body.body) == (200, b"hello")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
    ids=["nothing", "short body", "cut chunks", "not HTTP", "endless head"],
)
async def test_a_broken_answer_is_an_error_never_a_hang(raw: bytes) -> None:
    with pytest.raises(PeerUnavailable):
        await exchange_with(raw)


def completion(pool: ConnectionPool) -> bytes:
    body = b'{"model": "demo", "prompt": [5], "max_tokens": 2}'
    return request_head(pool.endpoint, "POST", "/v1/completions", "", len(body)) + body


async def complete_one(pool: ConnectionPool, deadline_s: float = 10.0) -> str:
    now_s = asyncio.get_running_loop().time
    outcome, _ = await complete(pool, completion(pool), now_s(), now_s, deadline_s)
    return outcome.error


async def test_a_connection_is_kept_and_used_again() -> None:
    with serving(FakeEndpoint()) as endpoint:
        pool = ConnectionPool(parse_endpoint(endpoint.url))
        for _ in range(5):
            assert await complete_one(pool) == ""
        pool.close()
    assert endpoint.connections == 1


async def test_a_kept_connection_that_the_server_closed_costs_no_request() -> None:
    with serving(FakeEndpoint(lambda body, index: Answer(close_when_done=True))) as endpoint:
        pool = ConnectionPool(parse_endpoint(endpoint.url))
        for _ in range(5):
            assert await complete_one(pool) == ""
        pool.close()
    assert endpoint.connections == 5


async def test_a_request_beyond_its_deadline_is_dropped_so_that_the_server_sees_it() -> None:
    answer = Answer(tokens=3, first_token_after_s=0.0, token_after_s=60.0)
    with serving(FakeEndpoint(lambda body, index: answer)) as endpoint:
        pool = ConnectionPool(parse_endpoint(endpoint.url))
        assert await complete_one(pool, deadline_s=0.05) == "no end within 0.05 s"
        assert await complete_one(pool, deadline_s=0.05) == "no end within 0.05 s"
        pool.close()
    assert endpoint.connections == 2


async def test_a_list_of_models_that_is_none_is_refused() -> None:
    with serving(FakeEndpoint(models={"models": []})) as endpoint:
        pool = ConnectionPool(parse_endpoint(endpoint.url))
        with pytest.raises(RpcError, match="no list of models"):
            await served_model(pool, None, "", 10.0)
        with pytest.raises(DeadlineExceeded, match="did not list its models"):
            await served_model(pool, None, "", 0.0)
        pool.close()


async def test_another_servers_page_is_told_in_one_line() -> None:
    page = b"<html>\n  <h1>Not Found</h1>\n</html>\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(page) + page)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        pool = ConnectionPool(parse_endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        with pytest.raises(RpcError, match=r"answered HTTP 404: <html> <h1>Not Found</h1> </html>$"):
            await served_model(pool, None, "", 10.0)
        pool.close()


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:8000", Endpoint("127.0.0.1", 8000, False, "")),
        ("http://mesh/v1/", Endpoint("mesh", 80, False, "")),
        ("https://mesh.example/llm/v1", Endpoint("mesh.example", 443, True, "/llm")),
        ("http://[::1]:8000", Endpoint("::1", 8000, False, "")),
    ],
)
def test_urls_are_read(url: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(url) == endpoint


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:y", "http://x/a b", "http://x/?q"])
def test_other_things_are_no_endpoints(url: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_endpoint(url)
