"""The server's side of framed streams: the servicers of the gRPC server, behind the same guards."""

import asyncio
import inspect
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import DecodeError

from mesh.errors import PeerUnavailable, ProtocolViolation
from mesh.identity.contexts import TlsContexts
from mesh.rpc.framed.context import FramedContext
from mesh.rpc.framed.frames import FrameKind
from mesh.rpc.framed.sockets import listening_socket, listening_tcp_socket
from mesh.rpc.framed.stream import FramedStream
from mesh.rpc.framed.tickets import Caller, Ticket, Tickets
from penstock.v1 import frames_pb2

log = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 5.0
"""Within this a connection must have shown a ticket."""
LINGER_S: Final = 2.0
"""What a caller has to close its end after it was sent the status."""
MAX_STRANGERS: Final = 256
"""Connections of one socket that have shown no ticket yet."""
ACCEPT_PAUSE_S: Final = 1.0
"""After a connection that the system would not give, as asyncio's own servers wait."""


class Door(Protocol):
    """Where connections come in."""

    @property
    def asks_for_certificates(self) -> bool:
        """Whether each connection has shown whose it is, besides its ticket."""

    def open(self) -> None:
        """Take connections from now on."""

    async def close(self) -> None:
        """Take none any more; those that have come stay."""

    def known(self) -> None:
        """A connection has shown its ticket, or will not any more."""


class FramedServer:
    """Serves the methods of the servicers that are added, but those of streamed requests and one answer, to whoever has
    a ticket: streams as such, unary methods on the stream of `Frames.Call`."""

    def __init__(
        self, tickets: Tickets, interceptors: Sequence[grpc.aio.ServerInterceptor], tls: TlsContexts | None = None
    ) -> None:
        """`tls`: whoever comes over TCP has to show a certificate."""
        self._tickets = tickets
        self._interceptors = interceptors
        self._tls = tls
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}
        self._doors: list[Door] = []
        self._calls: dict[_ServerCall, None] = {}
        self._none_left = asyncio.Event()

    def add_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        """Those of one service, by the names of its methods; before `start`."""
        for name, handler in handlers.items():
            if handler.response_streaming or not handler.request_streaming:
                self._handlers[f"/{service}/{name}"] = handler

    def listen_unix(self, name: str) -> None:
        """Listen under a name on this host; before `start`. Raises OSError."""
        self._doors.append(_Door(self, listening_socket(name)))

    def listen_tcp(self, host: str, port: int) -> int:
        """Listen at an address of this machine, and return the port; before `start`. Raises OSError."""
        listener = listening_tcp_socket(host, port)
        self._doors.append(_Door(self, listener, self._tls))
        return int(listener.getsockname()[1])

    def add_door(self, door: "Door") -> None:
        """Take what comes through it; before `start`."""
        self._doors.append(door)

    def connection(self, door: "Door") -> FramedStream:
        """The stream of a connection that has come through a door."""
        call = _ServerCall(self, door)
        self.began(call)
        return call.stream

    async def start(self) -> None:
        """Answer calls."""
        for door in self._doors:
            door.open()

    async def stop(self, grace_s: float | None) -> None:
        """Take no new calls, let running ones end within `grace_s`, then cut them; return when the last has ended."""
        for door in self._doors:
            await door.close()
        if grace_s:
            await self._wait_idle(grace_s)
        for call in list(self._calls):
            call.cut("the server is stopping")
        await self._wait_idle(LINGER_S)
        for call in list(self._calls):
            call.stream.abort("the server is stopping")
        await self._wait_idle(None)

    async def handler(self, method: str) -> grpc.RpcMethodHandler | None:
        """Who serves a method, behind the interceptors."""

        async def registered(details: Any) -> Any:
            return self._handlers.get(details.method)

        continuation: Callable[[Any], Awaitable[Any]] = registered
        for interceptor in reversed(self._interceptors):
            continuation = _behind(interceptor, continuation)
        found: grpc.RpcMethodHandler | None = await continuation(_Details(method))
        return found

    def use(self, ticket: bytes) -> Ticket | None:
        """See `Tickets.use`."""
        return self._tickets.use(ticket)

    def began(self, call: "_ServerCall") -> None:
        """A connection has come."""
        self._calls[call] = None

    def ended(self, call: "_ServerCall") -> None:
        """Its handler and its connection have ended."""
        self._calls.pop(call, None)
        if not self._calls:
            self._none_left.set()

    async def _wait_idle(self, timeout_s: float | None) -> None:
        if not self._calls:
            return
        self._none_left.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        except TimeoutError:
            return


