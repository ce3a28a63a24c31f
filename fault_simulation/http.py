"""HTTP between simulated clients and frontends, at the level of ASGI: one exchange on each connection.

What uvicorn does for an application, as far as ours can tell: `send` waits while the client does not read, a client
that leaves is an `http.disconnect`, an application that raises is logged and answered with 500.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.types import ASGIApp, Message

from fault_simulation.grpc_connection import ReceiveWindow, SendWindow
from fault_simulation.loop import VirtualLoop
from fault_simulation.network import Endpoint, Network
from fault_simulation.node import Node
from mesh.errors import ConfigurationError
from mesh.tasks import TaskSet
from services.frontend.http.server import TRANSPORT

log = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 3.0
"""After such a silence a client's kernel asks whether the connection still stands: a server that died while nothing got
through from it has left no other sign."""
GRACE_S: Final = 1.0
"""What running requests have when the server stops."""


class SimulatedHttpServer:
    """A `services.frontend.http.server.HttpEndpoint`."""

    def __init__(self, network: Network, node: Node, app: ASGIApp, host: str, port: int) -> None:
        """Raises ConfigurationError if the port is taken."""
        try:
            self._listener = network.listen(node, host, port)
        except OSError as error:
            raise ConfigurationError(f"cannot serve HTTP on {host}:{port}: {error}; is the port in use?") from error
        self.address = f"{host}:{self._listener.address[1]}"
        self.loop = network.loop
        self.node = node
        self.app = app
        self._exchanges: dict[_Exchange, None] = {}
        self._idle = asyncio.Event()

    def start(self, tasks: TaskSet, on_failed: Callable[[BaseException], None]) -> None:
        """Take connections."""
        self._listener.accept = self._accept

    async def drain(self) -> None:
        """Close the port and return when the last connection has ended."""
        self._listener.close()
        while self._exchanges:
            self._idle.clear()
            await self._idle.wait()

    async def stop(self) -> None:
        """Close the port and return when all is closed; running requests have a second."""
        self._listener.close()
        for exchange in list(self._exchanges):
            exchange.stop(GRACE_S)
        tasks = [exchange.task for exchange in self._exchanges if exchange.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def ended(self, exchange: "_Exchange") -> None:
        """Its connection is closed."""
        self._exchanges.pop(exchange, None)
        if not self._exchanges:
            self._idle.set()

    def _accept(self, endpoint: Endpoint) -> None:
        self._exchanges[_Exchange(self, endpoint)] = None


class _Exchange:
    """One connection at the server's side."""

    def __init__(self, server: SimulatedHttpServer, endpoint: Endpoint) -> None:
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._endpoint = endpoint
        self._loop = server.loop
        self._window = SendWindow(server.loop)
        self._body: bytes | None = None
        self._gone = asyncio.Event()
        self._is_started = False
        self._is_complete = False
        endpoint.receiver = self

    def received(self, frame: tuple[Any, ...]) -> None:
        """From the client."""
        match frame:
            case ("request", method, path, query, headers, body):
                self._body = body
                scope = {
                    "type": "http",
                    "asgi": {"version": "3.0", "spec_version": "2.3"},
                    "http_version": "1.1",
                    "server": tuple(self._server.address.rsplit(":", 1)),
                    "client": ("client", 1),
                    "scheme": "http",
                    "method": method,
                    "root_path": "",
                    "path": path,
                    "raw_path": path.encode(),
                    "query_string": query,
                    "headers": headers,
                    "state": {},
                    TRANSPORT: self,
                }
                self.task = self._loop.spawn(self._server.node, self._run(scope), f"http {path}")
            case ("read", read_bytes):
                self._window.give(read_bytes)

    def lost(self, reason: str) -> None:
        """The client has gone."""
        self._leave()

    def abort(self) -> None:
        """Cut the connection (`abort_connection`)."""
        self._endpoint.reset("the connection was reset by the server")
        self._leave()

    def stop(self, grace_s: float) -> None:
        """End it: at once where no request runs, else by cancelling that after `grace_s`."""
        if self.task is None:
            self._endpoint.close()
            self._leave()
            self._server.ended(self)
        else:
            self._loop.call_in(self._server.node, grace_s, self.task.cancel)

    def _leave(self) -> None:
        self._gone.set()
        self._window.wake()
        if self.task is None:
            self._server.ended(self)

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._server.app(scope, self._receive, self._send)
        except asyncio.CancelledError:
            pass
        # As uvicorn: a bug costs one request.
        except Exception:
            log.exception("Exception in ASGI application")
            if not self._is_started:
                self._endpoint.send(("start", 500, ()))
                self._endpoint.send(("body", b"Internal Server Error", False))
        finally:
            self._endpoint.close()
            self._server.ended(self)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._is_complete:
            await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self._is_started = True
            self._endpoint.send(("start", message["status"], tuple(message.get("headers", ()))))
            return
        assert message["type"] == "http.response.body", message["type"]
        while self._window.is_full and not self._gone.is_set():
            await self._window.wait()
        if self._gone.is_set():
            return
        body, more = bytes(message.get("body", b"")), message.get("more_body", False)
        self._window.take(body)
        self._is_complete = not more
        self._endpoint.send(("body", body, more), len(body) + 64)


