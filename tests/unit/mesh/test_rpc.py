import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import CollectorRegistry, generate_latest

from mesh.errors import ConfigurationError, DeadlineExceeded, PeerUnavailable, RpcError
from mesh.rpc.client import open_channel, rpc_error
from mesh.rpc.metrics import RpcMetrics
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport
from penstock.v1 import planner_pb2, planner_pb2_grpc
from tests.reflection import ReflectionClient

pytestmark = pytest.mark.live


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


async def test_reflection_answers_under_its_newer_name_too(server: RpcServer) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with open_channel(GrpcTransport(), server.address) as channel:
        for version in ("v1", "v1alpha"):
            call = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )(timeout=5)
            await call.write(request)
            listed = (await call.read()).list_services_response.service
            assert "penstock.v1.Planner" in [each.name for each in listed]
            call.cancel()


GARBAGE = b"\xff\xff\xff"


class Streaming:
    """A method of each kind that reads its messages in each way."""

    async def GetPlan(self, request: Any, context: Any) -> planner_pb2.GetPlanResponse:
        raise AssertionError("there is no message to call it with")

    async def read(self, request_iterator: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    async def iterate(self, request_iterator: Any, context: Any) -> AsyncIterator[planner_pb2.GetPlanRequest]:
        async for message in request_iterator:
            yield message

    async def answer(self, request: Any, context: Any) -> AsyncIterator[planner_pb2.GetPlanRequest]:
        yield request

    async def collect(self, request_iterator: Any, context: Any) -> planner_pb2.GetPlanRequest:
        return [message async for message in request_iterator][-1]


KINDS = {"GetPlan": "unary_unary", "read": "stream_stream", "iterate": "stream_stream"}
KINDS |= {"answer": "unary_stream", "collect": "stream_unary"}


def add_streaming(servicer: Any, server: grpc.aio.Server) -> None:
    coding = {
        "request_deserializer": planner_pb2.GetPlanRequest.FromString,
        "response_serializer": lambda message: message.SerializeToString(),
    }
    handlers = {
        name: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(servicer, name), **coding)
        for name, kind in KINDS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Garbage", handlers),))


async def answered(channel: grpc.aio.Channel, method: str, message: bytes) -> grpc.StatusCode:
    kind = KINDS[method]
    start = getattr(channel, kind)(f"/test.Garbage/{method}")
    call = start(timeout=5) if kind.startswith("stream") else start(message, timeout=5)
    if kind.startswith("stream"):
        await call.write(message)
        await call.done_writing()
    if kind.endswith("stream"):
        with suppress(grpc.aio.AioRpcError):
            assert [answer async for answer in call] == [message]
    return await call.code()


@pytest.mark.parametrize("method", KINDS)
async def test_bytes_that_are_no_message_are_refused_without_a_traceback(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = RpcServer(GrpcTransport())
    server.add(add_streaming, Streaming(), "test.Garbage")
    await server.start()
    async with open_channel(GrpcTransport(), server.address) as channel:
        assert await answered(channel, method, GARBAGE) is grpc.StatusCode.INVALID_ARGUMENT
        if method != "GetPlan":
            assert await answered(channel, method, b"") is grpc.StatusCode.OK
    await server.stop(0)
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
