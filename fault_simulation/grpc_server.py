"""A simulated gRPC server: what gRPC's Cython server does with servicers, over simulated connections."""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
from grpc._cython import cygrpc

from fault_simulation.grpc_connection import (
    GrpcConnection,
    Kind,
    Metadata,
    ReceiveWindow,
    SendWindow,
    encoded,
    limits_of,
)
from fault_simulation.loop import VirtualLoop
from fault_simulation.network import Endpoint, Listener, Network
from fault_simulation.node import Handle, Node, NodeTask

log = logging.getLogger(__name__)

FINISHED = "RPC already finished."
CANCELLED_AFTER_S = 0.0001


class SimulatedServer(grpc.aio.Server):
    """Behaves as a `grpc.aio.Server` does."""

    def __init__(
        self, network: Network, node: Node, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]
    ) -> None:
        self.loop: VirtualLoop = network.loop
        self.node = node
        self.limits = limits_of(options, keepalive_without_calls=True)
        self._network = network
        self._interceptors = list(interceptors)
        self._generic: list[grpc.GenericRpcHandler] = []
        self._registered: dict[str, grpc.RpcMethodHandler] = {}
        self._listeners: list[Listener] = []
        self._calls: dict[ServerCall, None] = {}
        self._connections: dict[GrpcConnection, None] = {}
        self._is_stopping = False
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Before `start`."""
        self._generic.extend(generic_rpc_handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: dict[str, grpc.RpcMethodHandler]
    ) -> None:
        """Before `start`; these come before generic ones."""
        self._registered.update({f"/{service_name}/{name}": handler for name, handler in method_handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        """Raises RuntimeError if it is taken, as gRPC does."""
        host, _, port = address.rpartition(":")
        try:
            listener = self._network.listen(self.node, host, int(port))
        except OSError as error:
            raise RuntimeError(f"Failed to bind to address {address}: {error}") from error
        self._listeners.append(listener)
        return listener.address[1]

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> NoReturn:
        """Not simulated."""
        raise NotImplementedError("the simulated network has no TLS")

    async def start(self) -> None:
        """Take connections."""
        for listener in self._listeners:
            listener.accept = self._accept

    async def stop(self, grace: float | None) -> None:
        """Close the port, let calls end within `grace`, cancel the rest; return when the last handler has ended."""
        self._is_stopping = True
        for listener in self._listeners:
            listener.close()
        for connection in self._connections:
            connection.send(Kind.GO_AWAY)
        if grace and self._calls:
            await self._wait_idle(grace)
        for call in list(self._calls):
            call.cut("Cancelling all calls")
        while self._calls:
            await self._wait_idle(None)
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()
        self._ended.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Whether `timeout` passed before the server had stopped."""
        try:
            await asyncio.wait_for(self._ended.wait(), timeout)
        except TimeoutError:
            return True
        return False

    async def find(self, method: str, metadata: Metadata) -> grpc.RpcMethodHandler | None:
        """The handler of a method, through the interceptors."""
        details = _Details(method, metadata)

        async def query(details: Any) -> grpc.RpcMethodHandler | None:
            handler = self._registered.get(details.method)
            if handler is not None:
                return handler
            answers = (generic.service(details) for generic in self._generic)
            return next((answer for answer in answers if answer is not None), None)

        continuation: Callable[[Any], Awaitable[Any]] = query
        for interceptor in reversed(self._interceptors):
            continuation = _intercepted(interceptor, continuation)
        return await continuation(details)

    def ended(self, call: "ServerCall") -> None:
        """A handler has ended."""
        self._calls.pop(call, None)
        call.connection.calls -= 1
        if not self._calls:
            self._idle.set()

    async def _wait_idle(self, within_s: float | None) -> None:
        self._idle = asyncio.Event()
        try:
            await asyncio.wait_for(self._idle.wait(), within_s)
        except TimeoutError:
            return

    def _accept(self, endpoint: Endpoint) -> None:
        streams: dict[int, ServerCall] = {}

        def received(frame: tuple[Any, ...]) -> None:
            if frame[0] is Kind.CALL:
                if not self._is_stopping:
                    streams[frame[1]] = self._begin(connection, streams, frame)
            else:
                call = streams.get(frame[1])
                if call is not None:
                    call.received(frame)

        def lost(reason: str) -> None:
            self._connections.pop(connection, None)
            for call in list(streams.values()):
                call.client_gone()

        connection = GrpcConnection(self.loop, self.node, endpoint, self.limits, received, lost)
        self._connections[connection] = None
        connection.send(Kind.SETTINGS)

    def _begin(
        self, connection: GrpcConnection, streams: dict[int, "ServerCall"], frame: tuple[Any, ...]
    ) -> "ServerCall":
        call = ServerCall(self, connection, streams, frame)
        self._calls[call] = None
        connection.calls += 1
        return call


