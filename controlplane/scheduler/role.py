"""The scheduler role: puts its parts together and keeps them running."""

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar

from controlplane.model.duties import POOLS, RESCHEDULER
from controlplane.policies.registry import POLICIES
from controlplane.policies.rescheduling.manager import ReschedulingManager
from controlplane.policies.rescheduling.parameters import ReschedulerMode
from controlplane.scheduler.metrics import GaugeCollector, SchedulerMetrics
from controlplane.scheduler.monitor_watch import MonitorWatch
from controlplane.scheduler.peers import Peers
from controlplane.scheduler.placement_service import PlacementService
from controlplane.scheduler.policy_config import PolicyConfig
from controlplane.scheduler.pools_keeper import PoolsKeeper
from controlplane.scheduler.profile_watch import ProfileWatch
from controlplane.scheduler.rescheduling.config import ReschedulerConfig
from controlplane.scheduler.rescheduling.metrics import ReschedulerMetrics
from controlplane.scheduler.rescheduling.service import ReschedulingService
from controlplane.scheduler.rescheduling.worker_orders import WorkerOrders
from controlplane.scheduler.service import SchedulerService
from controlplane.scheduler.settings import SchedulerSettings
from controlplane.scheduler.shown_snapshot import ShownSnapshot
from controlplane.scheduler.stage_watch import StageWatch
from mesh.leadership import Leadership, LeadershipMetrics, lead
from mesh.role import RoleContext
from mesh.tasks import TaskSet
from penstock.v1 import scheduler_pb2_grpc

TICK_S = 0.1
SWEEP_S = 0.01
SWEEP_PLACES = 4096
"""A quarter of a millisecond."""


class SchedulerRole:
    """Places requests by what a monitor tells."""

    name: ClassVar[str] = "scheduler"

    def __init__(self, settings: SchedulerSettings) -> None:
        self.placements: PlacementService | None = None
        """Where placements are made, once the role has started."""
        self._settings = settings
        self._vital: tuple[asyncio.Future[None], ...] = ()
        self._tasks = TaskSet("scheduler")
        self._rescheduling: ReschedulingService | None = None
        self._leaderships: tuple[Leadership, ...] = ()
        self._peers: Peers | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._failure: asyncio.Future[None] | None = None

    @property
    def leaderships(self) -> tuple[Leadership, ...]:
        """Its part in each duty, once it is started."""
        return self._leaderships

    def validate(self) -> None:
        """Check what must hold of its state between two events. Raises `InvariantBroken`."""
        if self.placements is not None:
            self.placements.feed.table.validate()
        if self._rescheduling is not None:
            self._rescheduling.manager.validate()
        for leadership in self._leaderships:
            leadership.candidate.validate()

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Serve placements. Raises `ConfigurationError` for an unknown policy."""
        POLICIES.report_failures()
        clock, metrics = context.runtime.clock, SchedulerMetrics(context.registry)
        leadership_metrics = LeadershipMetrics(context.registry)
        moving = lead(context, RESCHEDULER, leadership_metrics)
        pools = lead(context, POOLS, leadership_metrics, lambda _: keeper.resume())
        self._leaderships = (moving, pools)
        placements = self.placements = PlacementService(self._settings, metrics, clock, pools)
        keeper = PoolsKeeper(context.store, placements, pools, context.member_id)
        GaugeCollector(placements.gauges, context.registry)
        policy_config = PolicyConfig(context.store, placements.switch)
        peers = self._peers = Peers(
            context.member_id, context.runtime.transport, placements, metrics, context.runtime.clock, self._on_failed
        )
        placements.share = peers.tell

        def on_synced() -> None:
            placements.tick()
            peers.note_synced()

        watch = MonitorWatch(
            context.member_id,
            context.directory,
            placements.feed,
            metrics,
            self._settings.monitor_silence_s,
            clock.now_s,
            context.runtime.transport,
            on_synced=on_synced,
        )
        profiles = ProfileWatch(context.store, placements.switch)
        stages = StageWatch(context.store, placements.switch)
        rescheduling = self._rescheduling = self._make_rescheduling(context, placements, stages, moving)
        rescheduler_config = ReschedulerConfig(context.store, rescheduling, ReschedulerMode(self._settings.rescheduler))
        snapshot = ShownSnapshot(placements, peers.connected, clock)
        service = SchedulerService(placements, policy_config, rescheduling, rescheduler_config, peers, snapshot)
        context.server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, service, "penstock.v1.Scheduler")
        self._failure = asyncio.get_running_loop().create_future()
        self._unsubscribe = context.directory.subscribe(peers.on_change)
        self._vital = (
            self._failure,
            self._tasks.spawn(watch.follow(), name="monitor watch"),
            self._tasks.spawn(policy_config.follow(), name="policy"),
            self._tasks.spawn(keeper.follow(), name="pools"),
            self._tasks.spawn(stages.follow(), name="stages"),
            self._tasks.spawn(rescheduler_config.follow(), name="rescheduler setting"),
            self._tasks.spawn(rescheduling.run(), name="rescheduler"),
            self._tasks.spawn(profiles.follow(), name="profiles"),
            self._tasks.spawn(_tick(placements, profiles), name="tick"),
            self._tasks.spawn(_sweep(placements), name="sweep"),
            *(self._tasks.spawn(each.run(), name=f"leader of {each.duty}") for each in self._leaderships),
        )
        return {}

    async def failed(self) -> None:
        """Raises what ended one of the background tasks; none of them ends by itself."""
        await asyncio.wait(self._vital, return_when=asyncio.FIRST_COMPLETED)
        for task in self._vital:
            if task.done():
                task.result()

    async def drain(self) -> None:
        """Leave what this scheduler leads to others. A placement takes no time, so nothing is waited for."""
        await asyncio.gather(*(each.resign() for each in self._leaderships))

    async def stop(self) -> None:
        """End the watches, withdraw the migrations that are under way."""
        await self._tasks.cancel()
        await asyncio.gather(*(each.resign() for each in self._leaderships))
        self._unsubscribe()
        if self._peers is not None:
            await self._peers.stop()
        if self._rescheduling is not None:
            await self._rescheduling.stop()

    def _on_failed(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _make_rescheduling(
        self, context: RoleContext, placements: PlacementService, stages: StageWatch, leadership: Leadership
    ) -> ReschedulingService:
        """One scheduler moves requests: two would undo each other's work."""
        settings = self._settings
        return ReschedulingService(
            placements.feed,
            ReschedulingManager(ReschedulerMode.OFF, settings.rescheduler_in_flight, settings.max_explanations),
            WorkerOrders(
                settings.migration_deadline_s, context.member_id, context.runtime.transport, context.directory
            ),
            ReschedulerMetrics(context.registry),
            leadership,
            context.runtime.clock,
            context.runtime.threads,
            stages.layouts,
        )


async def _tick(placements: PlacementService, profiles: ProfileWatch) -> None:
    while True:
        profiles.look(placements.feed.table)
        placements.tick()
        await asyncio.sleep(TICK_S)


async def _sweep(placements: PlacementService) -> None:
    """Clear what dead instances left in the prefix index, a slice at a time."""
    while True:
        index = placements.feed.table.index
        index.sweep(SWEEP_PLACES)
        await asyncio.sleep(SWEEP_S if index.retired_slots else TICK_S)
