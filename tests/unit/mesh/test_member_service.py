"""What every process answers: it is restarted by whoever means it, and says its metrics."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter

from mesh.exit_status import ExitStatus
from mesh.member_service import MemberService
from mesh.metric_families import metric_families
from mesh.rpc.client import open_channel
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport
from mesh.shutdown import Shutdown
from penstock.v1 import member_pb2, member_pb2_grpc

pytestmark = pytest.mark.live


@asynccontextmanager
async def served(shutdown: Shutdown) -> AsyncIterator["member_pb2_grpc.MemberAsyncStub"]:
    registry = CollectorRegistry()
    Counter("penstock_made", "Things", registry=registry).inc(3)
    Counter("vllm:things", "Things", registry=registry)

    async def metrics(prefix: str) -> list[member_pb2.MetricFamily]:
        return metric_families(registry, prefix, "w")

    server = RpcServer(GrpcTransport())
    service = MemberService("worker", "w", "first", 30.0, shutdown, supervised=True, metrics=metrics)
    server.add(member_pb2_grpc.add_MemberServicer_to_server, service, "penstock.v1.Member")
    await server.start()
    async with open_channel(GrpcTransport(), server.address) as channel:
        yield member_pb2_grpc.MemberStub(channel)  # type: ignore[no-untyped-call]
    await server.stop(0)


@pytest.mark.parametrize(("asked_s", "drain_s"), [(None, 30.0), (0.0, 0.0), (2.5, 2.5)])
async def test_a_restart_says_what_will_happen(asked_s: float | None, drain_s: float) -> None:
    shutdown = Shutdown()
    async with served(shutdown) as member:
        answer = await member.Restart(member_pb2.RestartRequest(incarnation_id="first", drain_s=asked_s))
    assert answer == member_pb2.RestartResponse(role="worker", member_id="w", drain_s=drain_s, supervised=True)
    assert (shutdown.asked.is_set(), shutdown.status, shutdown.drain_s) == (True, ExitStatus.RESTART, drain_s)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (member_pb2.RestartRequest(incarnation_id="former"), grpc.StatusCode.FAILED_PRECONDITION),
        (member_pb2.RestartRequest(incarnation_id="first", drain_s=-1), grpc.StatusCode.INVALID_ARGUMENT),
        (member_pb2.RestartRequest(incarnation_id="first", drain_s=float("nan")), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_restart_that_was_not_meant_is_refused(
    request_: member_pb2.RestartRequest, code: grpc.StatusCode
) -> None:
    shutdown = Shutdown()
    async with served(shutdown) as member:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await member.Restart(request_)
    assert refused.value.code() is code
    assert not shutdown.asked.is_set()


async def test_a_process_that_ends_already_is_not_restarted() -> None:
    shutdown = Shutdown()
    shutdown.on_signal()
    async with served(shutdown) as member:
        with pytest.raises(grpc.aio.AioRpcError, match="ending already"):
            await member.Restart(member_pb2.RestartRequest(incarnation_id="first"))
    assert shutdown.status is ExitStatus.STOPPED


async def test_its_metrics_are_those_of_the_prefix() -> None:
    async with served(Shutdown()) as member:
        every = await member.GetMetrics(member_pb2.GetMetricsRequest())
        some = await member.GetMetrics(member_pb2.GetMetricsRequest(prefix="penstock_"))
    assert [family.name for family in every.families] == ["penstock_made", "vllm:things"]
    (made,) = some.families
    assert b'penstock_made_total{member_id="w"} 3.0\n' in made.text