class ServerCall:
    """One call and the task of its handler."""

    def __init__(
        self,
        server: SimulatedServer,
        connection: GrpcConnection,
        streams: dict[int, "ServerCall"],
        frame: tuple[Any, ...],
    ) -> None:
        _, self.stream_id, self.method, self.metadata, timeout_s, message, is_only = frame
        self.loop = server.loop
        self.connection = connection
        self.deadline_s = None if timeout_s is None else self.loop.now_s + timeout_s
        self.is_client_gone = False
        self.is_status_sent = False
        self.abort_error: BaseException | None = None
        self._server = server
        self._streams = streams
        self._inbox: deque[bytes] = deque()
        self._is_half_closed = is_only
        self._reader: asyncio.Future[None] | None = None
        self._send_window = SendWindow(self.loop)
        self._receive_window = ReceiveWindow()
        self._timer: Handle | None = None
        self._task: NodeTask = self.loop.spawn(server.node, self._serve(), f"rpc {self.method}")
        self._task.add_done_callback(self._ended)
        if message is not None:
            self._take(message)
        if timeout_s is not None:
            self._timer = self.loop.call_in(server.node, timeout_s, self.client_gone)

    def received(self, frame: tuple[Any, ...]) -> None:
        """A frame of the call's stream."""
        kind = frame[0]
        if kind is Kind.MESSAGE:
            self._take(frame[2])
        elif kind is Kind.HALF_CLOSE:
            self._is_half_closed = True
            self._wake_reader()
        elif kind is Kind.CANCEL:
            self.client_gone()
        elif kind is Kind.WINDOW:
            self._send_window.give(frame[2])

    def client_gone(self) -> None:
        """The client gave it up, its connection ended, or its deadline is over."""
        if not self._task.done() and not self.is_status_sent:
            self.is_client_gone = True
            self._end()

    def cut(self, reason: str) -> None:
        """The server ends it. To the handler it looks as if the client had gone."""
        self.send_status(grpc.StatusCode.UNAVAILABLE, reason, ())
        self.is_client_gone = True
        self._end()

    def _end(self) -> None:
        """Cancel the handler. Whoever reads in it is told first that there is nothing more, as by gRPC, where the two
        are completions of their own."""
        self._is_half_closed = True
        self._inbox.clear()
        self._wake_reader()
        self._send_window.wake()
        self.loop.call_in(self._server.node, CANCELLED_AFTER_S, self._task.cancel)

    async def read(self) -> bytes | None:
        """The next message; None when the client has sent its last."""
        while not self._inbox:
            if self._is_half_closed:
                return None
            self._reader = self.loop.create_future()
            await self._reader
        message = self._inbox.popleft()
        read_bytes = self._receive_window.read(message)
        if read_bytes:
            self.connection.send(Kind.WINDOW, self.stream_id, read_bytes)
        return message

    async def write(self, message: bytes) -> None:
        """Raises cygrpc.InternalError when the call has ended."""
        most_bytes = self._server.limits.max_send_bytes
        if len(message) > most_bytes:
            details = f"SERVER: Sent message larger than max ({len(message)} vs. {most_bytes})"
            self.send_status(grpc.StatusCode.RESOURCE_EXHAUSTED, details, ())
        while self._send_window.is_full and not self.is_client_gone and not self.is_status_sent:
            await self._send_window.wait()
        if self.is_client_gone or self.is_status_sent:
            raise cygrpc.InternalError("Failed to send: the call has ended")
        self._send_window.take(message)
        self.connection.send_message(message, Kind.MESSAGE, self.stream_id, message)

    def send_initial(self, metadata: Metadata) -> None:
        """Metadata before any message."""
        self.connection.send(Kind.INITIAL, self.stream_id, metadata)

    def send_status(
        self, code: grpc.StatusCode, details: str, metadata: Metadata, message: bytes | None = None
    ) -> None:
        """The last that the client hears, with the only message of a unary answer."""
        if self.is_status_sent:
            return
        self.is_status_sent = True
        self._send_window.wake()
        if not self.is_client_gone:
            self.connection.send_message(
                message or b"", Kind.STATUS, self.stream_id, code.value[0], details, metadata, message
            )

    def _take(self, message: bytes) -> None:
        most_bytes = self._server.limits.max_receive_bytes
        if len(message) > most_bytes:
            details = f"SERVER: Received message larger than max ({len(message)} vs. {most_bytes})"
            self.send_status(grpc.StatusCode.RESOURCE_EXHAUSTED, details, ())
            self._task.cancel()
            return
        self._inbox.append(message)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._streams.pop(self.stream_id, None)
        self._server.ended(self)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.report("an RPC ended by an error", f"{self.method} {error!r}", self._server.node)

    async def _serve(self) -> None:
        context = SimulatedContext(self)
        try:
            try:
                handler = await self._server.find(self.method, self.metadata)
                if handler is None:
                    self.send_status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ())
                else:
                    await self._handle(handler, context)
            except grpc.aio.AbortError as error:
                if error is not self.abort_error:
                    self.loop.report("an abort error was replaced", self.method, self._server.node)
                return
            if self.abort_error is not None:
                log.error("abort error unexpectedly suppressed", exc_info=self.abort_error)
        except asyncio.CancelledError:
            # gRPC sends no status for a handler that cancels itself, and the client waits for its deadline.
            return
        except cygrpc.InternalError:
            if not self.is_client_gone and not self.is_status_sent:
                raise
        # gRPC's own last line of defence, with its own words.
        except Exception as error:
            log.exception("Unexpected [%s] raised by servicer method [%s]", type(error).__name__, self.method)
            code = context.code() or grpc.StatusCode.UNKNOWN
            self.send_status(code, f"Unexpected {type(error)}: {error}", context.trailing)

    async def _handle(self, handler: grpc.RpcMethodHandler, context: "SimulatedContext") -> None:
        context.serialize, context.deserialize = handler.response_serializer, handler.request_deserializer
        argument: Any
        if handler.request_streaming:
            argument = context.messages()
        else:
            raw = await self.read()
            if raw is None:
                return
            argument = context.decode(raw)
        if handler.response_streaming:
            answer = (handler.stream_stream if handler.request_streaming else handler.unary_stream)(argument, context)
            if inspect.isasyncgen(answer):
                async for message in answer:
                    await context.write(message)
            else:
                await answer
            context.raise_for_termination()
            self.send_status(context.code() or grpc.StatusCode.OK, context.details(), context.trailing)
        else:
            serve = handler.stream_unary if handler.request_streaming else handler.unary_unary
            response = await serve(argument, context)
            context.raise_for_termination()
            message = context.encode(response)
            if len(message) > self._server.limits.max_send_bytes:
                await self.write(message)
            self.send_status(context.code() or grpc.StatusCode.OK, context.details(), context.trailing, message)


