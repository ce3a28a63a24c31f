import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from mesh.errors import ConfigurationError, DeadlineExceeded, PeerUnavailable, RpcError
from mesh.rpc.client import open_channel, rpc_error
from mesh.rpc.metrics import RpcMetrics
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport
from penstock.v1 import planner_pb2, planner_pb2_grpc
from tests.reflection import ReflectionClient


class Planner(planner_pb2_grpc.PlannerServicer):
    async def GetPlan(self, request: Any, context: Any) -> planner_pb2.GetPlanResponse:
        return planner_pb2.GetPlanResponse(revision=7)


class Hung(planner_pb2_grpc.PlannerServicer):
    async def GetPlan(self, request: Any, context: Any) -> planner_pb2.GetPlanResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def server(registry: CollectorRegistry) -> AsyncIterator[RpcServer]:
    server = RpcServer(GrpcTransport(), metrics=RpcMetrics(registry))
    server.add(planner_pb2_grpc.add_PlannerServicer_to_server, Planner(), "penstock.v1.Planner")
    await server.start()
    yield server
    await server.stop(0)


async def test_what_grpcurl_does_works(server: RpcServer, registry: CollectorRegistry) -> None:
    def as_grpcurl() -> tuple[list[str], dict[str, Any], dict[str, Any]]:
        client = ReflectionClient(server.address)
        health = client.call("grpc.health.v1.Health", "Check", {"service": "penstock.v1.Planner"})
        listed, plan = client.services(), client.call("penstock.v1.Planner", "GetPlan")
        client.close()
        return listed, plan, health

    listed, plan, health = await asyncio.to_thread(as_grpcurl)
    expected = ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "penstock.v1.Planner"]
    assert listed == expected
    assert plan == {"revision": "7"}
    assert health == {"status": "NOT_SERVING"}
    assert b'penstock_rpc_calls_total{method="/penstock.v1.Planner/GetPlan"} 1.0' in generate_latest(registry)


async def test_health_follows_set_serving(server: RpcServer) -> None:
    await server.set_serving(True)
    client = ReflectionClient(server.address)
    health = await asyncio.to_thread(client.call, "grpc.health.v1.Health", "Check")
    client.close()
    assert health == {"status": "SERVING"}


async def call_plan(address: str, timeout_s: float | None = None) -> None:
    async with open_channel(GrpcTransport(), address) as channel:
        try:
            await planner_pb2_grpc.PlannerStub(channel).GetPlan(planner_pb2.GetPlanRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, "planner") from error


async def test_a_peer_that_is_gone_is_unavailable(server: RpcServer) -> None:
    await server.stop(0)
    with pytest.raises(PeerUnavailable, match="planner cannot be reached"):
        await call_plan(server.address)


async def test_a_hung_peer_runs_into_the_default_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.rpc.client.DEFAULT_DEADLINE_S", 0.05)
    server = RpcServer(GrpcTransport())
    server.add(planner_pb2_grpc.add_PlannerServicer_to_server, Hung(), "penstock.v1.Planner")
    await server.start()
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        await call_plan(server.address)
    await server.stop(0)


async def test_other_failures_tell_their_status() -> None:
    server = RpcServer(GrpcTransport())
    server.add(
        planner_pb2_grpc.add_PlannerServicer_to_server, planner_pb2_grpc.PlannerServicer(), "penstock.v1.Planner"
    )
    await server.start()
    with pytest.raises(RpcError, match="UNIMPLEMENTED"):
        await call_plan(server.address)
    await server.stop(0)


async def test_a_port_in_use_is_a_clear_error(server: RpcServer) -> None:
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        RpcServer(GrpcTransport(), server.address)
