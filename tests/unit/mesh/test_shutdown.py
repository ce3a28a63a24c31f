"""A process is asked to end once, by a signal or by RPC, and its exit status tells a supervisor what to do next."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from mesh.exit_status import ExitStatus
from mesh.rpc.client import open_channel
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport
from mesh.shutdown import MemberService, Shutdown
from penstock.v1 import member_pb2, member_pb2_grpc

pytestmark = pytest.mark.live

Restart = Callable[[member_pb2.RestartRequest], Any]


@asynccontextmanager
async def served(shutdown: Shutdown) -> AsyncIterator[Restart]:
    server = RpcServer(GrpcTransport())
    service = MemberService("worker", "w", "first", 30.0, shutdown, supervised=True)
    server.add(member_pb2_grpc.add_MemberServicer_to_server, service, "penstock.v1.Member")
    await server.start()
    async with open_channel(GrpcTransport(), server.address) as channel:
        stub = member_pb2_grpc.MemberStub(channel)  # type: ignore[no-untyped-call]
        yield lambda request: stub.Restart(request)
    await server.stop(0)


def test_the_first_signal_drains_and_the_second_cuts() -> None:
    shutdown = Shutdown()
    shutdown.on_signal()
    assert (shutdown.asked.is_set(), shutdown.cut_asked.is_set(), shutdown.status) == (True, False, ExitStatus.STOPPED)
    shutdown.on_signal()
    assert shutdown.cut_asked.is_set()


def test_who_was_asked_to_end_keeps_to_the_first_reason() -> None:
    shutdown = Shutdown()
    assert shutdown.ask(ExitStatus.RESTART, 5.0)
    assert not shutdown.ask(ExitStatus.DRAINED)
    assert (shutdown.status, shutdown.drain_s) == (ExitStatus.RESTART, 5.0)


def test_the_statuses_that_supervisors_go_by_stay_what_they_are() -> None:
    assert [(status.name, int(status)) for status in ExitStatus] == [
        ("STOPPED", 0),
        ("FAILED", 1),
        ("WRONG_SETTINGS", 2),
        ("SUPERSEDED", 3),
        ("DRAINED", 4),
        ("RESTART", 5),
    ]


@pytest.mark.parametrize(("asked_s", "drain_s"), [(None, 30.0), (0.0, 0.0), (2.5, 2.5)])
async def test_a_restart_says_what_will_happen(asked_s: float | None, drain_s: float) -> None:
    shutdown = Shutdown()
    async with served(shutdown) as restart:
        answer = await restart(member_pb2.RestartRequest(incarnation_id="first", drain_s=asked_s))
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
    async with served(shutdown) as restart:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await restart(request_)
    assert refused.value.code() is code
    assert not shutdown.asked.is_set()


async def test_a_process_that_ends_already_is_not_restarted() -> None:
    shutdown = Shutdown()
    shutdown.on_signal()
    async with served(shutdown) as restart:
        with pytest.raises(grpc.aio.AioRpcError, match="ending already"):
            await restart(member_pb2.RestartRequest(incarnation_id="first"))
    assert shutdown.status is ExitStatus.STOPPED
