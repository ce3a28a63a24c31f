"""Framed streams over the simulated network: the mesh's own channel, server and frames, on connections of bytes.

What a process writes is cut into pieces at drawn places, which arrive as the network has it: late, after a cut that is
healed, or never, where a process dies or a way stays cut. So a frame breaks off anywhere.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import grpc

from fault_simulation.grpc_connection import encoded
from fault_simulation.network import Endpoint, Listener, Network
from fault_simulation.node import Node
from mesh.errors import PeerUnavailable
from mesh.rpc.framed.channel import FramedChannel
from mesh.rpc.framed.server import FramedServer
from mesh.rpc.framed.stream import FramedStream
from mesh.rpc.framed.tickets import Tickets
from mesh.rpc.framed.transport import FRAMED_METHODS, FramedAndGrpcServer, Frames
from mesh.rpc.framed.ways import TCP_CONNECT_TIMEOUT_S, ClosedPorts, Ways
from mesh.runtime import Clock, Entropy, Transport
from penstock.v1 import frames_pb2_grpc

CUT_SHARE: Final = 0.2
"""Of the writes: their bytes arrive in two pieces."""


class FramedOverNetwork:
    """A `Transport` over the simulated one, as `FramedTransport` is over gRPC's; streams go over TCP."""

    identity = None

    def __init__(
        self, inner: Transport, network: Network, node: Node, clock: Clock, entropy: Entropy, rng: random.Random
    ) -> None:
        self._inner = inner
        self._network = network
        self._node = node
        self._clock = clock
        self._entropy = entropy
        self._rng = rng
        self._closed_ports = ClosedPorts(clock.now_s)

    def channel(
        self, address: str, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any], role: str = ""
    ) -> grpc.aio.Channel:
        """A channel from this node."""
        channel = self._inner.channel(address, options, interceptors, role)
        ways = _NetworkWays(address, role, self._closed_ports, self._network, self._node, self._rng)
        return _Channel(channel, address, ways, FRAMED_METHODS, lambda *_: None)

    def to_others(self) -> Transport:
        """Not simulated."""
        return self._inner.to_others()

    def server(self, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]) -> grpc.aio.Server:
        """A server on this node that takes frames, too."""
        tickets = Tickets(self._clock.now_s, self._entropy.token_hex)
        framed = FramedServer(tickets, interceptors)
        frames = Frames("", "", tickets, framed)
        both = _Server(self._inner.server(options, interceptors), framed, frames)
        frames_pb2_grpc.add_FramesServicer_to_server(frames, both)  # type: ignore[no-untyped-call]
        return both

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """At an address of this node, and for frames at another port there."""
        assert isinstance(server, _Server), "a server of this transport"
        port = self._inner.listen(server.grpc, bind)
        listener = self._network.listen(self._node, bind.rpartition(":")[0], 0)
        server.framed.add_door(_NetworkDoor(server.framed, listener, self._rng))
        server.frames.tcp_port = listener.address[1]
        return port


class _Channel(FramedChannel):
    """Its messages are written alike in any process."""

    def unary_unary(self, method: str, request_serializer: Any = None, *rest: Any, **named: Any) -> Any:
        return super().unary_unary(method, partial(encoded, request_serializer), *rest, **named)

    def unary_stream(self, method: str, request_serializer: Any = None, *rest: Any, **named: Any) -> Any:
        return super().unary_stream(method, partial(encoded, request_serializer), *rest, **named)

    def stream_stream(self, method: str, request_serializer: Any = None, *rest: Any, **named: Any) -> Any:
        return super().stream_stream(method, partial(encoded, request_serializer), *rest, **named)


class _Server(FramedAndGrpcServer):
    """Its messages are written alike in any process."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        alike = {
            name: handler._replace(response_serializer=partial(encoded, handler.response_serializer))
            for name, handler in method_handlers.items()
        }
        super().add_registered_method_handlers(service_name, alike)


class _NetworkWays(Ways):
    """To the frames of a node."""

    def __init__(
        self, address: str, role: str, closed_ports: ClosedPorts, network: Network, node: Node, rng: random.Random
    ) -> None:
        super().__init__(address, role, "", None, closed_ports)
        self._network = network
        self._node = node
        self._rng = rng

    async def connect_tcp(self, port: int, stream: FramedStream) -> None:
        connected: asyncio.Future[tuple[Endpoint | None, str]] = asyncio.get_running_loop().create_future()

        def done(endpoint: Endpoint | None, failure: str) -> None:
            connected.set_result((endpoint, failure))

        dialling = self._network.dial(self._node, self._host, port, done)
        try:
            async with asyncio.timeout(TCP_CONNECT_TIMEOUT_S):
                endpoint, failure = await connected
        except TimeoutError:
            endpoint, failure = None, f"no connection within {TCP_CONNECT_TIMEOUT_S:g} s"
        finally:
            dialling.cancel()
        if endpoint is None:
            self._closed_ports.add(self._host, port)
            raise PeerUnavailable(f"port {port} of {self._host} takes no framed streams: {failure}")
        _Connection(endpoint, stream, self._rng)


class _NetworkDoor:
    """A port of a node that takes frames."""

    asks_for_certificates = False

    def __init__(self, server: FramedServer, listener: Listener, rng: random.Random) -> None:
        self._server = server
        self._listener = listener
        self._rng = rng

    def open(self) -> None:
        """Take connections from now on."""
        self._listener.accept = self._accept

    async def close(self) -> None:
        """Take none any more."""
        self._listener.close()

    def known(self) -> None:
        """The network counts no strangers."""

    def _accept(self, endpoint: Endpoint) -> None:
        _Connection(endpoint, self._server.connection(self), self._rng)


class _Connection(asyncio.Transport):
    """One end of a connection of bytes, and the `asyncio.Protocol` that uses it."""

    def __init__(self, endpoint: Endpoint, protocol: asyncio.Protocol, rng: random.Random) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._protocol = protocol
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._is_lost = False
        endpoint.receiver = self
        protocol.connection_made(self)

    # -- from the network

    def received(self, frame: tuple[str, bytes]) -> None:
        """A piece of what the other end wrote; the network carries each by itself."""
        self._protocol.data_received(frame[1])

    def lost(self, reason: str) -> None:
        """The other end has closed it, or is dead."""
        self._lose(ConnectionError(reason))

    # -- asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        whole = bytes(data)
        at = self._rng.randrange(len(whole)) if whole and self._rng.random() < CUT_SHARE else 0
        for piece in (whole[:at], whole[at:]):
            if piece:
                self._endpoint.send(("bytes", piece), len(piece))

    def close(self) -> None:
        self._end(self._endpoint.close)

    def abort(self) -> None:
        self._end(partial(self._endpoint.reset, "the connection was reset by the peer"))

    def is_closing(self) -> bool:
        return not self._endpoint.is_open

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def _end(self, end: Callable[[], None]) -> None:
        end()
        self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._protocol.connection_lost(error)
