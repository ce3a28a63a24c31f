"""A server of `Servicer` (tests/unit/fault_simulation) and a channel to it, over one transport or another."""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
from prometheus_client import CollectorRegistry

from mesh.rpc.client import open_channel
from mesh.rpc.framed.transport import SWITCH, FramedAndGrpcServer, FramedTransport
from mesh.rpc.garbage import GarbageGuard
from mesh.rpc.limits import SERVER_OPTIONS
from mesh.runtime import GrpcTransport, Transport
from tests.unit.fault_simulation.grpc_servicer import Servicer
from tests.unit.mesh.identity.identities import an_authority, transport

METHODS: Sequence[str] = ("Upper", "UpperByContext", "One", "RefuseLate", "Listen", "Ignore", "Pour", "Fail")
PATHS = [f"/test.Service/{name}" for name in METHODS]


def framed(
    registry: CollectorRegistry | None = None, inner: Transport | None = None, switch: str = "1"
) -> FramedTransport:
    """A transport whose calls of the servicer's methods go in frames."""
    with patch.dict(os.environ, {SWITCH: switch}):
        return FramedTransport(inner or GrpcTransport(), registry or CollectorRegistry(), PATHS)


@dataclass
class World:
    """Both ends."""

    servicer: Servicer
    server: grpc.aio.Server
    address: str
    channel: grpc.aio.Channel

    def call(self, name: str, requests: Any = None, **options: Any) -> Any:
        """A call of one of the servicer's streams."""
        return self.method(name)(requests, **options)

    def method(self, name: str, **codecs: Any) -> Callable[..., Any]:
        """Without codecs messages are bytes."""
        codecs = {"request_serializer": bytes, "response_deserializer": bytes, **codecs}
        return self.channel.stream_stream(f"/test.Service/{name}", **codecs)  # type: ignore[no-any-return]


@asynccontextmanager
async def world(
    serves: Transport, calls: Transport, decode: Callable[[bytes], Any] = bytes, bind: str = "127.0.0.1"
) -> AsyncIterator[World]:
    """A server by one transport, called by the other."""
    servicer = Servicer()
    server = serves.server(SERVER_OPTIONS, [GarbageGuard()])
    server.add_registered_method_handlers("test.Service", handlers(servicer, decode))
    address = f"127.0.0.1:{serves.listen(server, f'{bind}:0')}"
    await server.start()
    try:
        async with open_channel(calls, address) as channel:
            yield World(servicer, server, address, channel)
    finally:
        await server.stop(None)


def handlers(servicer: Servicer, decode: Callable[[bytes], Any] = bytes) -> dict[str, grpc.RpcMethodHandler]:
    """The servicer's streams."""

    async def fail(requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise ValueError("a bug")

    behaviours = {
        "Upper": servicer.upper,
        "UpperByContext": servicer.upper_by_context,
        "One": servicer.one,
        "RefuseLate": servicer.refuse_late,
        "Listen": servicer.listen,
        "Ignore": servicer.ignore,
        "Pour": servicer.pour,
        "Fail": fail,
    }
    return {
        name: grpc.stream_stream_rpc_method_handler(behaviour, request_deserializer=decode, response_serializer=bytes)
        for name, behaviour in behaviours.items()
    }


async def letters(*messages: bytes) -> AsyncIterator[bytes]:
    """Requests."""
    for message in messages:
        yield message


def socket_of(server: grpc.aio.Server) -> str:
    """The name under which the framed server listens."""
    assert isinstance(server, FramedAndGrpcServer)
    return server.frames._name


def port_of(server: grpc.aio.Server) -> int:
    """On which the framed server listens."""
    assert isinstance(server, FramedAndGrpcServer)
    return server.frames.tcp_port


CARRIERS: Sequence[str] = ("unix", "tcp", "tls", "grpc")


def transport_named(name: str, folder: Path, registry: CollectorRegistry | None = None) -> Transport:
    """One of `CARRIERS`; tls needs the doors of `PATHS` open to workers."""
    if name == "grpc":
        return GrpcTransport()
    inner = transport(an_authority(folder), folder, "worker") if name == "tls" else None
    return framed(registry, inner, "1" if name == "unix" else "tcp")


def fallbacks(registry: CollectorRegistry) -> float:
    """Streams that went over gRPC and should not have."""
    found = [metric for metric in registry.collect() if metric.name == "penstock_rpc_framed_fallbacks"]
    return sum(sample.value for metric in found for sample in metric.samples if sample.name.endswith("_total"))
