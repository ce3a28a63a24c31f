"""A simulated gRPC channel: `grpc.aio`'s calls and interceptors over a simulated connection.

States as in gRPC 1.85 with its default balancer, measured against it by tests/unit/fault_simulation: IDLE until it is
used; CONNECTING; READY; after a failure TRANSIENT_FAILURE until READY, while it tries on by itself with growing pauses;
IDLE again when a connection is lost.
"""

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
from grpc._cython import cygrpc
from grpc.aio import _call, _interceptor

from fault_simulation.grpc_call import ClientCall
from fault_simulation.grpc_connection import GrpcConnection, Kind, encoded, limits_of
from fault_simulation.loop import VirtualLoop
from fault_simulation.network import Dialling, Endpoint, Network
from fault_simulation.node import Handle, Node, NodeState

State: TypeAlias = grpc.ChannelConnectivity

BACKOFF_MULTIPLIER = 1.6
BACKOFF_JITTER = 0.2


class SimulatedChannel(grpc.aio.Channel):
    """Behaves as a `grpc.aio.Channel` does. Calls in any of the four kinds; unary ones may have interceptors."""

    def __init__(
        self,
        network: Network,
        node: Node,
        rng: random.Random,
        address: str,
        options: Sequence[tuple[str, Any]],
        interceptors: Sequence[Any],
    ) -> None:
        unsupported = [each for each in interceptors if not isinstance(each, grpc.aio.UnaryUnaryClientInterceptor)]
        assert not unsupported, f"the simulated channel intercepts unary calls only, not by {unsupported}"
        self.loop: VirtualLoop = network.loop
        self.node = node
        self.limits = limits_of(options, keepalive_without_calls=False)
        self.interceptors = list(interceptors)
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._network = network
        self._rng = rng
        self._state = State.IDLE
        self._state_waiters: list[asyncio.Future[None]] = []
        self._waiting: dict[ClientCall, None] = {}
        """Calls for the next connection."""
        self._active: dict[ClientCall, GrpcConnection] = {}
        self._streams: dict[int, ClientCall] = {}
        self._connection: GrpcConnection | None = None
        """The one that new calls go to."""
        self._connections: dict[GrpcConnection, None] = {}
        """With those that only finish what they have."""
        self._dialling: Dialling | None = None
        self._greeting: GrpcConnection | None = None
        self._attempt_timer: Handle | None = None
        self._retry_timer: Handle | None = None
        self._retry_at_s = 0.0
        self._backoff_s = 0.0
        self._failure = ""
        self._next_stream_id = 1

    # -- grpc.aio.Channel

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """A multi-callable."""
        return functools.partial(self._unary_unary, method, request_serializer, response_deserializer)

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """A multi-callable."""
        return functools.partial(self._call, _call.UnaryStreamCall, method, request_serializer, response_deserializer)

    def stream_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """A multi-callable."""
        return functools.partial(
            self._streamed, _call.StreamUnaryCall, method, request_serializer, response_deserializer
        )

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """A multi-callable."""
        return functools.partial(
            self._streamed, _call.StreamStreamCall, method, request_serializer, response_deserializer
        )

    def get_state(self, try_to_connect: bool = False) -> State:
        """The state before any attempt that this begins."""
        state = self._state
        if try_to_connect and state is State.IDLE:
            self._connect()
        return state

    async def wait_for_state_change(self, last_observed_state: State) -> None:
        """Return once the state is another one."""
        while self._state is last_observed_state:
            waiter = self.loop.create_future()
            self._state_waiters.append(waiter)
            await waiter

    async def channel_ready(self) -> None:
        """Return once it is READY."""
        while (state := self.get_state(try_to_connect=True)) is not State.READY:
            if state is State.SHUTDOWN:
                raise cygrpc.UsageError("Channel is closed.")
            await self.wait_for_state_change(state)

    async def close(self, grace: float | None = None) -> None:
        """Cancel all calls (`grace` is not waited for) and close the connection."""
        if self._state is State.SHUTDOWN:
            return
        self._set_state(State.SHUTDOWN)
        for call in [*self._active, *self._waiting]:
            call.cancel("Channel closed!")
        self._stop_attempt()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()
        self._connection = None

    async def __aenter__(self) -> "SimulatedChannel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # As grpc.aio: a channel that nobody refers to is closed.
        if self._state is not State.SHUTDOWN and self.node.state is NodeState.RUNNING and not self.loop.is_closed():
            for connection in self._connections:
                connection.close()

    # -- for calls

    def begin(self, call: ClientCall) -> None:
        """See `CallOwner.begin`."""
        if self._connection is not None:
            self._open(call, self._connection)
        elif self._state is State.TRANSIENT_FAILURE and not call.wait_for_ready:
            call.finish(grpc.StatusCode.UNAVAILABLE, self._failure)
        else:
            self._waiting[call] = None
            if self._state is State.IDLE:
                self._connect()

    def ended(self, call: ClientCall) -> None:
        """See `CallOwner.ended`."""
        self._waiting.pop(call, None)
        self._streams.pop(call.stream_id, None)
        connection = self._active.pop(call, None)
        if connection is None:
            return
        connection.calls -= 1
        if not connection.calls and connection is not self._connection and connection in self._connections:
            del self._connections[connection]
            connection.close()

    def call(self, method: str, timeout_s: float | None, wait_for_ready: bool | None) -> ClientCall:
        """What stands in for Cython's call. Raises UsageError on a closed channel."""
        if self._state is State.SHUTDOWN:
            raise cygrpc.UsageError("Channel is closed.")
        return ClientCall(self, method, timeout_s, wait_for_ready)

    # -- making calls

    def _unary_unary(
        self,
        method: str,
        serialize: Any,
        deserialize: Any,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        wait_for_ready: bool | None = None,
    ) -> Any:
        if not self.interceptors:
            return self._call(
                _call.UnaryUnaryCall,
                method,
                serialize,
                deserialize,
                request,
                timeout=timeout,
                metadata=metadata,
                wait_for_ready=wait_for_ready,
            )
        if self._state is State.SHUTDOWN:
            raise cygrpc.UsageError("Channel is closed.")
        return _InterceptedCall(self, method, serialize, deserialize, request, timeout, metadata, wait_for_ready)

    def _streamed(
        self, kind: Any, method: str, serialize: Any, deserialize: Any, request_iterator: Any = None, **options: Any
    ) -> Any:
        return self._call(kind, method, serialize, deserialize, request_iterator, **options)

    def _call(
        self,
        kind: Any,
        method: str,
        serialize: Any,
        deserialize: Any,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        wait_for_ready: bool | None = None,
    ) -> Any:
        return kind(
            request,
            timeout,
            grpc.aio.Metadata.from_tuple(tuple(metadata or ())),
            None,
            wait_for_ready,
            _CallFactory(self),
            method,
            functools.partial(encoded, serialize),
            deserialize,
            self.loop,
        )

    # -- connecting

    def _set_state(self, state: State) -> None:
        if state is self._state or self._state is State.SHUTDOWN:
            return
        self._state = state
        waiters, self._state_waiters = self._state_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _connect(self) -> None:
        if self._state is not State.TRANSIENT_FAILURE:
            self._set_state(State.CONNECTING)
        limits = self.limits
        if self._backoff_s == 0.0:
            self._backoff_s = limits.first_backoff_s
        else:
            self._backoff_s = min(self._backoff_s * BACKOFF_MULTIPLIER, limits.longest_backoff_s)
        pause_s = self._backoff_s * self._rng.uniform(1 - BACKOFF_JITTER, 1 + BACKOFF_JITTER)
        self._retry_at_s = self.loop.now_s + pause_s
        within_s = max(pause_s, limits.shortest_attempt_s)
        self._attempt_timer = self.loop.call_in(self.node, within_s, self._attempt_failed, "connection timed out")
        self._dialling = self._network.dial(self.node, *self._target, self._dialled)

    def _dialled(self, endpoint: Endpoint | None, failure: str) -> None:
        self._dialling = None
        if endpoint is None:
            self._attempt_failed(failure)
            return
        connection = GrpcConnection(
            self.loop,
            self.node,
            endpoint,
            self.limits,
            lambda frame: self._received(connection, frame),
            lambda reason: self._lost(connection, reason),
        )
        self._greeting = connection

    def _attempt_failed(self, failure: str) -> None:
        self._stop_attempt()
        self._failure = (
            f"failed to connect to all addresses; last error: {self._target[0]}:{self._target[1]}: {failure}"
        )
        self._set_state(State.TRANSIENT_FAILURE)
        for call in [call for call in self._waiting if not call.wait_for_ready]:
            call.finish(grpc.StatusCode.UNAVAILABLE, self._failure)
        pause_s = max(0.0, self._retry_at_s - self.loop.now_s)
        self._retry_timer = self.loop.call_in(self.node, pause_s, self._connect)

    def _stop_attempt(self) -> None:
        if self._attempt_timer is not None:
            self._attempt_timer.cancel()
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
        if self._greeting is not None:
            self._greeting.close()
            self._greeting = None

    def _ready(self, connection: GrpcConnection) -> None:
        if self._attempt_timer is not None:
            self._attempt_timer.cancel()
        self._greeting = None
        self._backoff_s = 0.0
        self._connection = connection
        self._connections[connection] = None
        self._set_state(State.READY)
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            self._open(call, connection)

    def _open(self, call: ClientCall, connection: GrpcConnection) -> None:
        stream_id = self._next_stream_id
        self._next_stream_id += 1
        self._streams[stream_id] = call
        self._active[call] = connection
        connection.calls += 1
        call.opened(connection, stream_id)

    def _received(self, connection: GrpcConnection, frame: tuple[Any, ...]) -> None:
        kind = frame[0]
        if kind is Kind.SETTINGS:
            if connection is self._greeting:
                self._ready(connection)
        elif kind is Kind.GO_AWAY:
            self._leave(connection)
            if not connection.calls:
                self._connections.pop(connection, None)
                connection.close()
        else:
            call = self._streams.get(frame[1])
            if call is not None:
                call.received(frame)

    def _lost(self, connection: GrpcConnection, reason: str) -> None:
        if connection is self._greeting:
            self._greeting = None
            self._attempt_failed(reason)
            return
        self._connections.pop(connection, None)
        self._leave(connection)
        for call in [call for call, carrier in self._active.items() if carrier is connection]:
            call.broken(grpc.StatusCode.UNAVAILABLE, reason)

    def _leave(self, connection: GrpcConnection) -> None:
        """No new calls on it."""
        if connection is self._connection:
            self._connection = None
            self._set_state(State.IDLE)


