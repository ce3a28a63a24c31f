"""The HTTP server: uvicorn inside a process that has its own signals, its own sockets and its own end."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from mesh.errors import ConfigurationError
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75
"""Longer than the usual pools of clients and balancers keep an idle connection, so that they close it, not we."""
DATE_RENEWED_S: Final = 1.0
LINGER_S: Final = 0.5
"""How long a connection without a request is kept when draining: one may be on its way, and HTTP/1.1 has no word to
stop it."""
TRANSPORT: Final = "penstock.transport"


class _State(ServerState):
    """Shared by the connections of one server."""

    def __init__(self) -> None:
        super().__init__()
        self.is_draining = False
        self.has_lost_connection = asyncio.Event()


class AbortableProtocol(HttpToolsProtocol):
    """Lets a response cut its own connection. ASGI has no way to: closing waits for the client to read. And answers
    with `connection: close` while its server drains."""

    def on_message_begin(self) -> None:
        """A request begins: its scope gets the transport."""
        super().on_message_begin()
        self.scope[TRANSPORT] = self.transport  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """The request is about to be answered."""
        super().on_headers_complete()
        if self._state.is_draining:
            self.cycle.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended; a drain that waits for the last one looks again."""
        super().connection_lost(exc)
        self._state.has_lost_connection.set()

    @property
    def _state(self) -> _State:
        assert isinstance(self.server_state, _State)
        return self.server_state


def abort_connection(scope: Scope) -> None:
    """Drop what the client has not read and close the connection; its request then sees a disconnect."""
    transport = scope.get(TRANSPORT)
    if transport is None:
        raise RuntimeError("the ASGI server is not ours: this request has no connection to cut")
    transport.abort()


class HttpEndpoint(Protocol):
    """Serves an application until it is stopped. A request's scope holds the connection that `abort_connection` cuts,
    as `penstock.transport`: anything with an `abort()`."""

    @property
    def address(self) -> str:
        """host:port that clients reach; from construction on."""

    def start(self, tasks: TaskSet, on_failed: Callable[[BaseException], None]) -> None:
        """Serve in the background, in `tasks`; `on_failed` is told if that ends by an error."""

    async def drain(self) -> None:
        """Close the port, so that clients go elsewhere, and return when the last connection has ended. What runs, and
        what still arrives over connections that were kept, is answered to its end."""

    async def stop(self) -> None:
        """Close the port and idle connections; return when all is closed. Running requests have a second to finish,
        then are cancelled."""


class HttpServer:
    """An `HttpEndpoint` on a TCP port."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """The port is bound here. Raises ConfigurationError if it cannot be."""
        self._socket = _bind(host, port)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            http=AbortableProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: TaskSet, on_failed: Callable[[BaseException], None]) -> None:
        """See `HttpEndpoint`."""
        self._task = tasks.spawn(self._server.serve(sockets=[self._socket]), name="http", on_error=on_failed)

    async def drain(self) -> None:
        """See `HttpEndpoint`."""
        await self._server.drain()

    async def stop(self) -> None:
        """See `HttpEndpoint`."""
        self._server.end()
        if self._task is not None:
            await asyncio.wait((self._task,))
        self._socket.close()


class _Uvicorn(uvicorn.Server):
    """Signals belong to the role, and there is nothing to look at ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._state = self.server_state = _State()
        self._end = asyncio.Event()

    async def drain(self) -> None:
        """See `HttpEndpoint`."""
        self._state.is_draining = True
        for server in getattr(self, "servers", ()):  # none before `startup`
            server.close()
        for connection in self._connections():
            if connection.cycle is not None:
                connection.cycle.keep_alive = False
        await asyncio.sleep(LINGER_S)
        for connection in self._connections():
            connection.shutdown()
        while self._state.connections:
            self._state.has_lost_connection.clear()
            await self._state.has_lost_connection.wait()

    def _connections(self) -> list[AbortableProtocol]:
        return [each for each in self._state.connections if isinstance(each, AbortableProtocol)]

    def end(self) -> None:
        """Leave the main loop, upon which uvicorn shuts down within its graceful timeout."""
        self.should_exit = True
        self._end.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Renew the Date header every second until the end."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), DATE_RENEWED_S)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigurationError(
            f"cannot serve HTTP on {host}:{port}: {error.strerror}; is the port in use?"
        ) from error
    bound.listen(BACKLOG)
    bound.setblocking(False)
    return bound
