"""A gRPC channel some of whose calls go in frames."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from typing import Any, Final

import grpc

from mesh.errors import PenstockError
from mesh.rpc.framed.call import FramedCall
from mesh.rpc.framed.unary import UnaryCalls, decoded
from mesh.rpc.framed.ways import Ways
from penstock.v1 import frames_pb2

OnOpened = Callable[[str, str, str, PenstockError | None], None]
UNARY_STREAM: Final = "/penstock.v1.Frames/Call"


class FramedChannel(grpc.aio.Channel):
    """Its calls of some methods go in frames where they can."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, ways: Ways, methods: Collection[str], on_opened: OnOpened
    ) -> None:
        """`on_opened` is told of each stream's method, address and carrier, with the reason where that is gRPC."""
        self._channel = channel
        self._address = address
        self._ways = ways
        self._methods = methods
        self._on_opened = on_opened
        self._calls: dict[FramedCall, None] = {}
        self._unary: UnaryCalls | None = None

    async def close(self, grace: float | None = None) -> None:
        """Unary calls that wait have `grace` seconds for their answers, as gRPC's have; streams in frames have none."""
        if self._unary is not None:
            await self._unary.close(grace)
        for call in list(self._calls):
            call.cancel()
        await self._channel.close(grace)

    async def __aenter__(self) -> "FramedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        over_grpc = self._channel.unary_unary(method, request_serializer, response_deserializer, _registered_method)
        if method not in self._methods:
            return over_grpc

        async def call(request: Any, timeout: float | None = None) -> Any:
            if self._unary is None:
                self._unary = UnaryCalls(self._unary_stream, asyncio.get_running_loop().time)
            raw = request if request_serializer is None else request_serializer(request)
            if not self._unary.takes(raw):
                return await over_grpc(request, timeout=timeout)
            return decoded(await self._unary.call(method, raw, timeout), response_deserializer)

        return call

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        over_grpc = self._channel.unary_stream(method, request_serializer, response_deserializer, _registered_method)
        if method not in self._methods:
            return over_grpc

        def begin(request: Any, timeout: float | None = None) -> FramedCall:
            fall_back = partial(over_grpc, request, timeout=timeout)
            return self._begin(method, request_serializer, response_deserializer, _only(request), timeout, fall_back)

        return begin

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.stream_unary(*args, **kwargs)

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        over_grpc = self._channel.stream_stream(method, request_serializer, response_deserializer, _registered_method)
        if method not in self._methods:
            return over_grpc

        def begin(requests: AsyncIterator[Any] | None = None, timeout: float | None = None) -> FramedCall:
            fall_back = partial(over_grpc, requests, timeout=timeout)
            return self._begin(method, request_serializer, response_deserializer, requests, timeout, fall_back)

        return begin

    def _unary_stream(self, calls: AsyncIterator[frames_pb2.UnaryCall], on_open: Callable[[], None]) -> FramedCall:
        """That of the unary calls. Without it they go over gRPC one by one."""
        encode, decode = frames_pb2.UnaryCall.SerializeToString, frames_pb2.UnaryAnswer.FromString
        return self._begin(UNARY_STREAM, encode, decode, calls, None, None, on_open)

    def _begin(
        self,
        method: str,
        serialize: Any,
        deserialize: Any,
        requests: AsyncIterator[Any] | None,
        timeout_s: float | None,
        over_grpc: Callable[[], Any] | None,
        on_open: Callable[[], None] = lambda: None,
    ) -> FramedCall:
        def opened(carrier: str) -> None:
            self._on_opened(method, self._address, carrier, None)
            on_open()

        def fall_back(reason: PenstockError) -> Any:
            self._on_opened(method, self._address, "grpc", reason)
            return over_grpc() if over_grpc is not None else None

        def ended() -> None:
            self._calls.pop(call, None)

        to_peer = partial(self._ways.to, self._channel)
        call = FramedCall(to_peer, method, serialize, deserialize, requests, timeout_s, opened, fall_back, ended)
        self._calls[call] = None
        return call


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request
