"""The transport of a process: gRPC, and the streams that carry most messages in frames where both ends can.

A caller that opens one of `FRAMED_METHODS` asks its peer for a ticket over gRPC (`frames.proto`) and opens the stream
on a unix socket of the same host, or over TCP, with mutual TLS where the process has an identity. Whatever is in the
way of that, the stream is opened over gRPC: quietly where the peer takes no frames or is of an earlier release, else
with a warning and a metric.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Final

import grpc
from prometheus_client import CollectorRegistry, Counter

from mesh.errors import ConfigurationError, PenstockError
from mesh.identity.guard import IdentityGuard, names_of
from mesh.identity.identity import Identity
from mesh.identity.tls import TlsTransport
from mesh.rpc.framed.call import NotFramed
from mesh.rpc.framed.channel import FramedChannel
from mesh.rpc.framed.server import FramedServer
from mesh.rpc.framed.sockets import host_id, is_loopback
from mesh.rpc.framed.tickets import Caller, Tickets
from mesh.rpc.framed.unary import UnaryServer
from mesh.rpc.framed.ways import ClosedPorts, Ways
from mesh.runtime import SystemClock, SystemEntropy, Transport
from penstock.v1 import frames_pb2, frames_pb2_grpc

log = logging.getLogger(__name__)

FRAMED_METHODS: Final = frozenset(
    {
        "/penstock.v1.Worker/Stream",
        "/penstock.v1.Scheduler/PlaceStream",
        "/penstock.v1.Monitor/Report",
        "/penstock.v1.Monitor/Watch",
        "/penstock.v1.Scheduler/PlaceDecode",
        "/penstock.v1.Cascade/Judge",
        "/penstock.v1.LengthPredictor/Predict",
    }
)
"""Streams that live long and carry much, and unary calls that are made for each request or batch."""
NAME_BYTES: Final = 16
SWITCH: Final = "PENSTOCK_FRAMED_STREAMS"
"""Environment variable: 0 leaves all streams to gRPC, tcp has them go over TCP on one host, too; 1, as without it,
leaves TCP to streams between hosts."""


class FramedTransport:
    """A `Transport` over another one, gRPC's."""

    def __init__(
        self,
        inner: Transport,
        registry: CollectorRegistry,
        methods: Collection[str] = FRAMED_METHODS,
        frames_port: int = 0,
    ) -> None:
        """`methods`: those whose calls go in frames, none with streamed requests and one answer; `frames_port`: that
        takes them from other hosts.
        Raises ConfigurationError for a switch that is none."""
        self._methods = methods
        self._inner = inner
        self._frames_port = frames_port
        self._clock, self._entropy = SystemClock(), SystemEntropy()
        self._contexts = inner.contexts if isinstance(inner, TlsTransport) else None
        switch = os.environ.get(SWITCH, "1")
        if switch not in ("0", "1", "tcp"):
            raise ConfigurationError(f"{SWITCH}={switch}: write 0 (gRPC only), 1 or tcp (no unix sockets)")
        own_host_id = host_id()
        self._is_on = switch != "0" and bool(own_host_id)
        self._host_id = own_host_id if switch == "1" else ""
        """Empty: no unix sockets."""
        self._closed_ports = ClosedPorts(self._clock.now_s)
        self._streams = Counter(
            "penstock_rpc_streams_opened",
            "Streams that this process has opened to others, by what carries them",
            ["method", "transport"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "penstock_rpc_framed_fallbacks",
            "Streams that were opened over gRPC because the framed one could not be",
            ["method"],
            registry=registry,
        )

    @property
    def identity(self) -> Identity | None:
        return self._inner.identity

    def channel(
        self, address: str, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any], role: str = ""
    ) -> grpc.aio.Channel:
        channel = self._inner.channel(address, options, interceptors, role)
        if not self._is_on:
            return channel
        ways = Ways(address, role, self._host_id, self._contexts, self._closed_ports)
        return FramedChannel(channel, address, ways, self._methods, self._opened)

    def to_others(self) -> Transport:
        return self._inner.to_others()

    def server(self, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]) -> grpc.aio.Server:
        """A gRPC server that gives tickets, and the socket beside it that takes them."""
        server = self._inner.server(options, interceptors)
        if not self._is_on:
            return server
        own = self.identity
        guards = () if own is None else (IdentityGuard(own.trust_domain),)
        tickets = Tickets(self._clock.now_s, self._entropy.token_hex)
        framed = FramedServer(tickets, (*guards, *interceptors), self._contexts)
        name = f"penstock-{self._entropy.token_hex(NAME_BYTES)}" if self._host_id else ""
        try:
            if name:
                framed.listen_unix(name)
        except OSError as error:
            log.warning("streams of this host stay with gRPC: there can be no socket", extra={"error": str(error)})
            name = ""
        frames = Frames(name, self._host_id, tickets, framed)
        both = FramedAndGrpcServer(server, framed, frames)
        frames_pb2_grpc.add_FramesServicer_to_server(frames, both)  # type: ignore[no-untyped-call]
        return both

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Where other hosts reach the address, a port for their streams is opened beside it."""
        if not isinstance(server, FramedAndGrpcServer):
            return self._inner.listen(server, bind)
        port, host = self._inner.listen(server.grpc, bind), bind.rpartition(":")[0]
        may_have_tcp = self._contexts is not None or self.identity is None
        if may_have_tcp and (not is_loopback(host) or not self._host_id):
            try:
                server.frames.tcp_port = server.framed.listen_tcp(host, self._frames_port)
            except OSError as error:
                log.error(
                    "streams of other hosts stay with gRPC: their port cannot be had",
                    extra={"host": host, "port": self._frames_port, "error": str(error)},
                )
        return port

    def _opened(self, method: str, address: str, carrier: str, reason: PenstockError | None) -> None:
        """A stream was opened: over gRPC, where there is a `reason` for that."""
        self._streams.labels(method, carrier).inc()
        if isinstance(reason, NotFramed):
            log.info("a stream goes over gRPC", extra={"address": address, "method": method, "reason": str(reason)})
        elif reason is not None:
            self._fallbacks.labels(method).inc()
            log.warning(
                "a stream goes over gRPC: the framed one could not be opened",
                extra={"address": address, "method": method, "reason": str(reason)},
            )


class Frames(frames_pb2_grpc.FramesServicer):
    """Gives tickets, and takes unary calls on streams."""

    def __init__(self, name: str, own_host_id: str, tickets: Tickets, framed: FramedServer) -> None:
        """`name`: of the unix socket; empty for none."""
        self.tcp_port = 0
        self._name = name
        self._host_id = own_host_id
        self._tickets = tickets
        self._framed = framed

    async def Call(self, request_iterator: AsyncIterator[frames_pb2.UnaryCall], context: Any) -> None:
        """See `UnaryServer`."""
        caller = Caller(names_of(context), context.peer())
        await UnaryServer(self._framed.handler, caller, context.write).serve(request_iterator)

    async def Open(self, request: frames_pb2.OpenFramesRequest, context: Any) -> frames_pb2.OpenFramesResponse:
        """A ticket, for a caller that can reach a socket."""
        name = self._name if request.host_id == self._host_id else ""
        tcp_port = 0 if name else self.tcp_port
        if not name and not tcp_port:
            return frames_pb2.OpenFramesResponse()
        ticket, proof = self._tickets.give(Caller(names_of(context), context.peer()))
        return frames_pb2.OpenFramesResponse(unix_socket=name, ticket=ticket, proof=proof, tcp_port=tcp_port)


class FramedAndGrpcServer(grpc.aio.Server):
    """A gRPC server and, beside it, a framed one with the same servicers."""

    def __init__(self, server: grpc.aio.Server, framed: FramedServer, frames: Frames) -> None:
        self.grpc = server
        self.framed = framed
        self.frames = frames

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self.grpc.add_generic_rpc_handlers(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        self.grpc.add_registered_method_handlers(service_name, method_handlers)
        self.framed.add_handlers(service_name, method_handlers)

    def add_insecure_port(self, address: str) -> int:
        return int(self.grpc.add_insecure_port(address))

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        return int(self.grpc.add_secure_port(address, server_credentials))

    async def start(self) -> None:
        await self.framed.start()
        await self.grpc.start()

    async def stop(self, grace: float | None) -> None:
        await asyncio.gather(self.grpc.stop(grace), self.framed.stop(grace))

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        return bool(await self.grpc.wait_for_termination(timeout))
