"""Unary calls on one stream of `Frames.Call`: many at a time, each with its deadline, as gRPC has them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from mesh.errors import PeerUnavailable
from mesh.rpc.framed.call import CODES, FramedCall, call_error
from mesh.rpc.framed.context import UnaryContext
from mesh.rpc.framed.tickets import Caller
from mesh.rpc.limits import DEFAULT_DEADLINE_S, MAX_MESSAGE_BYTES
from mesh.rpc.outbox import Outbox
from penstock.v1 import frames_pb2

log = logging.getLogger(__name__)

MAX_CALLS: Final = 1024
"""Of one stream at a time. A server reads no further meanwhile; a caller takes gRPC."""
MAX_REQUEST_BYTES: Final = MAX_MESSAGE_BYTES - 1024
"""What surrounds a request has to fit into a message with it."""
RETRY_S: Final = 10.0
"""After a stream that could not be opened, or has ended, calls go over gRPC for so long."""
MAX_WAITING: Final = 2 * MAX_CALLS
"""Calls, and calls given up, that wait to be written."""
Handler = Callable[[str], Awaitable[grpc.RpcMethodHandler | None]]
Begin = Callable[[Outbox[frames_pb2.UnaryCall], Callable[[], None]], FramedCall]


class UnaryServer:
    """Serves the calls of one stream."""

    def __init__(self, handler: Handler, caller: Caller, write: Callable[[Any], Awaitable[None]]) -> None:
        """`handler` finds who serves a method, behind the guard; `write` sends an answer."""
        self._handler = handler
        self._caller = caller
        self._write = write
        self._running: dict[int, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(MAX_CALLS)

    async def serve(self, calls: AsyncIterator[frames_pb2.UnaryCall]) -> None:
        """Until the caller has no more calls and all are answered."""
        loop = asyncio.get_running_loop()
        try:
            async for call in calls:
                if call.is_cancelled:
                    if call.number in self._running:
                        self._running[call.number].cancel()
                    continue
                await self._room.acquire()
                task = self._running[call.number] = loop.create_task(self._serve(call), name=f"rpc {call.method}")
                task.add_done_callback(partial(self._ended, call.number))
            while self._running:
                await asyncio.wait(list(self._running.values()))
        finally:
            for task in list(self._running.values()):
                task.cancel()

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self._room.release()
        if self._running.get(number) is task:
            del self._running[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("an answer was not sent", extra={"error": str(error)})

    async def _serve(self, call: frames_pb2.UnaryCall) -> None:
        context = UnaryContext(self._caller, call.timeout_s)
        response = b""
        try:
            async with asyncio.timeout(call.timeout_s):
                response = await self._response(call, context)
        except TimeoutError:
            context.send_status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        code, details = context.status or (grpc.StatusCode.OK, "")
        answer = frames_pb2.UnaryAnswer(number=call.number, code=code.value[0], details=details, response=response)
        await self._write(answer)

    async def _response(self, call: frames_pb2.UnaryCall, context: UnaryContext) -> bytes:
        """Empty with a status other than OK."""
        try:
            handler = await self._handler(call.method)
            if handler is None or handler.unary_unary is None:
                context.send_status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
                return b""
            answer = await handler.unary_unary((handler.request_deserializer or bytes)(call.request), context)
            response: bytes = (handler.response_serializer or bytes)(answer)
            code = context.code() or grpc.StatusCode.OK
            if len(response) > MAX_REQUEST_BYTES:
                code, response = grpc.StatusCode.RESOURCE_EXHAUSTED, b""
                context.set_details(f"an answer of more than {MAX_REQUEST_BYTES} bytes")
            context.send_status(code, context.details())
            return response if code is grpc.StatusCode.OK else b""
        except grpc.aio.AbortError:
            context.send_status(grpc.StatusCode.UNKNOWN, "aborted without a status")
        # As gRPC does: a servicer that fails ends its call, and nothing else.
        except Exception as error:
            if isinstance(error, TimeoutError):
                raise
            log.exception("a servicer failed", extra={"method": call.method})
            context.send_status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        return b""


class UnaryCalls:
    """Makes unary calls to one peer on a stream; says when they are to go over gRPC, as while it is being opened."""

    def __init__(self, begin: Begin, clock: Callable[[], float]) -> None:
        """`begin` opens the stream for what an outbox brings, and calls what it is given once that is there."""
        self._begin = begin
        self._clock = clock
        self._outbox: Outbox[frames_pb2.UnaryCall] | None = None
        """Of the stream, while there is one or it is being opened."""
        self._stream: FramedCall | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_open = False
        self._retry_s = 0.0
        self._number = 0
        self._waiting: dict[int, asyncio.Future[frames_pb2.UnaryAnswer]] = {}

    def takes(self, request: bytes) -> bool:
        """Whether a call with this request can be made now. The first one opens the stream for those after it."""
        if self._outbox is None and self._clock() >= self._retry_s:
            self._outbox = Outbox("the stream of unary calls", MAX_WAITING)
            self._stream = self._begin(self._outbox, self._opened)
            self._reading = asyncio.get_running_loop().create_task(self._read(self._stream), name="read unary answers")
        return self._is_open and len(self._waiting) < MAX_CALLS and len(request) <= MAX_REQUEST_BYTES

    async def call(self, method: str, request: bytes, timeout_s: float | None) -> bytes:
        """The response. Raises AioRpcError, and CancelledError when the channel is closed."""
        assert self._outbox is not None, "it takes calls"
        timeout_s = DEFAULT_DEADLINE_S if timeout_s is None else timeout_s
        self._number += 1
        number, outbox = self._number, self._outbox
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            outbox.put(
                frames_pb2.UnaryCall(number=number, method=method, timeout_s=max(timeout_s, 0.0), request=request)
            )
            async with asyncio.timeout(timeout_s):
                answer = await answered
        except TimeoutError:
            raise call_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        except PeerUnavailable as error:
            raise call_error(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        except asyncio.CancelledError:
            with suppress(PeerUnavailable):
                outbox.put(frames_pb2.UnaryCall(number=number, is_cancelled=True))
            raise
        finally:
            del self._waiting[number]
        code = CODES.get(answer.code, grpc.StatusCode.UNKNOWN)
        if code is not grpc.StatusCode.OK:
            raise call_error(code, answer.details)
        return bytes(answer.response)

    async def close(self, grace_s: float | None) -> None:
        """Give up all calls that are not answered within `grace_s`."""
        if grace_s and self._waiting:
            await asyncio.wait(list(self._waiting.values()), timeout=grace_s)
        if self._stream is not None:
            self._stream.cancel()
        for answered in self._waiting.values():
            answered.cancel()

    def _opened(self) -> None:
        self._is_open = True

    async def _read(self, stream: FramedCall) -> None:
        reason = "the stream of unary calls has ended"
        try:
            async for answer in stream:
                answered = self._waiting.get(answer.number)
                if answered is not None and not answered.done():
                    answered.set_result(answer)
        except grpc.aio.AioRpcError as error:
            reason = str(error.details())
        finally:
            assert self._outbox is not None, "of this stream"
            self._outbox.close()
            self._outbox, self._is_open, self._retry_s = None, False, self._clock() + RETRY_S
            for answered in self._waiting.values():
                if not answered.done():
                    answered.set_exception(call_error(grpc.StatusCode.UNAVAILABLE, reason))


def decoded(response: bytes, deserialize: Callable[[bytes], Any] | None) -> Any:
    """The message of a response. Raises AioRpcError, as gRPC does, for what is none."""
    try:
        return response if deserialize is None else deserialize(response)
    except DecodeError as error:
        raise call_error(grpc.StatusCode.INTERNAL, f"an answer cannot be read: {error}") from None
