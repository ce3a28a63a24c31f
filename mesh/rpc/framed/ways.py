"""How a caller gets to its peer's socket: asked for over gRPC, near by a unix socket, else over TCP."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import grpc

from mesh.errors import PeerUnavailable
from mesh.identity.contexts import TlsContexts
from mesh.identity.identity import expected_dns_name
from mesh.rpc.framed.call import NotFramed, Way
from mesh.rpc.framed.sockets import connected_socket
from mesh.rpc.framed.stream import FramedStream
from mesh.rpc.limits import DEFAULT_DEADLINE_S
from penstock.v1 import frames_pb2, frames_pb2_grpc

TCP_CONNECT_TIMEOUT_S: Final = 3.0
"""For the connection and, with identities, the handshake on it; as long as gRPC's have."""
TCP_SHUTDOWN_TIMEOUT_S: Final = 2.0
CLOSED_S: Final = 60.0
"""A port that took no connection is not tried again for so long: a firewall lets each attempt wait."""
MAX_CLOSED_PORTS: Final = 1024


class ClosedPorts:
    """Those that took no connection lately. A peer that starts again has another one, or is asked a minute later."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s: dict[tuple[str, int], float] = {}

    def add(self, host: str, port: int) -> None:
        """It took none just now."""
        self._until_s.pop((host, port), None)
        while len(self._until_s) >= MAX_CLOSED_PORTS:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[host, port] = self._clock() + CLOSED_S

    def has(self, host: str, port: int) -> bool:
        """Whether it is to be left alone."""
        return self._until_s.get((host, port), 0.0) > self._clock()


class Ways:
    """To the sockets of the process at one address."""

    def __init__(
        self, address: str, role: str, own_host_id: str, contexts: TlsContexts | None, closed_ports: ClosedPorts
    ) -> None:
        """`role`: whom the calls are for, empty for any member. `own_host_id` is empty where unix sockets are not to be
        used; without `contexts` nobody has an identity."""
        self._host = address.rpartition(":")[0].strip("[]")
        self._role = role
        self._host_id = own_host_id
        self._contexts = contexts
        self._closed_ports = closed_ports

    async def to(self, channel: grpc.aio.Channel) -> Way:
        """With a ticket that the peer gives over gRPC. Raises NotFramed, or PeerUnavailable where it does not answer
        as it should."""
        stub = frames_pb2_grpc.FramesStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer: frames_pb2.OpenFramesResponse = await stub.Open(
                frames_pb2.OpenFramesRequest(host_id=self._host_id), timeout=DEFAULT_DEADLINE_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotFramed("the peer has no socket for frames, or is of an earlier release") from None
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # as the call over gRPC will find out, too
                raise NotFramed(f"the peer cannot be reached: {error.details()}") from None
            raise PeerUnavailable(f"no ticket was had: {error.code().name} {error.details()}") from None
        if answer.unix_socket:
            return Way("unix", answer.ticket, answer.proof, partial(_connect_unix, answer.unix_socket))
        if not answer.tcp_port:
            raise NotFramed("the peer takes frames of its own host only")
        if self._closed_ports.has(self._host, answer.tcp_port):
            raise NotFramed(f"port {answer.tcp_port} of the peer took no connection within the last {CLOSED_S:g} s")
        return Way("tcp", answer.ticket, answer.proof, partial(self.connect_tcp, answer.tcp_port))

    async def connect_tcp(self, port: int, stream: FramedStream) -> None:
        """Join the stream to the peer's port. Raises PeerUnavailable."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TCP_CONNECT_TIMEOUT_S):
                if self._contexts is None:
                    await loop.create_connection(lambda: stream, self._host, port)
                else:
                    await loop.create_connection(
                        lambda: stream,
                        self._host,
                        port,
                        ssl=self._contexts.client(),
                        server_hostname=expected_dns_name(self._role),
                        ssl_handshake_timeout=TCP_CONNECT_TIMEOUT_S,
                        ssl_shutdown_timeout=TCP_SHUTDOWN_TIMEOUT_S,
                    )
        except (OSError, TimeoutError) as error:  # TLS's errors are of the system, too
            self._closed_ports.add(self._host, port)
            why = str(error) or f"no connection within {TCP_CONNECT_TIMEOUT_S:g} s"
            raise PeerUnavailable(f"port {port} of {self._host} takes no framed streams: {why}") from error


async def _connect_unix(name: str, stream: FramedStream) -> None:
    connection = connected_socket(name)
    await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=connection)
