"""A planner's manager with plans made at once, and what it says and counts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from controlplane.model.cascade_goal import CascadeGoal
from controlplane.model.cascade_record import CascadeRecord
from controlplane.planner.cascade.manager import CascadePlanManager
from controlplane.planner.cascade.report import WorkloadReport
from controlplane.planner.metrics import PlannerMetrics
from controlplane.planning.cascade.drift import DriftSettings
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import (
    WorkloadWindow,
    read_window,
    read_workload,
    write_window,
)
from mesh.runtime import system_runtime
from mesh.store import StateStore, open_store
from mesh.tasks import TaskSet
from tests.still_clock import StillClock
from tests.unit.controlplane.planner.cascade_windows import GOAL, MODELS, RECORD, lines, plan_with, window
from tests.unit.mesh.leading import Leading

NOW_UNIX_S = 1_800_000_000.0
DRIFT = DriftSettings(windows=1, pause_windows=0, min_requests=10)


class Maker:
    """Makes a plan whose threshold tells how many were made before it; refuses if it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[CascadeGoal, tuple[bytes, ...]]] = []
        self.raises: Exception | None = None
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, goal: CascadeGoal, workload: tuple[bytes, ...], profiles: object) -> CascadePlan:
        self.asked.append((goal, workload))
        await self.may_end.wait()
        if self.raises is not None:
            raise self.raises
        models, _ = read_workload(workload)
        threshold = 60.0 + len(self.asked)
        tiers = tuple(PlannedTier(model, 1, (PlannedReplicas(1),), 1.0, 1.0) for model in models)
        return plan_with(threshold, tiers=tiers, thresholds=(threshold,) * (len(models) - 1))


class ManagerAtWork:
    def __init__(
        self, store: StateStore, manager: CascadePlanManager, maker: Maker, registry: CollectorRegistry, tasks: TaskSet
    ) -> None:
        self.store, self.manager, self.maker, self._registry, self.tasks = store, manager, maker, registry, tasks

    async def report(self, sample: CascadeSample, **fields: Any) -> str:
        return await self.manager.report(WorkloadReport(**{"cascade": "both", "lines": lines(sample), **fields}))

    async def count(self, offered: int, **fields: Any) -> str:
        """A window of 100 s in which so many came; up to 40 were sampled."""
        requests = read_window(lines(window(requests=min(40, offered)))).requests if offered else ()
        header = WorkloadWindow(MODELS, offered / 100.0, requests)
        return await self.report(window(), lines=tuple(write_window(header)), window_s=100.0, offered=offered, **fields)

    async def planned(self) -> str:
        return await self.verdict(lambda verdict: "planned anew" in verdict)

    def restarted(self) -> "ManagerAtWork":
        """Another planner, that knows what the state store says."""
        return ManagerAtWork.of(self.store, self.maker, self.tasks)

    @staticmethod
    def of(store: StateStore, maker: "Maker", tasks: TaskSet, **more: Any) -> "ManagerAtWork":
        registry = CollectorRegistry()
        metrics, clock = PlannerMetrics(registry), StillClock(5.0, NOW_UNIX_S)
        manager = CascadePlanManager(store, maker, DRIFT, tasks, metrics, Leading(), clock, **more)
        return ManagerAtWork(store, manager, maker, registry, tasks)

    def metric(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"penstock_planner_{name}", labels)

    def plans(self, outcome: str, cascade: str = "both") -> float | None:
        return self.metric("plans_total", cascade=cascade, outcome=outcome)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def verdict(self, holds: Callable[[str], bool]) -> str:
        """Once it is as expected."""
        async with asyncio.timeout(10):
            while True:
                (status,) = await self.manager.statuses()
                if holds(status.verdict):
                    return status.verdict
                await asyncio.sleep(0)

    async def record(self) -> CascadeRecord:
        entry = await self.store.get(RECORD.key)
        assert entry is not None
        return msgspec.json.decode(entry.value, type=CascadeRecord)


@asynccontextmanager
async def desk_with(
    goal: CascadeGoal | None = GOAL, record: CascadeRecord = RECORD, **more: Any
) -> AsyncIterator[ManagerAtWork]:
    store, maker, tasks = open_store("embedded:", system_runtime()), Maker(), TaskSet("test")
    at = ManagerAtWork.of(store, maker, tasks, **more)
    await store.put(record.key, msgspec.json.encode(record))
    if goal is not None:
        await at.manager.set_goal(goal)
    try:
        yield at
    finally:
        await tasks.cancel()
        await store.close()
