"""What KV blocks travel over between simulated workers: an `engine_worker.kv.fabric.KvFabric` on the simulated network.

As UCX does: a small message is sent and forgotten, a large one waits until the other side has asked for it; tags belong
to the fabric, so a message that nobody has asked for yet is kept; a lost peer fails everything that was begun with it.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from engine_worker.kv.fabric import KvEndpoint
from engine_worker.kv.memory import Buffer
from fault_simulation.network import Endpoint, Listener, Network
from fault_simulation.node import Node
from mesh.errors import ConfigurationError

EAGER_BYTES: Final = 8192
"""Up to this size a send is done when it is sent."""


class SimulatedKvFabric:
    """The fabric of one agent."""

    def __init__(self, network: Network, node: Node, host: str) -> None:
        self.loop = network.loop
        self._network = network
        self._node = node
        self._host = host
        self._wanted: defaultdict[int, deque[_Receive]] = defaultdict(deque)
        self._early: defaultdict[int, deque[_Message]] = defaultdict(deque)
        self._endpoints: dict[SimulatedKvEndpoint, None] = {}

    def listen(self, port: int, accept: Callable[[KvEndpoint], None]) -> "SimulatedKvListener":
        """See `KvFabric.listen`."""
        try:
            listener = self._network.listen(self._node, self._host, port)
        except OSError as error:
            raise ConfigurationError(f"the KV agent cannot listen on port {port}: {error}") from error

        def accepted(connection: Endpoint) -> None:
            accept(self._endpoint(connection))

        listener.accept = accepted
        return SimulatedKvListener(listener)

    async def connect(self, host: str, port: int) -> KvEndpoint:
        """See `KvFabric.connect`."""
        endpoint = self._endpoint(None)
        self._network.dial(self._node, host, port, endpoint.connected)
        return endpoint

    def staleness(self) -> str:
        """See `KvFabric.staleness`: simulated devices are never made anew."""
        return ""

    async def jam(self) -> str:
        """See `KvFabric.jam`: simulated connections share nothing."""
        return ""

    def obstacle(self) -> str:
        """See `KvFabric.obstacle`."""
        return ""

    async def close(self) -> None:
        """See `KvFabric.close`; nothing of ours touches a buffer after its future."""
        for endpoint in list(self._endpoints):
            endpoint.close()

    def want(self, receive: "_Receive") -> None:
        """A message of a tag is asked for."""
        early = self._early.get(receive.tag)
        if early:
            message = early.popleft()
            if not early:
                del self._early[receive.tag]
            receive.take(message)
        else:
            self._wanted[receive.tag].append(receive)

    def arrived(self, message: "_Message") -> None:
        """A message has come."""
        wanted = self._wanted.get(message.tag)
        while wanted:
            receive = wanted.popleft()
            if not wanted:
                del self._wanted[message.tag]
            if not receive.done.done():
                receive.take(message)
                return
        self._early[message.tag].append(message)

    def forget(self, endpoint: "SimulatedKvEndpoint") -> None:
        """It has ended."""
        self._endpoints.pop(endpoint, None)

    def _endpoint(self, connection: Endpoint | None) -> "SimulatedKvEndpoint":
        endpoint = SimulatedKvEndpoint(self, connection)
        self._endpoints[endpoint] = None
        return endpoint


class SimulatedKvListener:
    """Listens for as long as it is referred to."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    @property
    def port(self) -> int:
        """Where peers connect."""
        return self._listener.address[1]

    def __del__(self) -> None:
        self._listener.close()


