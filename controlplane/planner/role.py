"""The planner role: plans of cascades and of stages, and how many replicas models have, by one planner at a time."""

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from controlplane.model.duties import AUTOSCALE, CASCADES, STAGES
from controlplane.planner.autoscale.capacity_process import CapacityMaker, CapacityProcess
from controlplane.planner.autoscale.driver import AutoscaleDriver
from controlplane.planner.autoscale.service import AutoscalerService
from controlplane.planner.cascade.manager import CascadePlanManager
from controlplane.planner.cascade.plan_process import PlanMaker, PlanProcess
from controlplane.planner.metrics import PlannerMetrics
from controlplane.planner.service import PlannerService
from controlplane.planner.settings import PlannerSettings
from controlplane.planner.stages.manager import StagePlanManager
from controlplane.planner.stages.service import StagePlannerService
from controlplane.planning.cascade.drift import DriftSettings
from mesh.leadership import Leadership, LeadershipMetrics, lead
from mesh.role import RoleContext
from mesh.tasks import TaskSet
from penstock.v1 import autoscale_pb2_grpc, planner_pb2_grpc, stages_pb2_grpc


class PlannerRole:
    """Makes plans for the goals in the state store, as workloads are reported."""

    name: ClassVar[str] = "planner"

    def __init__(
        self,
        settings: PlannerSettings,
        plan_maker: PlanMaker | None = None,
        capacity_maker: CapacityMaker | None = None,
    ) -> None:
        """Makers: processes of their own unless given."""
        self._drift = DriftSettings(
            ratio=settings.drift_ratio,
            score_points=settings.drift_score_points,
            windows=settings.drift_windows,
            pause_windows=settings.drift_pause_windows,
        )
        self._plan_maker = plan_maker or PlanProcess(settings.seed, settings.plan_deadline_s)
        self._capacity_maker = capacity_maker or CapacityProcess(settings.seed)
        self._tasks = TaskSet(self.name)
        self._failure: asyncio.Future[None] | None = None
        self._leaderships: tuple[Leadership, ...] = ()
        self._driver: AutoscaleDriver | None = None

    @property
    def leaderships(self) -> tuple[Leadership, ...]:
        """Of what only one planner may do."""
        return self._leaderships

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Serve goals, workloads and plans, and begin to plan where this planner leads."""
        self._failure = asyncio.get_running_loop().create_future()
        metrics = PlannerMetrics(context.registry)
        leadership_metrics = LeadershipMetrics(context.registry)
        cascades = lead(context, CASCADES, leadership_metrics)
        plans = lead(context, STAGES, leadership_metrics)
        scales = lead(context, AUTOSCALE, leadership_metrics)
        self._leaderships = (cascades, plans, scales)
        for each in self._leaderships:
            self._tasks.spawn(each.run(), name=f"leader of {each.duty}", on_error=self._on_failed)
        manager = CascadePlanManager(
            context.store,
            self._plan_maker.make,
            self._drift,
            self._tasks,
            metrics,
            cascades,
            context.runtime.clock,
            routers=lambda: [member.member_id for member in context.directory.members("cascade")],
            member_id=context.member_id,
        )
        context.server.add(
            planner_pb2_grpc.add_PlannerServicer_to_server, PlannerService(manager), "penstock.v1.Planner"
        )
        stages = StagePlanManager(context.store, context.directory, context.member_id, plans, metrics, context.runtime)
        stages.start(self._tasks, self._on_failed)
        context.server.add(
            stages_pb2_grpc.add_StagePlannerServicer_to_server,
            StagePlannerService(stages),
            "penstock.v1.StagePlanner",
        )
        driver = AutoscaleDriver(
            context.store,
            context.directory,
            context.member_id,
            scales,
            metrics,
            context.runtime,
            self._capacity_maker,
        )
        driver.start(self._tasks, self._on_failed)
        self._driver = driver
        context.server.add(
            autoscale_pb2_grpc.add_AutoscalerServicer_to_server, AutoscalerService(driver), "penstock.v1.Autoscaler"
        )
        return {}

    def validate(self) -> None:
        """Raises `InvariantBroken` where what is kept contradicts itself."""
        if self._driver is not None:
            self._driver.validate()

    async def failed(self) -> None:
        """Raises what made it impossible to go on."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    async def drain(self) -> None:
        """Leave the planning to others. A plan that is being made is made again after the next workload."""
        if self._driver is not None:
            await self._driver.leave()
        await asyncio.gather(*(each.resign() for each in self._leaderships))

    async def stop(self) -> None:
        """Stop planning and leave the leadership; a plan that is being made is dropped."""
        await self._tasks.cancel()
        await asyncio.gather(*(each.resign() for each in self._leaderships))
        self._plan_maker.stop()
        if self._driver is not None:
            await self._driver.stop()

    def _on_failed(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)