class SimulatedContext(grpc.aio.ServicerContext):
    """What a servicer gets."""

    def __init__(self, call: ServerCall) -> None:
        self.serialize: Callable[[Any], bytes] | None = None
        self.deserialize: Callable[[bytes], Any] | None = None
        self.trailing: Metadata = ()
        self._call = call
        self._code: grpc.StatusCode | None = None
        self._details = ""

    async def read(self) -> Any:
        """The next message of the client, or EOF."""
        self.raise_for_termination()
        raw = await self._call.read()
        return grpc.aio.EOF if raw is None else self.decode(raw)

    async def write(self, message: Any) -> None:
        """Return once there is room for more."""
        self.raise_for_termination()
        await self._call.write(self.encode(message))

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """At most once, before any message."""
        self.raise_for_termination()
        self._call.send_initial(tuple(initial_metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call with a status. Raises, always."""
        call = self._call
        if call.abort_error is not None:
            raise cygrpc.UsageError("Abort already called!")
        assert code is not grpc.StatusCode.OK, "Abort has been called with an OK status"
        call.abort_error = grpc.aio.AbortError("Locally aborted.")
        call.send_status(code, details, tuple(trailing_metadata) or self.trailing)
        raise call.abort_error

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status. Raises, always."""
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """To be sent with the status."""
        self.raise_for_termination()
        self.trailing = tuple(trailing_metadata)

    def invocation_metadata(self) -> Metadata:
        """The client's."""
        metadata: Metadata = self._call.metadata
        return metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        """The status of a call that returns."""
        self._code = code

    def set_details(self, details: str) -> None:
        """The details of a call that returns."""
        self._details = details

    def code(self) -> grpc.StatusCode | None:
        """What was set."""
        return self._code

    def details(self) -> str:
        """What was set."""
        return self._details

    def trailing_metadata(self) -> Metadata:
        """What was set."""
        return self.trailing

    def set_compression(self, compression: grpc.Compression) -> None:
        """Nothing is compressed."""

    def disable_next_message_compression(self) -> None:
        """Nothing is compressed."""

    def peer(self) -> str:
        """Who called."""
        return "ipv4:simulated"

    def peer_identities(self) -> None:
        """Nobody is known by certificate."""

    def peer_identity_key(self) -> None:
        """Nobody is known by certificate."""

    def auth_context(self) -> dict[str, Any]:
        """Empty: no TLS."""
        return {}

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline."""
        deadline_s = self._call.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - self._call.loop.now_s)

    def cancelled(self) -> bool:
        """Whether the client has gone."""
        return self._call.is_client_gone

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._call.is_client_gone or self._call.is_status_sent

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call it when the handler has ended."""
        self._call._task.add_done_callback(lambda _: callback(self))

    async def messages(self) -> AsyncIterator[Any]:
        """The client's messages."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def decode(self, raw: bytes) -> Any:
        """A message of the client."""
        return raw if self.deserialize is None else self.deserialize(raw)

    def encode(self, message: Any) -> Any:
        """A message for the client."""
        return encoded(self.serialize, message)

    def raise_for_termination(self) -> None:
        """Nothing more can be done with a call that has ended."""
        if self._call.abort_error is not None:
            raise self._call.abort_error
        if self._call.is_status_sent and not self._call.is_client_gone:
            raise cygrpc.UsageError(FINISHED)


class _Details:
    """`grpc.HandlerCallDetails`."""

    __slots__ = ("invocation_metadata", "method")

    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata

    def _replace(self, **changes: Any) -> "_Details":
        return _Details(changes.get("method", self.method), changes.get("invocation_metadata", ()))


def _intercepted(interceptor: Any, continuation: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def run(details: Any) -> Any:
        return await interceptor.intercept_service(continuation, details)

    return run
