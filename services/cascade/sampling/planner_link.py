"""Tells the planner of a sampled workload."""

import logging

import grpc

from controlplane.model.duties import CASCADES
from controlplane.planning.cascade.workload import WorkloadWindow, write_window
from mesh.errors import StoreError
from mesh.leadership import leaders
from mesh.membership import Directory
from mesh.rpc.client import open_channel
from mesh.runtime import Transport
from mesh.store.interface import StateStore
from penstock.v1 import planner_pb2, planner_pb2_grpc
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.sampler import SampledWorkload

log = logging.getLogger(__name__)

REPORT_DEADLINE_S = 10.0


class PlannerLink:
    """Calls the planner that leads, or the first one while none does: all routers tell the same one, because it adds up
    what they have seen. A workload that no planner takes is lost, and said so: the next one follows."""

    def __init__(
        self,
        directory: Directory,
        store: StateStore,
        router: str,
        transport: Transport,
        metrics: CascadeMetrics,
    ) -> None:
        self._directory = directory
        self._store = store
        self._router = router
        self._transport = transport
        self._metrics = metrics

    async def report(self, workload: SampledWorkload) -> None:
        """Send one window's workload to the planner. A failure is counted and logged, never raised: the next window
        comes soon."""
        outcome = "reported" if await self._reported(workload) else "lost"
        self._metrics.workloads.labels(workload.record.name, outcome).inc()

    async def _reported(self, workload: SampledWorkload) -> bool:
        planners = self._directory.members("planner")
        if not planners:
            log.warning("no planner is running: a sampled workload is lost", extra={"cascade": workload.record.name})
            return False
        leader_id = await self._leader_id()
        planner = min(planners, key=lambda member: (member.member_id != leader_id, member.member_id))
        request = report_of(workload, self._router)
        async with open_channel(self._transport, planner.address, planner.role) as channel:
            stub = planner_pb2_grpc.PlannerStub(channel)  # type: ignore[no-untyped-call]
            try:
                answer = await stub.ReportWorkload(request, timeout=REPORT_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                log.warning(
                    "the planner did not take a workload",
                    extra={"cascade": workload.record.name, "error": f"{error.code().name}: {error.details()}"},
                )
                return False
        log.info("workload reported", extra={"cascade": workload.record.name, "verdict": answer.verdict})
        return True

    async def _leader_id(self) -> str:
        try:
            leader = (await leaders(self._store)).get(CASCADES)
        except StoreError as error:
            log.warning("the store does not tell which planner leads", extra={"error": str(error)})
            return ""
        return "" if leader is None else leader.member_id


def report_of(workload: SampledWorkload, router: str) -> planner_pb2.ReportWorkloadRequest:
    """As this router, of that name in the mesh, has seen it."""
    record = workload.record
    window = WorkloadWindow(record.tiers, workload.rate_per_s, workload.requests, workload.judge, record.label)
    lines = write_window(window)
    return planner_pb2.ReportWorkloadRequest(
        cascade=record.name,
        lines=lines,
        judge=workload.judge,
        router=router,
        window_s=workload.window_s,
        offered=workload.offered,
    )
