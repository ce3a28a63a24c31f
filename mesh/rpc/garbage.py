"""Messages that are none: whoever sends them is told so, and nobody's log gets a traceback for it."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from mesh.errors import PenstockError


class _Garbage(PenstockError):
    """Bytes that cannot be read as the message that the method takes."""


class GarbageGuard(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT where a message cannot be read. gRPC itself answers UNKNOWN, and logs a traceback that
    any stranger can have it write.

    A stream costs nothing more for it per message: only what calls its servicer is wrapped, once for each call.
    """

    def __init__(self) -> None:
        self._guarded: dict[str, tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler]] = {}
        """By method: the handler, and the same with a guard."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Called by gRPC for each call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        known = self._guarded.get(handler_call_details.method)
        if known is None or known[0] is not handler:
            known = self._guarded[handler_call_details.method] = (handler, _guarded(handler))
        return known[1]


def _guarded(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour, decode = getattr(handler, kind), handler.request_deserializer
    if not inspect.iscoroutinefunction(behaviour) and not inspect.isasyncgenfunction(behaviour):
        return handler

    def read(message: bytes) -> Any:
        """One message of a stream: raises where its servicer awaits it."""
        try:
            return decode(message)
        except DecodeError as error:
            raise _Garbage(str(error)) from None

    def read_first(message: bytes) -> Any:
        """The only message, which gRPC reads before there is anybody to catch an error."""
        try:
            return decode(message)
        except DecodeError as error:
            return _Garbage(str(error))

    async def serve(request: Any, context: Any) -> Any:
        if isinstance(request, _Garbage):
            await _refuse(request, context)
        try:
            return await behaviour(request, context)
        except _Garbage as garbage:
            await _refuse(garbage, context)

    async def serve_stream(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, _Garbage):
            await _refuse(request, context)
        try:
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except _Garbage as garbage:
            await _refuse(garbage, context)

    replaced = serve_stream if inspect.isasyncgenfunction(behaviour) else serve
    return handler._replace(request_deserializer=read if handler.request_streaming else read_first, **{kind: replaced})


async def _refuse(garbage: _Garbage, context: Any) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is no message of this method: {garbage}")
