"""The client's side of one simulated call.

It takes the place of gRPC's Cython call under the call classes of `grpc.aio` itself (`grpc.aio._call`), so what our
code sees of a call (its states, what raises what, what cancels whom) is gRPC's own code, not a copy.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc
from grpc._cython import cygrpc

from fault_simulation.grpc_connection import GrpcConnection, Kind, Limits, Metadata, ReceiveWindow, SendWindow
from fault_simulation.loop import VirtualLoop
from fault_simulation.node import Handle, Node, NodeState


class CallOwner(Protocol):
    """The channel, as a call sees it."""

    loop: VirtualLoop
    node: Node
    limits: Limits

    def begin(self, call: "ClientCall") -> None:
        """Have `call.opened` called once there is a connection, or `call.finish` if there will be none."""

    def ended(self, call: "ClientCall") -> None:
        """It needs its connection no more."""


class ClientCall:
    """Has the methods of `cygrpc._AioCall` that `grpc.aio._call` uses."""

    def __init__(self, channel: CallOwner, method: str, timeout_s: float | None, wait_for_ready: bool | None) -> None:
        self._channel = channel
        self._loop = channel.loop
        self._method = method
        self.wait_for_ready = bool(wait_for_ready)
        self.stream_id = 0
        self._deadline_s = None if timeout_s is None else self._loop.now_s + timeout_s
        self._connection: GrpcConnection | None = None
        self._metadata: Metadata = ()
        self._opening: tuple[bytes | None, bool] = (None, False)
        self._opened: asyncio.Future[None] | None = None
        self._status: Any = None
        self._trailers: tuple[int, str, Metadata] | None = None
        self._initial_metadata: Metadata | None = None
        self._has_initial_metadata = self._loop.create_future()
        self._has_status: asyncio.Future[None] | None = None
        self._is_locally_cancelled = False
        self._done_callbacks: list[Callable[[], None]] = []
        self._inbox: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._send_window = SendWindow(self._loop)
        self._receive_window = ReceiveWindow()
        self._timer: Handle | None = None
        if timeout_s is not None:
            self._timer = self._loop.call_in(channel.node, max(0.0, timeout_s), self._deadline_exceeded)

    # -- what grpc.aio asks

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is not None and self._status.code() == grpc.StatusCode.CANCELLED.value[0]

    def is_ok(self) -> bool:
        return self._status is not None and self._status.code() == 0

    def is_locally_cancelled(self) -> bool:
        return self._is_locally_cancelled

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        if self.done():
            callback()
        else:
            self._done_callbacks.append(callback)

    def time_remaining(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._loop.now_s)

    def cancel(self, details: str) -> None:
        if self._channel.node.state is not NodeState.DEAD:  # else a call object is collected with its process
            self._is_locally_cancelled = True
            self.give_up(grpc.StatusCode.CANCELLED, details)

    def set_internal_error(self, error: str) -> None:
        if self._status is None:
            self.give_up(grpc.StatusCode.INTERNAL, f"Internal error from Core: {error}")

    async def status(self) -> Any:
        if self._status is None:
            if self._has_status is None:
                self._has_status = self._loop.create_future()
            await asyncio.shield(self._has_status)
        return self._status

    async def initial_metadata(self) -> Metadata:
        await asyncio.shield(self._has_initial_metadata)
        return self._initial_metadata or ()

    async def unary_unary(self, request: bytes, metadata: Metadata, context: object) -> bytes | None:
        return await self._unary_response(request, metadata, None)

    async def stream_unary(
        self, metadata: Metadata, on_metadata_sent: Callable[[], None], context: object
    ) -> bytes | None:
        return await self._unary_response(None, metadata, on_metadata_sent)

    async def initiate_unary_stream(self, request: bytes, metadata: Metadata, context: object) -> None:
        await self._open(request, metadata)
        await asyncio.shield(self._has_initial_metadata)

    async def initiate_stream_stream(
        self, metadata: Metadata, on_metadata_sent: Callable[[], None], context: object
    ) -> None:
        await self._open(None, metadata)
        on_metadata_sent()
        await asyncio.shield(self._has_initial_metadata)

    async def send_serialized_message(self, message: bytes) -> None:
        if len(message) > self._channel.limits.max_send_bytes:
            self._refuse_message("Sent", message, self._channel.limits.max_send_bytes)
        while self._send_window.is_full and self._status is None:
            await self._send_window.wait()
        if self._status is not None or self._connection is None:
            raise cygrpc.InternalError("Failed to send: the call has ended")
        self._send_window.take(message)
        self._connection.send_message(message, Kind.MESSAGE, self.stream_id, message)

    async def receive_serialized_message(self) -> Any:
        while not self._inbox:
            if self._status is not None:
                return cygrpc.EOF
            self._reader = self._loop.create_future()
            await self._reader
        message = self._inbox.popleft()
        read_bytes = self._receive_window.read(message)
        if read_bytes and self._connection is not None:
            self._connection.send(Kind.WINDOW, self.stream_id, read_bytes)
        self._settle()
        return message

    async def send_receive_close(self) -> None:
        if self._connection is not None and self._status is None:
            self._connection.send(Kind.HALF_CLOSE, self.stream_id)

    # -- what the channel says

    def opened(self, connection: GrpcConnection, stream_id: int) -> None:
        """Go ahead on a connection."""
        self._connection, self.stream_id = connection, stream_id
        message, is_only = self._opening
        connection.send_message(
            message or b"",
            Kind.CALL,
            stream_id,
            self._method,
            self._metadata,
            self.time_remaining(),
            message,
            is_only,
        )
        if message is not None:
            self._send_window.take(message)
        if self._opened is not None and not self._opened.done():
            self._opened.set_result(None)

    def received(self, frame: tuple[Any, ...]) -> None:
        """A frame of this call's stream."""
        kind = frame[0]
        if self._status is not None:
            return
        if kind is Kind.MESSAGE:
            self._take(frame[2])
        elif kind is Kind.STATUS:
            if frame[5] is not None:
                self._take(frame[5])
            if self._status is None:
                self._trailers = frame[2:5]
                self._settle()
        elif kind is Kind.INITIAL:
            self._set_initial_metadata(frame[2])
        elif kind is Kind.WINDOW:
            self._send_window.give(frame[2])

    def finish(self, code: grpc.StatusCode, details: str, trailing_metadata: Metadata = ()) -> None:
        """It has ended; what was not read is dropped unless the server ended it well."""
        if self._status is not None:
            return
        self._status = cygrpc.AioRpcStatus(code.value[0], details, trailing_metadata, None)
        if self._timer is not None:
            self._timer.cancel()
        self._set_initial_metadata(())
        for waiter in (self._opened, self._has_status, self._reader):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._send_window.wake()
        self._channel.ended(self)
        callbacks, self._done_callbacks = self._done_callbacks, []
        for callback in callbacks:
            callback()

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        """End it from this side."""
        if self._status is not None:
            return
        if self._connection is not None:
            self._connection.send(Kind.CANCEL, self.stream_id)
        self.broken(code, details)

    def broken(self, code: grpc.StatusCode, details: str) -> None:
        """It ends without the server's word."""
        if self._status is None:
            self._inbox.clear()
            self.finish(code, details)

    # --

    async def _unary_response(
        self, request: bytes | None, metadata: Metadata, on_metadata_sent: Callable[[], None] | None
    ) -> bytes | None:
        await self._open(request, metadata)
        if on_metadata_sent is not None:
            on_metadata_sent()
        message = await self.receive_serialized_message()
        await self.status()
        return message if self.is_ok() else None

    async def _open(self, message: bytes | None, metadata: Metadata) -> None:
        """Return once the call is on a connection, or has failed."""
        if self._status is not None:
            return
        if message is not None and len(message) > self._channel.limits.max_send_bytes:
            self._refuse_message("Sent", message, self._channel.limits.max_send_bytes)
            return
        self._metadata, self._opening = tuple(metadata), (message, message is not None)
        self._opened = self._loop.create_future()
        self._channel.begin(self)
        await self._opened

    def _take(self, message: bytes) -> None:
        if len(message) > self._channel.limits.max_receive_bytes:
            self._refuse_message("Received", message, self._channel.limits.max_receive_bytes)
            return
        self._set_initial_metadata(())
        self._inbox.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _settle(self) -> None:
        """The server's status counts once all its messages have been read."""
        if self._trailers is not None and not self._inbox:
            code, details, trailing_metadata = self._trailers
            self.finish(_CODES[code], details, trailing_metadata)

    def _set_initial_metadata(self, metadata: Metadata) -> None:
        if self._initial_metadata is None:
            self._initial_metadata = metadata
            self._has_initial_metadata.set_result(None)

    def _refuse_message(self, verb: str, message: bytes, most_bytes: int) -> None:
        details = f"CLIENT: {verb} message larger than max ({len(message)} vs. {most_bytes})"
        self.give_up(grpc.StatusCode.RESOURCE_EXHAUSTED, details)

    def _deadline_exceeded(self) -> None:
        self.give_up(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


_CODES = {code.value[0]: code for code in grpc.StatusCode}
