"""A whole gateway on a real port, asked as Envoy asks, between a fake scheduler and instances that exist on paper."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from mesh.membership import Member
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, system_runtime
from mesh.store import open_store
from penstock.v1 import ext_proc_pb2 as envoy
from penstock.v1 import ext_proc_pb2_grpc, scheduler_pb2
from services.frontend.gateway.role import GatewayRole
from services.frontend.gateway.settings import GatewaySettings
from services.frontend.gateway.stream import GatewayService
from tests.unit.services.frontend.fakes import FakeDirectory, FakeScheduler, always
from tests.unit.services.frontend.mesh_of_fakes import context_of, until

Choose = Callable[[scheduler_pb2.PlaceRequest], scheduler_pb2.PlaceResponse | None]
DUPLEX = envoy.ProtocolConfiguration(
    request_body_mode=envoy.FULL_DUPLEX_STREAMED, response_body_mode=envoy.FULL_DUPLEX_STREAMED
)


def attached(model_path: Path, instance_id: str, url: str, max_model_len_tokens: int = 4096) -> Member:
    """As a worker beside a server announces itself."""
    attributes = {
        "model": "demo",
        "model_path": str(model_path),
        "block_tokens": "16",
        "max_model_len_tokens": str(max_model_len_tokens),
        "http_url": url,
    }
    return Member("worker", instance_id, "first", "127.0.0.1:1", "", attributes)


@dataclass
class Asked:
    """One HTTP request, as Envoy tells of it."""

    call: Any
    told: list[envoy.ProcessingResponse] = field(default_factory=list)

    async def say(self, **message: Any) -> None:
        """Send a message."""
        await self.call.write(envoy.ProcessingRequest(**message))

    async def headers(
        self,
        path: str = "/v1/completions",
        *,
        ends: bool = False,
        subset: Sequence[str] | None = None,
        modes: envoy.ProtocolConfiguration | None = DUPLEX,
        **more: str,
    ) -> None:
        """The request's. `subset`: the endpoints that may be picked."""
        metadata = envoy.Metadata()
        if subset is not None:
            listed = {"x-gateway-destination-endpoint-subset": list(subset)}
            metadata.filter_metadata["envoy.lb.subset_hint"].update(listed)
        fields = {":method": "POST", ":path": path, **more}
        await self.say(
            request_headers=envoy.HttpHeaders(headers=header_map(fields), end_of_stream=ends),
            metadata_context=metadata,
            protocol_config=modes,
        )

    async def body(self, content: bytes | Mapping[str, Any], *pieces: bytes) -> None:
        """All of it, in pieces."""
        first = content if isinstance(content, bytes) else json.dumps(content).encode()
        whole = [first, *pieces]
        for index, piece in enumerate(whole):
            ends = index == len(whole) - 1
            await self.say(request_body=envoy.HttpBody(body=piece, end_of_stream=ends))

    async def answer(self, *pieces: bytes, status: int = 200, served: str = "", **headers: str) -> None:
        """What the server answers."""
        metadata = envoy.Metadata()
        if served:
            metadata.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": served})
        told = header_map({":status": str(status), **headers})
        await self.say(response_headers=envoy.HttpHeaders(headers=told), metadata_context=metadata)
        for index, piece in enumerate(pieces):
            await self.say(response_body=envoy.HttpBody(body=piece, end_of_stream=index == len(pieces) - 1))

    async def read(self) -> envoy.ProcessingResponse:
        """The next message."""
        message = await self.call.read()
        assert message is not grpc.aio.EOF, await self.call.details()
        self.told.append(message)
        return message

    async def destination(self) -> tuple[str, ...]:
        """The endpoints of the next message, which is the request's headers; the same in header and metadata."""
        message = await self.read()
        assert message.WhichOneof("response") == "request_headers", message
        (option,) = message.request_headers.response.header_mutation.set_headers
        value = option.header.raw_value.decode()
        assert option.header.key == "x-gateway-destination-endpoint"
        assert option.append_action == envoy.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        assert message.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == value
        return tuple(value.split(","))

    async def refusal(self) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, error and headers of the next message, after which the stream ends."""
        message = await self.read()
        assert message.WhichOneof("response") == "immediate_response", message
        immediate = message.immediate_response
        headers = {each.header.key: each.header.raw_value.decode() for each in immediate.headers.set_headers}
        assert await self.call.read() is grpc.aio.EOF
        return immediate.status.code, json.loads(immediate.body)["error"], headers


@dataclass
class GatewayOfFakes:
    """What a test can reach."""

    role: GatewayRole
    service: GatewayService
    directory: FakeDirectory
    scheduler: FakeScheduler
    registry: CollectorRegistry
    channel: grpc.aio.Channel
    server: RpcServer

    def ask(self) -> Asked:
        """A new stream."""
        stub = ext_proc_pb2_grpc.ExternalProcessorStub(self.channel)  # type: ignore[no-untyped-call]
        return Asked(stub.Process(timeout=20))

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 if there is none yet."""
        return self.registry.get_sample_value(f"penstock_gateway_{name}", labels) or 0.0


@asynccontextmanager
async def gateway_of_fakes(
    *members: Member, choose: Choose | None = None, resolve: Callable[[str], str] | None = None, **settings: Any
) -> AsyncIterator[GatewayOfFakes]:
    """A running gateway, which knows its models if it has members."""
    directory, registry, server = FakeDirectory(), CollectorRegistry(), RpcServer(GrpcTransport())
    store = open_store("embedded:", system_runtime())
    scheduler = FakeScheduler(choose or always("server-0"))
    await scheduler.start()
    directory.join(scheduler.member)
    for member in members:
        directory.join(member)
    told = GatewaySettings(**settings)
    role = GatewayRole(told) if resolve is None else GatewayRole(told, resolve)
    await role.start(replace(context_of(directory, registry, server, store), role="gateway", member_id="gateway-0"))
    await server.start()
    assert role.service is not None
    service = role.service
    channel = grpc.aio.insecure_channel(server.address)
    try:
        await until(lambda: service.picker.placement.connected and service.picker.catalogue.adapters.is_heard)
        await until(lambda: bool(service.picker.catalogue.served()) or not members)
        yield GatewayOfFakes(role, service, directory, scheduler, registry, channel, server)
    finally:
        await channel.close()
        await role.stop()
        await scheduler.stop()
        await server.stop(0)
        await store.close()


def header_map(fields: Mapping[str, str]) -> envoy.HeaderMap:
    """As Envoy sends them."""
    pairs = ((name.replace("_", "-"), value) for name, value in fields.items())
    return envoy.HeaderMap(headers=[envoy.HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs])
