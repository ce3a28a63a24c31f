"""Takes workloads, has plans made, applies them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass

import msgspec

from controlplane.model.cascade_goal import GOALS_PREFIX, PLANS_PREFIX, CascadeGoal
from controlplane.model.cascade_record import CASCADES_PREFIX, CascadeRecord
from controlplane.planner.cascade.history import WorkloadHistory
from controlplane.planner.metrics import UNKNOWN_CASCADE, PlannerMetrics, PlanOutcome
from controlplane.planning.cascade.drift import DriftSettings
from controlplane.planning.cascade.plan import CascadePlan, decode_plan, encode_plan
from controlplane.planning.cascade.workload import read_workload
from controlplane.planning.instance_profile import PROFILES_PREFIX, InstanceProfile
from mesh.errors import PenstockError, PlanInfeasible, StoreError
from mesh.store.interface import StateStore
from mesh.store.stored_folder import StoredFolder
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

MakePlan = Callable[[CascadeGoal, tuple[bytes, ...], Mapping[str, InstanceProfile]], Awaitable[CascadePlan]]
"""From a goal, a workload and the profiles in the state store, by ENGINE/MODEL/DEVICE.

Takes its time, in another process. Raises `PlanInfeasible`, `ConfigurationError`, `TraceError`."""


@dataclass(frozen=True, slots=True)
class CascadeStatus:
    """What operators are shown of one cascade."""

    cascade: str
    goal: CascadeGoal | None
    revision: int
    plan_json: str
    verdict: str
    workloads: int
    plans: int


class CascadeDesk:
    """Of all cascades with a goal. One plan is made at a time; a workload that comes meanwhile is looked at after."""

    def __init__(
        self,
        store: StateStore,
        make: MakePlan,
        drift: DriftSettings,
        tasks: TaskSet,
        metrics: PlannerMetrics,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._make = make
        self._drift = drift
        self._tasks = tasks
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._histories: dict[str, WorkloadHistory] = {}
        self._planning = asyncio.Lock()
        self._goals = StoredFolder(store, GOALS_PREFIX, CascadeGoal, CascadeGoal.checked, self._on_goal)
        self._records = StoredFolder(store, CASCADES_PREFIX, CascadeRecord, CascadeRecord.checked)

    async def follow(self) -> None:
        """Follow goals and cascades, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._goals.follow())
            group.create_task(self._records.follow())

    def report(self, cascade: str, lines: tuple[bytes, ...]) -> str:
        """A sampled workload came in; says what is made of it. Raises `TraceError` for one that cannot be read."""
        models, sample = read_workload(lines)
        self._metrics.workloads.labels(self._label(cascade)).inc()
        history = self._histories.get(cascade)
        if history is None or history.models != models:
            history = self._histories[cascade] = WorkloadHistory(models, self._drift)
        why = history.seen(sample)
        goal = self._goals.records.get(cascade)
        if goal is None:
            history.verdict = "no goal is set, so nothing is planned: penstock plan goal"
        elif not why:
            history.verdict = "the workload is as planned for"
        elif history.plans and not goal.replan:
            history.verdict = f"{why}, but planning anew is switched off"
        else:
            history.verdict = f"{why}: planning"
            self._tasks.spawn(self._plan(cascade, goal, history, why), name=f"plan {cascade}")
        return history.verdict

    async def set_goal(self, goal: CascadeGoal) -> int:
        """Write it; returns the revision. Raises `ConfigurationError` and `StoreError`."""
        return await self._store.put(goal.checked().key, msgspec.json.encode(goal))

    async def apply(self, plan: CascadePlan) -> int:
        """Put a plan into force: thresholds at once, replicas as whoever runs them follows. Returns the revision.

        Raises `PlanInfeasible` for a plan that contradicts itself or the cascade of its name, and `StoreError`.
        """
        try:
            record = self._cascade_of(plan)
        except PlanInfeasible:
            self._count(plan.name, PlanOutcome.REFUSED)
            raise
        try:
            revision = await self._store.put(PLANS_PREFIX + plan.name, encode_plan(plan))
            planned = msgspec.structs.replace(record, thresholds=plan.thresholds, plan_revision=revision)
            await self._store.put(record.key, msgspec.json.encode(planned))
        except StoreError:
            self._count(plan.name, PlanOutcome.FAILED)
            raise
        self._count(plan.name, PlanOutcome.APPLIED)
        self._metrics.applied.labels(plan.name).set(self._wall_clock())
        log.warning("plan applied", extra={"cascade": plan.name, "revision": revision, "thresholds": plan.thresholds})
        return revision

    async def apply_encoded(self, plan_json: bytes) -> int:
        """The same for a plan as it is stored. Raises `PlanInfeasible` for what is no plan, too."""
        try:
            plan = decode_plan(plan_json)
        except PlanInfeasible:
            self._count("", PlanOutcome.REFUSED)
            raise
        return await self.apply(plan)

    def _cascade_of(self, plan: CascadePlan) -> CascadeRecord:
        """What the plan is for. Raises `PlanInfeasible` where it contradicts it or itself."""
        plan.checked()
        record = self._records.records.get(plan.name)
        models = tuple(tier.model for tier in plan.tiers)
        if record is None:
            raise PlanInfeasible(
                f"there is no cascade {plan.name}, which the plan is for: set it up first (penstock cascade set)"
            )
        if record.tiers != models:
            raise PlanInfeasible(
                f"the plan for {plan.name} is for the tiers {', '.join(models)}, the cascade has "
                f"{', '.join(record.tiers)}"
            )
        return record

    async def plan_of(self, cascade: str) -> tuple[int, str]:
        """(revision, JSON) of the plan in force; (0, "") while there is none. Raises `StoreError`."""
        entry = await self._store.get(PLANS_PREFIX + cascade)
        return (0, "") if entry is None else (entry.mod_revision, entry.value.decode())

    async def statuses(self) -> tuple[CascadeStatus, ...]:
        """Of every cascade that has a goal, a plan or a workload. Raises `StoreError`."""
        plans = await self._store.range(PLANS_PREFIX)
        by_name = {entry.key.removeprefix(PLANS_PREFIX): entry for entry in plans.entries}
        names = sorted({*self._goals.records, *by_name, *self._histories})
        statuses: list[CascadeStatus] = []
        for name in names:
            history, entry = self._histories.get(name), by_name.get(name)
            statuses.append(
                CascadeStatus(
                    cascade=name,
                    goal=self._goals.records.get(name),
                    revision=entry.mod_revision if entry else 0,
                    plan_json=entry.value.decode() if entry else "",
                    verdict=history.verdict if history else "no workload yet",
                    workloads=history.workloads if history else 0,
                    plans=history.plans if history else 0,
                )
            )
        return tuple(statuses)

    async def _plan(self, cascade: str, goal: CascadeGoal, history: WorkloadHistory, why: str) -> None:
        async with self._planning:
            began_s = self._clock()
            try:
                plan = await self._make(goal, history.workload(), await self._profiles())
            except (PenstockError, BrokenExecutor) as error:
                self._count(cascade, PlanOutcome.FAILED)
                self._refuse(cascade, history, why, error)
                return
            finally:
                self._metrics.planning_seconds.observe(self._clock() - began_s)
            try:
                revision = await self.apply(plan)
            except PenstockError as error:
                self._refuse(cascade, history, why, error)
                return
            history.planned(plan.thresholds)
            history.verdict = f"{why}: planned anew, revision {revision}"
            log.warning("planned", extra={"cascade": cascade, "why": why, "revision": revision})

    async def _profiles(self) -> dict[str, InstanceProfile]:
        """Those that can be read: one of another version is as good as none."""
        profiles: dict[str, InstanceProfile] = {}
        for entry in (await self._store.range(PROFILES_PREFIX)).entries:
            try:
                profile = msgspec.json.decode(entry.value, type=InstanceProfile)
            except msgspec.MsgspecError as error:
                log.warning("a profile cannot be read", extra={"key": entry.key, "error": str(error)})
                continue
            profiles[entry.key.removeprefix(PROFILES_PREFIX)] = profile
        return profiles

    def _refuse(self, cascade: str, history: WorkloadHistory, why: str, error: Exception) -> None:
        history.refused()
        history.verdict = f"{why}, but there is no new plan, the old one stays: {error}"
        log.error("no plan could be made", extra={"cascade": cascade, "why": why, "error": str(error)})

    def _count(self, cascade: str, outcome: PlanOutcome) -> None:
        self._metrics.plans.labels(self._label(cascade), outcome).inc()

    def _label(self, cascade: str) -> str:
        return cascade if cascade in self._records.records else UNKNOWN_CASCADE

    def _on_goal(self, name: str, goal: CascadeGoal | None) -> None:
        """Another goal asks for another plan, whether or not the workload has moved."""
        history = self._histories.get(name)
        if history is not None:
            self._histories[name] = WorkloadHistory(history.models, self._drift)
        log.warning("goal changed", extra={"cascade": name, "goal": str(goal)})
