"""A service with every behaviour that the conformance of the simulated gRPC is about."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

Code = grpc.StatusCode


class Servicer:
    """Every kind of behaviour, and what its handlers saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.hung = 0
        """Calls of `hang` that have begun."""
        self.go_on = asyncio.Event()
        self.tells_half_close = False

    def handlers(self) -> grpc.GenericRpcHandler:
        unary, streamed = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        methods = {
            "Echo": unary(self.echo),
            "Fail": unary(self.fail),
            "Refuse": unary(self.refuse),
            "Hang": unary(self.hang),
            "CancelItself": unary(self.cancel_itself),
            "Large": unary(self.large),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
            "Sum": grpc.stream_unary_rpc_method_handler(self.sum),
            "Upper": streamed(self.upper),
            "UpperByContext": streamed(self.upper_by_context),
            "One": streamed(self.one),
            "RefuseLate": streamed(self.refuse_late),
            "Listen": streamed(self.listen),
            "Ignore": streamed(self.ignore),
            "Pour": streamed(self.pour),
        }
        return grpc.method_handlers_generic_handler("test.Service", methods)

    async def _watch_end(self, coroutine: Any) -> Any:
        try:
            return await coroutine
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    async def echo(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.seen.append(context.time_remaining())
        return request

    async def fail(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        raise ValueError("a bug")

    async def refuse(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await context.abort(Code.NOT_FOUND, "no such thing", (("reason", "gone"),))

    async def hang(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.hung += 1
        return await self._watch_end(asyncio.sleep(1000, b""))  # type: ignore[no-any-return]

    async def cancel_itself(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        raise asyncio.CancelledError

    async def large(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return bytes(int(request))

    async def count(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield str(number).encode()

    async def sum(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        return str(sum([int(request) async for request in requests])).encode()

    async def upper(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request.upper()

    async def upper_by_context(self, requests: Any, context: grpc.aio.ServicerContext) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(request.upper())

    async def one(self, requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"one"

    async def refuse_late(self, requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"first"
        await context.abort(Code.RESOURCE_EXHAUSTED, "enough")

    async def listen(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"listening"
        try:
            async for request in requests:
                self.seen.append(request)
            # gRPC shows the end of a call to who reads before it cancels the handler, or only cancels it.
            if self.tells_half_close:
                self.seen.append("half-closed")
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    async def ignore(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"ignoring"
        await self.go_on.wait()
        total = 0
        async for request in requests:
            total += len(request)
        yield str(total).encode()

    async def pour(self, requests: Any, context: grpc.aio.ServicerContext) -> None:
        for _ in range(2048):
            await context.write(bytes(16384))
            self.seen.append(16384)