class SimulatedKvEndpoint:
    """One end of a connection between two agents."""

    def __init__(self, fabric: SimulatedKvFabric, connection: Endpoint | None) -> None:
        self._fabric = fabric
        self._connection = connection
        self._unsent: deque[tuple[Any, int]] = deque()
        """Frames from before the connection stood."""
        self._pending: dict[asyncio.Future[None], None] = {}
        self._sends: dict[int, asyncio.Future[None]] = {}
        """Large messages that the other side has not asked for yet."""
        self._next_send = 0
        self._stream = bytearray()
        self._stream_reads: deque[tuple[memoryview, asyncio.Future[None]]] = deque()
        self._failure = ""
        if connection is not None:
            connection.receiver = self

    # -- KvEndpoint

    def send(self, buffer: Buffer, tag: int, *, is_data: bool = False) -> asyncio.Future[None]:
        """See `KvEndpoint.send`."""
        done = self._begin()
        if not done.done():
            content = _bytes_of(buffer).tobytes()
            self._next_send += 1
            if len(content) > EAGER_BYTES:
                self._sends[self._next_send] = done
            else:
                self._settle(done)
            self._transmit(("tagged", tag, self._next_send, content), len(content))
        return done

    def receive(self, buffer: Buffer, tag: int, *, is_data: bool = False) -> asyncio.Future[None]:
        """See `KvEndpoint.receive`."""
        done = self._begin()
        if not done.done():
            self._fabric.want(_Receive(self, _bytes_of(buffer), tag, done))
        return done

    def send_stream(self, buffer: Buffer) -> asyncio.Future[None]:
        """See `KvEndpoint.send_stream`."""
        done = self._begin()
        if not done.done():
            content = _bytes_of(buffer).tobytes()
            self._settle(done)
            self._transmit(("stream", content), len(content))
        return done

    def receive_stream(self, buffer: Buffer) -> asyncio.Future[None]:
        """See `KvEndpoint.receive_stream`."""
        done = self._begin()
        if not done.done():
            self._stream_reads.append((_bytes_of(buffer), done))
            self._read_stream()
        return done

    def close(self) -> None:
        """See `KvEndpoint.close`."""
        if not self._failure:
            if self._connection is not None:
                self._connection.reset("the peer closed the connection")
            self._fail("the connection was closed")

    # -- the network

    def connected(self, connection: Endpoint | None, failure: str) -> None:
        """The connection stands, or there is none."""
        if connection is None:
            self._fail(failure)
        elif self._failure:
            connection.reset("the peer closed the connection")
        else:
            self._connection = connection
            connection.receiver = self
            while self._unsent:
                connection.send(*self._unsent.popleft())

    def received(self, frame: tuple[Any, ...]) -> None:
        """From the other end."""
        match frame:
            case ("tagged", tag, number, content):
                self._fabric.arrived(_Message(self, tag, number, content))
            case ("taken", number):
                if (done := self._sends.pop(number, None)) is not None:
                    self._settle(done)
            case ("stream", content):
                self._stream += content
                self._read_stream()

    def lost(self, reason: str) -> None:
        """The connection ended."""
        self._fail(reason)

    def taken(self, number: int, size_bytes: int) -> None:
        """A message of the other end was put where it was wanted."""
        if size_bytes > EAGER_BYTES:
            self._transmit(("taken", number), 64)

    def _begin(self) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._fabric.loop.create_future()
        if self._failure:
            done.set_exception(ConnectionError(self._failure))
            done.exception()  # of many that fail together, only one is awaited
        else:
            self._pending[done] = None
        return done

    def settled(self, done: asyncio.Future[None]) -> None:
        """An operation is complete."""
        self._settle(done)

    def _settle(self, done: asyncio.Future[None]) -> None:
        self._pending.pop(done, None)
        if not done.done():
            done.set_result(None)

    def _transmit(self, frame: tuple[Any, ...], size_bytes: int) -> None:
        if self._connection is None:
            self._unsent.append((frame, size_bytes))
        else:
            self._connection.send(frame, size_bytes)

    def _read_stream(self) -> None:
        while self._stream_reads and len(self._stream) >= len(self._stream_reads[0][0]):
            target, done = self._stream_reads.popleft()
            target[:] = self._stream[: len(target)]
            del self._stream[: len(target)]
            self._settle(done)

    def _fail(self, reason: str) -> None:
        if self._failure:
            return
        self._failure = reason or "the peer is gone"
        self._fabric.forget(self)
        pending, self._pending = self._pending, {}
        for done in pending:
            if not done.done():
                done.set_exception(ConnectionError(self._failure))
                done.exception()


@dataclass(slots=True)
class _Message:
    endpoint: SimulatedKvEndpoint
    tag: int
    number: int
    content: bytes


@dataclass(slots=True)
class _Receive:
    endpoint: SimulatedKvEndpoint
    target: memoryview
    tag: int
    done: asyncio.Future[None]

    def take(self, message: _Message) -> None:
        self.target[: len(message.content)] = message.content
        message.endpoint.taken(message.number, len(message.content))
        self.endpoint.settled(self.done)


def _bytes_of(buffer: Buffer) -> memoryview:
    return np.asarray(buffer).data.cast("B")