class HttpAnswer:
    """An answer as it comes. Raises ConnectionError where the server or the way to it broke."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._loop = loop
        self._endpoint: Endpoint | None = None
        self._window = ReceiveWindow()
        self._chunks: deque[bytes] = deque()
        self._failure = ""
        self._is_complete = False
        self._changed = asyncio.Event()

    async def started(self) -> int:
        """The status, once it is there."""
        while not self.status:
            await self._more()
        return self.status

    async def chunk(self) -> bytes | None:
        """The next piece of the body; None at its end."""
        while not self._chunks:
            if self._is_complete:
                return None
            await self._more()
        chunk = self._chunks.popleft()
        read_bytes = self._window.read(chunk)
        if read_bytes and self._endpoint is not None:
            self._endpoint.send(("read", read_bytes))
        return chunk

    async def body(self) -> bytes:
        """All of it."""
        chunks = []
        while (chunk := await self.chunk()) is not None:
            chunks.append(chunk)
        return b"".join(chunks)

    def leave(self) -> None:
        """Hang up."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._fail("the client left")

    def connected(self, endpoint: Endpoint | None, failure: str, request: tuple[Any, ...]) -> None:
        """From the network."""
        if endpoint is None:
            self._fail(failure)
        elif self._failure:
            endpoint.close()
        else:
            self._endpoint = endpoint
            endpoint.receiver = self
            endpoint.send(request, len(request[-1]) + 200)

    def received(self, frame: tuple[Any, ...]) -> None:
        """From the server."""
        match frame:
            case ("start", status, headers):
                self.status = status
                self.headers = {name.decode().lower(): value.decode() for name, value in headers}
            case ("body", body, more):
                if body:
                    self._chunks.append(body)
                self._is_complete = not more
        self._changed.set()

    def lost(self, reason: str) -> None:
        """From the network."""
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        if not self._is_complete and not self._failure:
            self._failure = reason
        self._changed.set()

    async def _more(self) -> None:
        if self._failure:
            raise ConnectionError(self._failure)
        self._changed.clear()
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self._changed.wait()
        except TimeoutError:
            if self._endpoint is not None:
                self._endpoint.send(("keep-alive",))


def http_request(
    network: Network,
    node: Node,
    address: str,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes = b"",
) -> HttpAnswer:
    """Send a request from a node, on a connection of its own."""
    answer = HttpAnswer(network.loop)
    host, _, port = address.rpartition(":")
    path, _, query = path.partition("?")
    given = {"host": address, "content-length": str(len(body)), **headers}
    encoded = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    request = ("request", method, path, query.encode(), encoded, body)
    network.dial(node, host, int(port), lambda endpoint, failure: answer.connected(endpoint, failure, request))
    return answer