class _Door:
    """One socket that takes connections, each with the TLS context of its time; and the strangers in front of it."""

    def __init__(self, server: FramedServer, listener: socket.socket, tls: TlsContexts | None = None) -> None:
        self._server = server
        self._listener = listener
        self._tls = tls
        self._strangers = 0
        self._accepting: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def asks_for_certificates(self) -> bool:
        """Whether each connection has shown whose it is, besides its ticket."""
        return self._tls is not None

    def open(self) -> None:
        """Take connections from now on."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept(), name="accept framed streams")

    async def close(self) -> None:
        """Take none any more; those that have come stay."""
        tasks = [*self._connecting, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    def known(self) -> None:
        """A connection has shown its ticket, or will not any more."""
        self._strangers -= 1

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # such as too many open files; the listener itself is whole
                log.exception("a connection for frames could not be taken", extra={"error": str(error)})
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if self._strangers >= MAX_STRANGERS:
                log.error(
                    "a connection is refused: too many have shown no ticket", extra={"connections": self._strangers}
                )
                connection.close()
                continue
            self._strangers += 1
            call = _ServerCall(self._server, self)
            self._server.began(call)
            task = loop.create_task(self._connect(call, connection), name="connect a framed stream")
            self._connecting.add(task)
            task.add_done_callback(partial(self._connected, call, connection))

    def _connected(self, call: "_ServerCall", connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        if task.cancelled():
            connection.close()
            call.disconnected("the server is stopping")

    async def _connect(self, call: "_ServerCall", connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        timeouts = {"ssl_handshake_timeout": CALL_TIMEOUT_S, "ssl_shutdown_timeout": LINGER_S} if self._tls else {}
        try:
            context = self._tls.server() if self._tls is not None else None
            await loop.connect_accepted_socket(lambda: call.stream, connection, ssl=context, **timeouts)
        except OSError as error:  # TLS's errors are, too
            log.warning("a connection for frames was not made", extra={"error": str(error)})
            call.disconnected(str(error))


class _ServerCall:
    """One connection, the stream on it, and the task of its handler."""

    def __init__(self, server: FramedServer, door: Door) -> None:
        self._server = server
        self._door = door
        self._loop = asyncio.get_running_loop()
        self.stream = FramedStream(self._on_control, self.disconnected)
        self._method = ""
        self._context: FramedContext | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_known = False
        self._is_connected = True
        self._timer = self._loop.call_later(CALL_TIMEOUT_S, self.stream.abort, "no ticket came")

    def cut(self, reason: str) -> None:
        """The server ends it. To the handler it looks as if the caller had gone."""
        if self._context is None or self._task is None:
            self.stream.abort(reason)
            return
        self._context.send_status(grpc.StatusCode.UNAVAILABLE, reason)
        self._caller_gone()

    def disconnected(self, reason: str) -> None:
        """The connection has ended, which is how a caller gives up its call, too."""
        if not self._is_connected:
            return
        self._is_connected = False
        self._timer.cancel()
        self._note_known()
        if self._context is not None and not self._context.is_status_sent:
            log.debug("a caller has gone", extra={"method": self._method, "reason": reason})
        self._caller_gone()
        self._forget_if_over()

    def _on_control(self, kind: FrameKind, payload: bytes) -> None:
        if kind is not FrameKind.CALL or self._is_known:
            raise ProtocolViolation(f"an unexpected frame came: {kind.name}")
        try:
            call = frames_pb2.FramedCall.FromString(payload)
        except DecodeError as error:
            raise ProtocolViolation(f"a frame CALL cannot be read: {error}") from None
        self._note_known()
        self._timer.cancel()
        ticket = self._server.use(call.ticket)
        if ticket is None:
            log.error("a call with an unknown ticket is refused", extra={"method": call.method})
            self._refuse(grpc.StatusCode.UNAUTHENTICATED, "the ticket is unknown, used or has expired")
            return
        caller = ticket.caller
        if self._door.asks_for_certificates:
            # The certificate of this very connection counts, and a ticket is of use to nobody else.
            caller = Caller(self.stream.certificate_names, caller.peer)
            if caller.identity != ticket.caller.identity:
                log.error(
                    "a call with another's ticket is refused",
                    extra={
                        "method": call.method,
                        "caller": str(caller.identity),
                        "ticket": str(ticket.caller.identity),
                    },
                )
                self._refuse(grpc.StatusCode.UNAUTHENTICATED, "the ticket is somebody else's")
                return
        self.stream.takes_messages = True
        self.stream.send(FrameKind.ACCEPT, frames_pb2.FramedAccept(proof=ticket.proof).SerializeToString())
        self._serve(call, caller)

    def _note_known(self) -> None:
        if not self._is_known:
            self._is_known = True
            self._door.known()

    def _refuse(self, code: grpc.StatusCode, details: str) -> None:
        status = frames_pb2.FramedStatus(code=code.value[0], details=details)
        self.stream.send(FrameKind.STATUS, status.SerializeToString())
        self._timer = self._loop.call_later(LINGER_S, self.stream.abort, "the caller does not hang up")

    def _serve(self, call: frames_pb2.FramedCall, caller: Caller) -> None:
        self._method = call.method
        timeout_s = call.timeout_s if call.HasField("timeout_s") else None
        context = self._context = FramedContext(self.stream, caller, timeout_s)
        self._task = self._loop.create_task(self._handle(context), name=f"rpc {call.method}")
        self._task.add_done_callback(self._handled)
        if timeout_s is not None:
            self._timer = self._loop.call_later(max(timeout_s, 0.0), self._deadline_passed)

    def _deadline_passed(self) -> None:
        """Say so: this clock began before the caller's, which would hear of a cancelled handler first."""
        assert self._context is not None, "it is being served"
        self._context.send_status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self._caller_gone()

    def _caller_gone(self) -> None:
        """Cancel the handler. Whoever reads in it hears first that there is nothing more."""
        if self._task is not None and not self._task.done() and self._context is not None:
            self._context.is_caller_gone = True
            self.stream.end_input()
            self._loop.call_soon(self._task.cancel)

    async def _handle(self, context: FramedContext) -> None:
        try:
            handler = await self._server.handler(self._method)
            if handler is None or not handler.response_streaming:
                context.send_status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
                return
            context.use(handler)
            if handler.request_streaming:
                answer = handler.stream_stream(context.messages(), context)
            else:
                request = await context.read()
                if request is grpc.aio.EOF:
                    context.send_status(grpc.StatusCode.INTERNAL, "the call has no request")
                    return
                answer = handler.unary_stream(request, context)
            if inspect.isasyncgen(answer):
                async for message in answer:
                    await context.write(message)
            else:
                await answer
            context.send_status(context.code() or grpc.StatusCode.OK, context.details())
        except grpc.aio.AbortError:
            context.send_status(grpc.StatusCode.UNKNOWN, "aborted without a status")
        except asyncio.CancelledError:
            context.send_status(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        except PeerUnavailable:
            if not context.is_caller_gone and not self.stream.is_closed:
                log.exception("a servicer failed", extra={"method": self._method})
                context.send_status(grpc.StatusCode.UNKNOWN, "the servicer lost a peer of its own")
        # As gRPC does: a servicer that fails ends its call, and nothing else.
        except Exception as error:
            log.exception("a servicer failed", extra={"method": self._method})
            context.send_status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")

    def _handled(self, task: asyncio.Task[None]) -> None:
        self._timer.cancel()
        if self._is_connected:
            self._timer = self._loop.call_later(LINGER_S, self.stream.abort, "the caller does not hang up")
        self._forget_if_over()

    def _forget_if_over(self) -> None:
        if not self._is_connected and (self._task is None or self._task.done()):
            self._server.ended(self)


class _Details:
    """`grpc.HandlerCallDetails`."""

    __slots__ = ("invocation_metadata", "method")

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


def _behind(interceptor: Any, continuation: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def run(details: Any) -> Any:
        return await interceptor.intercept_service(continuation, details)

    return run
