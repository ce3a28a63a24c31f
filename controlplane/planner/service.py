"""The gRPC methods of `penstock.v1.Planner`."""

from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc

from controlplane.planner.cascade.manager import CascadePlanManager
from controlplane.planner.cascade.report import WorkloadReport
from controlplane.planner.cascade.wire import goal_from, status_message
from mesh.errors import ConfigurationError, PlanInfeasible, StoreError, TraceError
from penstock.v1 import planner_pb2, planner_pb2_grpc

T = TypeVar("T")


class PlannerService(planner_pb2_grpc.PlannerServicer):
    """Takes goals, workloads and plans, and shows them."""

    def __init__(self, manager: CascadePlanManager) -> None:
        self._manager = manager

    async def GetPlan(self, request: planner_pb2.GetPlanRequest, context: Any) -> planner_pb2.GetPlanResponse:
        """The plan in force; empty while there is none."""
        if request.cascade:
            revision, plan_json = await _stored(self._manager.plan_of(request.cascade), context)
            return planner_pb2.GetPlanResponse(revision=revision, plan_json=plan_json)
        planned = [status for status in await _stored(self._manager.statuses(), context) if status.revision]
        if len(planned) > 1:
            names = ", ".join(status.cascade for status in planned)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"name one of the cascades with a plan: {names}")
        if not planned:
            return planner_pb2.GetPlanResponse()
        return planner_pb2.GetPlanResponse(revision=planned[0].revision, plan_json=planned[0].plan_json)

    async def ReportWorkload(
        self, request: planner_pb2.ReportWorkloadRequest, context: Any
    ) -> planner_pb2.ReportWorkloadResponse:
        """See the contract."""
        try:
            verdict = await _stored(self._manager.report(_report_from(request)), context)
        except (TraceError, ConfigurationError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort raises") from None
        return planner_pb2.ReportWorkloadResponse(verdict=verdict)

    async def SetGoal(self, request: planner_pb2.SetGoalRequest, context: Any) -> planner_pb2.SetGoalResponse:
        """See the contract."""
        try:
            revision = await _stored(self._manager.set_goal(goal_from(request.goal)), context)
        except ConfigurationError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort raises") from None
        return planner_pb2.SetGoalResponse(revision=revision)

    async def RemoveGoal(self, request: planner_pb2.RemoveGoalRequest, context: Any) -> planner_pb2.RemoveGoalResponse:
        """See the contract."""
        removed = await _stored(self._manager.remove_goal(request.cascade), context)
        return planner_pb2.RemoveGoalResponse(removed=removed)

    async def ApplyPlan(self, request: planner_pb2.ApplyPlanRequest, context: Any) -> planner_pb2.ApplyPlanResponse:
        """See the contract."""
        try:
            revision = await _stored(self._manager.apply_encoded(request.plan_json.encode()), context)
        except PlanInfeasible as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort raises") from None
        return planner_pb2.ApplyPlanResponse(revision=revision)

    async def ListPlans(self, request: planner_pb2.ListPlansRequest, context: Any) -> planner_pb2.ListPlansResponse:
        """See the contract."""
        statuses = await _stored(self._manager.statuses(), context)
        return planner_pb2.ListPlansResponse(plans=map(status_message, statuses))


def _report_from(request: planner_pb2.ReportWorkloadRequest) -> WorkloadReport:
    return WorkloadReport(
        cascade=request.cascade,
        lines=tuple(request.lines),
        judge=request.judge,
        router=request.router,
        window_s=request.window_s,
        offered=request.offered,
    )


async def _stored(work: Awaitable[T], context: Any) -> T:
    try:
        return await work
    except StoreError as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort raises") from None
