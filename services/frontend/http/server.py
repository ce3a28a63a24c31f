"""The HTTP server: uvicorn inside a process that has its own signals, its own sockets, its own end, and bounds for what
strangers may make it hold."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, Protocol

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from mesh.errors import ConfigurationError
from mesh.open_files import allow_open_files
from mesh.tasks import TaskSet
from services.frontend.errors import ApiError
from services.frontend.http.connections import (
    Answered,
    Asked,
    Because,
    Began,
    ConnectionManager,
    ConnectionState,
    Event,
    Lost,
    Opened,
    Tick,
)
from services.frontend.http.errors import error_body
from services.frontend.http.tls import TlsFiles

log = logging.getLogger(__name__)

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75
"""Longer than the usual pools of clients and balancers keep an idle connection, so that they close it, not we."""
TICK_S: Final = 1.0
"""How often the Date header is renewed, late connections are closed, and a renewed certificate is looked for."""
HANDSHAKE_S: Final = 10.0
"""That TLS is given; a connection is counted once it is done."""
MAX_PIPELINED: Final = 16
"""Requests that may wait on one connection behind the one that is served. No client of ours pipelines at all."""
LINGER_S: Final = 0.5
"""How long a connection without a request is kept when draining: one may be on its way, and HTTP/1.1 has no word to
stop it."""
TRANSPORT: Final = "penstock.transport"


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """What clients may make a server hold."""

    max_connections: int = 8192
    header_timeout_s: float = 10.0
    max_header_bytes: int = 64 * 1024
    on_closed: Callable[[str], None] = lambda _: None
    """Hears why, each time that a connection is closed or refused by these bounds."""


class _State(ServerState):
    """Shared by the connections of one server."""

    def __init__(self, limits: EdgeLimits) -> None:
        super().__init__()
        self.limits = limits
        allowed = allow_open_files(limits.max_connections)
        if allowed < limits.max_connections:
            extra = {"asked": limits.max_connections, "allowed": allowed}
            log.warning("the limit of open files allows fewer connections; raise it (ulimit -n)", extra=extra)
        self.manager = ConnectionManager(allowed, limits.header_timeout_s)
        self.is_draining = False
        self.has_lost_connection = asyncio.Event()

    def handle(self, event: Event) -> None:
        """Close what is to be closed now."""
        for close in self.manager.handle(event, asyncio.get_running_loop().time()):
            self.limits.on_closed(close.because.value)
            assert isinstance(close.connection, GuardedProtocol)
            close.connection.close(_REASONS[close.because])


_REASONS: Final = {
    Because.LATE: ApiError(408, "The request did not arrive in time.", code="request_timeout"),
    Because.SHED: None,
    Because.FULL: ApiError(
        503,
        "Too many connections; try again.",
        "server_error",
        code="too_many_connections",
        headers={"retry-after": "1"},
    ),
}


class _Refused(Exception):
    """In the middle of parsing a request."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Bounds what it may hold before there is a request, lets a response cut it (ASGI has no way to:
    closing waits for the client to read), and answers with `connection: close` while its server drains."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_in_head = True
        self._heads = 0
        """Complete ones."""
        self._head_bytes = 0
        """Of the head that is coming, in whole reads and, on its own, in fields."""
        self._field_bytes = 0
        self._is_whole = True
        """Whether the body of the last request has come."""
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._state.handle(Opened(self))

    def data_received(self, data: bytes) -> None:
        """Parse it, unless it belongs to a head that is too large."""
        if self.transport.is_closing():
            return
        state = self._state
        if state.manager.state(self) is ConnectionState.IDLE:
            state.handle(Began(self))
        heads, was_in_head = self._heads, self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head and self._heads == heads:
            self._head_bytes += len(data)
            if self._head_bytes > state.limits.max_header_bytes and not self.transport.is_closing():
                state.limits.on_closed("large_head")
                self.close(_too_large(state.limits.max_header_bytes))

    def on_message_begin(self) -> None:
        """A request begins: its scope gets the transport."""
        super().on_message_begin()
        self._field_bytes, self._is_whole = 0, False
        self.scope[TRANSPORT] = self.transport  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        """A piece of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or behind the body."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request is about to be answered."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse("pipelined", ApiError(400, "Too many requests at once on one connection."))
        self._is_in_head, self._head_bytes = False, 0
        self._heads += 1
        self._state.handle(Asked(self))
        super().on_headers_complete()
        if self._state.is_draining:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The request is whole."""
        super().on_message_complete()
        self._is_in_head = self._is_whole = True
        if self._state.manager.state(self) is ConnectionState.WAITING:  # it was answered before
            self._state.handle(Asked(self))
            self._state.handle(Answered(self, is_whole=True))

    def on_response_complete(self) -> None:
        """A request is answered; the next one of those that wait begins."""
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last:
            self._state.handle(Answered(self, self._is_whole))

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is no HTTP, and where a callback above has refused the request."""
        if self._refusal is None:
            self._state.limits.on_closed("not_http")
        self.close(self._refusal or ApiError(400, msg))

    def close(self, error: ApiError | None) -> None:
        """Answer with an error, unless there is none or an answer has begun, and close the connection."""
        if error is None or (self.cycle is not None and not self.cycle.response_complete):
            self.transport.abort()
            return
        body = error_body(error)
        fields = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **error.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended; a drain that waits for the last one looks again."""
        super().connection_lost(exc)
        self._state.handle(Lost(self))
        self._state.has_lost_connection.set()

    def _count(self, size: int) -> None:
        self._field_bytes += size
        limit = self._state.limits.max_header_bytes
        if self._field_bytes > limit:
            self._refuse("large_head", _too_large(limit))

    def _refuse(self, reason: str, error: ApiError) -> NoReturn:
        """Parse no further."""
        self._state.limits.on_closed(reason)
        self._refusal = error
        raise _Refused

    @property
    def _state(self) -> _State:
        assert isinstance(self.server_state, _State)
        return self.server_state


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        431, f"The request's head is larger than {limit_bytes} bytes.", code="request_header_fields_too_large"
    )


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
    """An `HttpEndpoint` on a TCP port of its own, and on one that it shares with other processes of its user."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: EdgeLimits | None = None,
        tls: TlsFiles | None = None,
        shared_port: int = 0,
    ) -> None:
        """The ports are bound here. `tls`: None for plain HTTP; `shared_port`: 0 for none. Raises ConfigurationError
        if they cannot be."""
        self._sockets = [_bind(host, port)]
        self.address = f"{host}:{self._sockets[0].getsockname()[1]}"
        if shared_port:
            try:
                self._sockets.append(_bind(host, shared_port, is_shared=True))
            except ConfigurationError:
                self._sockets[0].close()
                raise
        config = uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        # Its warnings are of what strangers send, as often as they like. That is counted.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._server = _Uvicorn(config, limits or EdgeLimits(), tls)
        self._task: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        """Of clients, now."""
        return len(self._server.server_state.connections)

    def start(self, tasks: TaskSet, on_failed: Callable[[BaseException], None]) -> None:
        self._task = tasks.spawn(self._server.serve(sockets=self._sockets), name="http", on_error=on_failed)

    async def drain(self) -> None:
        await self._server.drain()

    async def stop(self) -> None:
        self._server.end()
        if self._task is not None:
            await asyncio.wait((self._task,))
        for each in self._sockets:
            each.close()


class _Uvicorn(uvicorn.Server):
    """Signals belong to the role, and there is nothing to look at ten times a second."""

    def __init__(self, config: uvicorn.Config, limits: EdgeLimits, tls: TlsFiles | None) -> None:
        super().__init__(config)
        self._state = self.server_state = _State(limits)
        self._tls = tls
        self._end = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with our certificate, and a bound on the time that a client takes over it."""
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {"ssl": self._tls.context, "ssl_handshake_timeout": HANDSHAKE_S}
        make = partial(GuardedProtocol, self.config, self.server_state, {})
        self.servers = [await loop.create_server(make, sock=each, backlog=BACKLOG, **options) for each in sockets or ()]
        self.started = True

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

    def _connections(self) -> list[GuardedProtocol]:
        return [each for each in self._state.connections if isinstance(each, GuardedProtocol)]

    def end(self) -> None:
        """Leave the main loop, upon which uvicorn shuts down within its graceful timeout."""
        self.should_exit = True
        self._end.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Renew the Date header every second, and see to connections and certificate, until the end."""
        while not await self.on_tick(0):
            self._state.handle(Tick())
            if self._tls is not None:
                self._tls.look()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), TICK_S)


def _bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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
