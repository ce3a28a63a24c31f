"""The RPCs that every process of the mesh answers: an operator has it restarted, and its metrics are read."""

import logging
import math
from collections.abc import Awaitable, Callable, Sequence

import grpc

from mesh.exit_status import ExitStatus
from mesh.shutdown import Shutdown
from penstock.v1 import member_pb2, member_pb2_grpc

log = logging.getLogger(__name__)


class MemberService(member_pb2_grpc.MemberServicer):
    """penstock.v1.Member, which `run_role` serves for every role."""

    def __init__(
        self,
        role: str,
        member_id: str,
        incarnation_id: str,
        drain_s: float,
        shutdown: Shutdown,
        supervised: bool,
        metrics: Callable[[str], Awaitable[Sequence[member_pb2.MetricFamily]]],
    ) -> None:
        """`drain_s` is what running work is given where the caller does not say; `supervised`: whether `penstock up`
        starts the process again; `metrics`: those of the process whose names begin with its argument."""
        self._role = role
        self._member_id = member_id
        self._incarnation_id = incarnation_id
        self._drain_s = drain_s
        self._shutdown = shutdown
        self._supervised = supervised
        self._metrics = metrics

    async def Restart(
        self, request: member_pb2.RestartRequest, context: grpc.aio.ServicerContext
    ) -> member_pb2.RestartResponse:
        """Drain, then end to be started again."""
        drain_s = request.drain_s if request.HasField("drain_s") else self._drain_s
        if not (math.isfinite(drain_s) and drain_s >= 0):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"drain_s is {drain_s}; give seconds, 0 or more")
        if request.incarnation_id != self._incarnation_id:
            message = (
                f"this is incarnation {self._incarnation_id} of {self._member_id}, not {request.incarnation_id!r}: it "
                "has been restarted meanwhile; look again"
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        if not self._shutdown.ask(ExitStatus.RESTART, drain_s):
            message = f"{self._member_id} is ending already; wait until it has left the mesh"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        log.info("restarting, as an operator asked", extra={"drain_s": drain_s})
        return member_pb2.RestartResponse(
            role=self._role, member_id=self._member_id, drain_s=drain_s, supervised=self._supervised
        )

    async def GetMetrics(
        self, request: member_pb2.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> member_pb2.GetMetricsResponse:
        """The metrics port's numbers, for who has an identity and perhaps no way to the port."""
        return member_pb2.GetMetricsResponse(families=await self._metrics(request.prefix))
