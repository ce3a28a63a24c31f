"""Processes that answer what a console asks of them, as a test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from mesh.membership import Member
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, system_runtime
from mesh.store import open_store
from penstock.v1 import (
    autoscale_pb2,
    autoscale_pb2_grpc,
    frontend_pb2,
    frontend_pb2_grpc,
    member_pb2,
    member_pb2_grpc,
    monitor_pb2,
    monitor_pb2_grpc,
    planner_pb2,
    planner_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from services.frontend.console.collector import Collector
from tests.unit.services.frontend.fakes import FakeDirectory

DEADLINE_S = 0.3


@dataclass
class Process:
    """Has the services of every role; keeps what it was asked to do."""

    is_hung: bool = False
    refuses: str = ""
    """Every order, with these words."""
    ended: list[frontend_pb2.EndedRequest] = field(default_factory=list)
    running: list[frontend_pb2.FrontendRequest] = field(default_factory=list)
    asked: list[Message] = field(default_factory=list)
    moves: bool = True

    def __post_init__(self) -> None:
        self.server = RpcServer(GrpcTransport())
        for add, name in (
            (scheduler_pb2_grpc.add_SchedulerServicer_to_server, "Scheduler"),
            (frontend_pb2_grpc.add_FrontendServicer_to_server, "Frontend"),
            (monitor_pb2_grpc.add_MonitorServicer_to_server, "Monitor"),
            (planner_pb2_grpc.add_PlannerServicer_to_server, "Planner"),
            (autoscale_pb2_grpc.add_AutoscalerServicer_to_server, "Autoscaler"),
            (worker_pb2_grpc.add_WorkerServicer_to_server, "Worker"),
            (member_pb2_grpc.add_MemberServicer_to_server, "Member"),
        ):
            self.server.add(add, self, f"penstock.v1.{name}")

    def __getattr__(self, method: str) -> Any:
        """Any other method of a service answers that it has none."""
        if not method[0].isupper():
            raise AttributeError(method)

        async def unimplemented(request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, method)

        return unimplemented

    async def GetSnapshot(self, request: Any, context: Any) -> scheduler_pb2.GetSnapshotResponse:
        if self.is_hung:
            await asyncio.Event().wait()
        return scheduler_pb2.GetSnapshotResponse(policy="penstock", synced=True)

    async def GetPolicy(self, request: Any, context: Any) -> scheduler_pb2.GetPolicyResponse:
        if self.is_hung:
            await asyncio.Event().wait()
        return scheduler_pb2.GetPolicyResponse(policy="penstock")

    async def GetCluster(self, request: Any, context: Any) -> monitor_pb2.GetClusterResponse:
        return monitor_pb2.GetClusterResponse()

    async def GetStatus(self, request: Any, context: Any) -> frontend_pb2.GetFrontendStatusResponse:
        return frontend_pb2.GetFrontendStatusResponse(http_address="h:1")

    async def ListRequests(self, request: Any, context: Any) -> frontend_pb2.ListFrontendRequestsResponse:
        return frontend_pb2.ListFrontendRequestsResponse(requests=self.running)

    async def ListEnded(self, request: Any, context: Any) -> frontend_pb2.ListEndedResponse:
        self.asked.append(request)
        found = [each for each in self.ended if each.number > request.after]
        return frontend_pb2.ListEndedResponse(requests=found, last=len(self.ended))

    async def SetPolicy(self, request: Any, context: Any) -> scheduler_pb2.SetPolicyResponse:
        await self._take(request, context)
        return scheduler_pb2.SetPolicyResponse(policy=request.policy)

    async def SetRescheduler(self, request: Any, context: Any) -> scheduler_pb2.SetReschedulerResponse:
        await self._take(request, context)
        return scheduler_pb2.SetReschedulerResponse(mode=request.mode)

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        await self._take(request, context)
        return worker_pb2.DrainResponse(running_requests=3)

    async def Restart(self, request: Any, context: Any) -> member_pb2.RestartResponse:
        await self._take(request, context)
        return member_pb2.RestartResponse(drain_s=30.0, supervised=True)

    async def Migrate(self, request: Any, context: Any) -> worker_pb2.MigrateResponse:
        await self._take(request, context)
        return worker_pb2.MigrateResponse(moved=self.moves, reason="it has ended", blocks=4, rounds=2, paused_ms=1.5)

    async def SetGoal(self, request: Any, context: Any) -> planner_pb2.SetGoalResponse:
        await self._take(request, context)
        return planner_pb2.SetGoalResponse(revision=1)

    async def SetAutoscale(self, request: Any, context: Any) -> autoscale_pb2.SetAutoscaleResponse:
        await self._take(request, context)
        return autoscale_pb2.SetAutoscaleResponse(revision=1)

    async def RemoveAutoscale(self, request: Any, context: Any) -> autoscale_pb2.RemoveAutoscaleResponse:
        await self._take(request, context)
        return autoscale_pb2.RemoveAutoscaleResponse(removed=self.moves)

    async def _take(self, request: Message, context: Any) -> None:
        if self.refuses:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refuses)
        self.asked.append(request)


@dataclass
class Processes:
    """Those of a mesh, and a collector that looks at them."""

    collector: Collector
    directory: FakeDirectory
    _running: list[Process] = field(default_factory=list)

    async def join(self, role: str, member_id: str = "", incarnation_id: str = "first", **fields: Any) -> Process:
        """Start one and announce it."""
        process = Process(**fields)
        await process.server.start()
        await process.server.set_serving(True)
        self._running.append(process)
        self.directory.join(Member(role, member_id or f"{role}-0", incarnation_id, process.server.address, "", {}))
        return process

    async def stop(self) -> None:
        for process in self._running:
            await process.server.stop(0)


@asynccontextmanager
async def processes() -> AsyncIterator[Processes]:
    """None at first."""
    runtime, directory = system_runtime(), FakeDirectory()
    store = open_store("embedded:", runtime)
    collector = Collector(directory, store, runtime.transport, runtime.clock, DEADLINE_S)
    mesh = Processes(collector, directory)
    try:
        yield mesh
    finally:
        await collector.stop()
        await mesh.stop()
        await store.close()
