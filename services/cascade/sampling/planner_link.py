"""Tells the planner of a sampled workload."""

import logging

import grpc
import numpy as np

from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import write_workload
from mesh.membership import Directory
from mesh.rpc.client import open_channel
from penstock.v1 import planner_pb2, planner_pb2_grpc
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.sampler import SampledWorkload

log = logging.getLogger(__name__)

REPORT_DEADLINE_S = 10.0


class PlannerLink:
    """Calls some planner of the mesh; a workload that no planner takes is lost, and said so: the next one follows."""

    def __init__(self, directory: Directory, metrics: CascadeMetrics) -> None:
        self._directory = directory
        self._metrics = metrics

    async def report(self, workload: SampledWorkload) -> None:
        """Never raises."""
        outcome = "reported" if await self._reported(workload) else "lost"
        self._metrics.workloads.labels(workload.record.name, outcome).inc()

    async def _reported(self, workload: SampledWorkload) -> bool:
        planners = self._directory.members("planner")
        if not planners:
            log.warning("no planner is running: a sampled workload is lost", extra={"cascade": workload.record.name})
            return False
        request = planner_pb2.ReportWorkloadRequest(
            cascade=workload.record.name, lines=_lines(workload), judge=workload.judge
        )
        async with open_channel(planners[0].address) as channel:
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


def _lines(workload: SampledWorkload) -> list[bytes]:
    requests = workload.requests
    sample = CascadeSample(
        scores=np.array([request.scores for request in requests]),
        input_tokens=np.array([request.input_tokens for request in requests], np.int64),
        output_tokens=np.array([request.output_tokens for request in requests], np.int64),
        rate_per_s=workload.rate_per_s,
        falls=tuple(request.falls or () for request in requests) if requests[0].falls is not None else None,
    )
    return write_workload(workload.record.tiers, sample)