class _CallFactory:
    """Where `grpc.aio._call` gets its Cython call from. `deadline` is a duration here: gRPC's is wall-clock time."""

    __slots__ = ("_channel",)

    def __init__(self, channel: SimulatedChannel) -> None:
        self._channel = channel

    def call(
        self, method: str, deadline: float | None, credentials: object, wait_for_ready: bool | None, handle: int
    ) -> ClientCall:
        return self._channel.call(method, deadline, wait_for_ready)


class _InterceptedCall(_interceptor.InterceptedUnaryUnaryCall):
    """gRPC's own; only what it ends in is ours, as its deadlines are of the wall clock."""

    def __init__(
        self,
        channel: SimulatedChannel,
        method: str,
        serialize: Any,
        deserialize: Any,
        request: Any,
        timeout: float | None,
        metadata: Any,
        wait_for_ready: bool | None,
    ) -> None:
        self._simulated = channel
        super().__init__(
            channel.interceptors,
            request,
            timeout,
            grpc.aio.Metadata.from_tuple(tuple(metadata or ())),
            None,
            wait_for_ready,
            None,
            method,
            functools.partial(encoded, serialize),
            deserialize,
            channel.loop,
        )

    async def _run_interceptor(
        self,
        interceptors: list[Any],
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        if interceptors:
            return await super()._run_interceptor(
                interceptors, method, request_serializer, response_deserializer, client_call_details, request
            )
        return self._simulated._call(
            _call.UnaryUnaryCall,
            client_call_details.method,
            request_serializer,
            response_deserializer,
            request,
            timeout=client_call_details.timeout,
            metadata=client_call_details.metadata,
            wait_for_ready=client_call_details.wait_for_ready,
        )
