"""Takes workloads, has plans made, applies them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from controlplane.model.cascade_goal import CascadeGoal, quality_refusal
from controlplane.planner.cascade.history import WorkloadHistory
from controlplane.planner.cascade.report import WorkloadReport
from controlplane.planner.cascade.routers import RouterWindows
from controlplane.planner.cascade.stored import CascadeStore, StoredCascade
from controlplane.planner.metrics import UNKNOWN_CASCADE, PlannerMetrics, PlanOutcome
from controlplane.planning.cascade.drift import DriftSettings
from controlplane.planning.cascade.plan import CascadePlan, decode_plan, with_excluded_tiers
from controlplane.planning.cascade.quality_watch import AchievedQuality
from controlplane.planning.cascade.workload import read_window
from controlplane.planning.instance_profile import InstanceProfile
from mesh.errors import ConfigurationError, PenstockError, PlanInfeasible, StaleLeader
from mesh.leadership_state import Lead
from mesh.runtime import Clock
from mesh.store.interface import StateStore
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

MakePlan = Callable[[CascadeGoal, tuple[bytes, ...], Mapping[str, InstanceProfile]], Awaitable[CascadePlan]]
"""From a goal, a workload and the profiles in the state store, by ENGINE/MODEL/DEVICE.

Takes its time, in another process, and ends it after a deadline. Raises `PlanInfeasible`, `ConfigurationError`,
`TraceError`, `DeadlineExceeded`."""


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
    quality: AchievedQuality | None = None
    """None: no plan that promises a quality is in force."""


@dataclass(slots=True)
class _Watched:
    """What this planner remembers of a cascade."""

    history: WorkloadHistory
    routers: RouterWindows = field(default_factory=RouterWindows)
    why: str = ""
    """It is planned for."""
    goal_revision: int = 0
    """Of the goal that the verdict is about."""


class CascadePlanManager:
    """Of all cascades. One plan is made at a time, and one at most waits for each cascade; workloads that come
    meanwhile are taken down. What there is to decide by is read from the state store when it is decided."""

    def __init__(
        self,
        store: StateStore,
        make: MakePlan,
        drift: DriftSettings,
        tasks: TaskSet,
        metrics: PlannerMetrics,
        lead: Lead,
        clock: Clock,
        routers: Callable[[], Collection[str]] = tuple,
        member_id: str = "planner",
    ) -> None:
        """`routers`: the cascade routers that are announced in the mesh; `member_id`: this planner."""
        self._member_id = member_id
        self._stored = CascadeStore(store)
        self._make = make
        self._drift = drift
        self._tasks = tasks
        self._metrics = metrics
        self._lead = lead
        self._clock = clock
        self._routers = routers
        self._watched: dict[str, _Watched] = {}
        self._planning: set[str] = set()
        """Cascades that a plan is being made for, or that wait for their turn."""
        self._turn = asyncio.Lock()
        self._applying: set[asyncio.Task[int]] = set()

    async def report(self, report: WorkloadReport) -> str:
        """A sampled workload came in; says what is made of it. Raises `TraceError` for one that cannot be read, and
        `StoreError`."""
        window = read_window(report.lines)
        stored = await self._stored.cascade(report.cascade)
        self._metrics.workloads.labels(_label(stored)).inc()
        refusal = report.refusal(window, stored)
        if refusal:
            if stored.record is None:
                self._watched.pop(report.cascade, None)
            return refusal
        assert stored.record is not None  # or it would have been refused
        watched = self._watched_with(stored.record.name, window.models, stored.record.judges[0], stored.record.label)
        combined = watched.routers.reported(
            report.router, report.observed(window), self._routers() if report.router else (), self._clock.now_s()
        )
        if combined is None:
            return f"taken down; waiting for the windows of {', '.join(watched.routers.waiting_for)}"
        _follow(watched, stored)
        finding = watched.history.seen(combined)
        self._metrics.show_quality(stored.record.name, watched.history.quality)
        watched.history.verdict = self._decided(watched, stored, finding.why, finding.says)
        return watched.history.verdict

    async def set_goal(self, goal: CascadeGoal) -> int:
        """Write it; returns the revision. Raises `ConfigurationError` for one that no plan can be made for, and
        `StoreError`."""
        record = (await self._stored.cascade(goal.checked().cascade)).record
        if record is None and goal.judge_s is None:
            raise ConfigurationError(
                f"there is no cascade {goal.cascade} yet, so its judge is not known: say what a judgement takes "
                "(--judge-s), or set the cascade up first (penstock cascade set)"
            )
        if record is not None and len(record.tiers) != len(goal.tiers):
            raise ConfigurationError(
                f"the goal of {goal.cascade} names {len(goal.tiers)} tiers, the cascade has {len(record.tiers)} "
                f"({', '.join(record.tiers)}): name one for each"
            )
        refusal = "" if record is None else quality_refusal(record.judges[0], bool(record.label))
        if refusal:
            raise ConfigurationError(f"the goal of {goal.cascade} is refused: {refusal}")
        return await self._stored.set_goal(goal)

    async def remove_goal(self, cascade: str) -> bool:
        """No more plans for it; the one in force stays. False: it has no goal. Raises `StoreError`."""
        removed = await self._stored.remove_goal(cascade)
        if removed:
            log.warning("goal removed", extra={"cascade": cascade})
        return removed

    async def apply(self, plan: CascadePlan, *, as_leader: bool = False) -> int:
        """Put a plan into force: thresholds at once, replicas as whoever runs them follows. Returns the revision.

        What has begun is brought to its end even if the caller goes meanwhile: thresholds would stay without their
        plan. Raises `PlanInfeasible` for a plan that contradicts itself or the cascade of its name, and `StoreError`;
        `as_leader`, of a planner that leads no more, `StaleLeader`.
        """
        applying = asyncio.create_task(self._apply(plan, as_leader), name=f"apply the plan for {plan.name}")
        self._applying.add(applying)
        applying.add_done_callback(self._applied)
        return await asyncio.shield(applying)

    def _applied(self, applying: asyncio.Task[int]) -> None:
        self._applying.discard(applying)
        if not applying.cancelled() and (error := applying.exception()) is not None:
            # Its caller may have gone: then nobody else tells of it.
            log.error("a plan is not in force", extra={"task": applying.get_name(), "error": str(error)})

    async def _apply(self, plan: CascadePlan, as_leader: bool) -> int:
        label = UNKNOWN_CASCADE
        try:
            label = _label(await self._stored.cascade(plan.name))
            led = (self._lead.epoch, self._member_id) if as_leader else (0, "")
            signed = msgspec.structs.replace(plan, epoch=led[0], leader=led[1])
            revision = await self._stored.apply(signed, self._check_lead if as_leader else lambda: None)
        except PlanInfeasible:
            self._metrics.plans.labels(label, PlanOutcome.REFUSED).inc()
            raise
        except Exception:
            self._metrics.plans.labels(label, PlanOutcome.FAILED).inc()
            raise
        self._metrics.plans.labels(label, PlanOutcome.APPLIED).inc()
        self._metrics.applied.labels(plan.name).set(self._clock.unix_s())
        log.warning("plan applied", extra={"cascade": plan.name, "revision": revision, "thresholds": plan.thresholds})
        return revision

    def _check_lead(self) -> None:
        if not self._lead.is_leading:
            raise StaleLeader("this planner ceased to lead while a plan was being made, which is dropped")

    async def apply_encoded(self, plan_json: bytes) -> int:
        """The same for a plan as it is stored. Raises `PlanInfeasible` for what is no plan, too."""
        try:
            plan = decode_plan(plan_json)
        except PlanInfeasible:
            self._metrics.plans.labels(UNKNOWN_CASCADE, PlanOutcome.REFUSED).inc()
            raise
        return await self.apply(plan)

    async def plan_of(self, cascade: str) -> tuple[int, str]:
        """(revision, JSON) of the plan in force; (0, "") while there is none. Raises `StoreError`."""
        return await self._stored.plan_json(cascade)

    async def statuses(self) -> tuple[CascadeStatus, ...]:
        """Of every cascade that has a goal, a plan or a workload. Raises `StoreError`."""
        for name in list(self._watched):
            if (await self._stored.cascade(name)).record is None:
                self._watched.pop(name, None)
        names = sorted({*await self._stored.names(), *self._watched})
        return tuple([await self._status(name) for name in names])

    async def _status(self, name: str) -> CascadeStatus:
        stored, watched = await self._stored.cascade(name), self._watched.get(name)
        revision, plan_json = await self._stored.plan_json(name)
        verdict = watched.history.verdict if watched is not None else "no workload yet"
        if stored.goal is not None and watched is not None and watched.goal_revision != stored.goal_revision:
            verdict = "another goal was set: planning begins with the next workload"
        return CascadeStatus(
            cascade=name,
            goal=stored.goal,
            revision=revision,
            plan_json=plan_json,
            verdict=verdict,
            workloads=watched.history.workloads if watched is not None else 0,
            plans=watched.history.plans if watched is not None else 0,
            quality=watched.history.quality if watched is not None else None,
        )

    def _watched_with(self, cascade: str, models: tuple[str, ...], judge: str, label: str) -> _Watched:
        """Anew for other models, the scores of another judge, or the labels of another."""
        watched = self._watched.get(cascade)
        history = None if watched is None else watched.history
        if (
            watched is None
            or history is None
            or (history.models, history.judge, history.label) != (models, judge, label)
        ):
            watched = self._watched[cascade] = _Watched(WorkloadHistory(models, judge, self._drift, label))
        return watched

    def _decided(self, watched: _Watched, stored: StoredCascade, why: str, says: str) -> str:
        """What is made of a window, in words."""
        if stored.goal is None:
            return "no goal is set, so nothing is planned: penstock plan goal"
        cascade = stored.goal.cascade
        if cascade in self._planning:
            return f"{why or says}; a plan is being made"
        if not why:
            return says
        if not self._lead.is_leading:
            return f"{why}, but another planner leads"
        if not stored.goal.replan and not stored.reason_to_plan:
            return f"{why}, but planning anew is switched off"
        self._planning.add(cascade)
        self._tasks.spawn(self._plan(cascade, watched), name=f"plan {cascade}")
        return f"{why}: planning"

    async def _plan(self, cascade: str, watched: _Watched) -> None:
        """Never raises, but when it is cancelled: what goes wrong is the verdict."""
        watched.why = watched.history.finding.why
        try:
            async with self._turn:
                await self._plan_in_turn(cascade, watched)
        except PenstockError as error:
            self._refuse(cascade, watched, str(error))
        # A bug in planning one cascade must not leave its operator without a word.
        except Exception as error:
            log.exception("planning has failed", extra={"cascade": cascade})
            self._refuse(cascade, watched, f"{type(error).__name__}: {error}")
        finally:
            self._planning.discard(cascade)

    async def _plan_in_turn(self, cascade: str, watched: _Watched) -> None:
        history = watched.history
        try:
            # Waiting for one's turn may have taken minutes.
            stored = await self._stored.cascade(cascade)
            _follow(watched, stored)
            if stored.goal is None or not history.finding.why or not self._is_current(watched, stored):
                history.verdict = history.finding.says or "the goal or the cascade has gone: nothing is planned"
                return
            watched.why = history.finding.why
            plan, notes = await self._made(stored.goal, history)
            now = await self._stored.cascade(cascade)
        except Exception:
            self._metrics.plans.labels(cascade, PlanOutcome.FAILED).inc()
            raise
        if now.is_other_than(stored) or not self._is_current(watched, now):
            self._metrics.plans.labels(cascade, PlanOutcome.OUTDATED).inc()
            history.verdict = (
                f"{watched.why}, but the goal, the plan in force or the cascade was changed while a plan was being "
                "made; the next workload is looked at anew"
            )
            log.warning("a plan was outdated when it was made", extra={"cascade": cascade, "why": watched.why})
            return
        revision = await self.apply(plan, as_leader=True)
        history.planned(plan)
        history.verdict = "; ".join((f"{watched.why}: planned anew, revision {revision}", *notes))
        log.warning("planned", extra={"cascade": cascade, "why": watched.why, "revision": revision, "notes": notes})

    async def _made(self, goal: CascadeGoal, history: WorkloadHistory) -> tuple[CascadePlan, tuple[str, ...]]:
        """And what is to be said of it."""
        began_s = self._clock.now_s()
        try:
            case = history.case()
            plan = await self._make(case.goal(goal, history.judge), case.lines(), await self._stored.profiles())
        finally:
            self._metrics.planning_seconds.observe(self._clock.now_s() - began_s)
        plan = with_excluded_tiers(plan, case.models)
        workload = case.summary(plan.thresholds[0] if plan.thresholds else 0.0)
        return msgspec.structs.replace(plan, judge=history.judge, workload=workload), case.notes

    def _is_current(self, watched: _Watched, stored: StoredCascade) -> bool:
        """Whether the workload is still one of the cascade as it stands."""
        record, history = stored.record, watched.history
        return (
            record is not None
            and self._watched.get(record.name) is watched
            and (record.tiers, record.judges[:1], record.label) == (history.models, (history.judge,), history.label)
        )

    def _refuse(self, cascade: str, watched: _Watched, said: str) -> None:
        watched.history.refused()
        watched.history.verdict = f"{watched.why}, but there is no new plan, the old one stays: {said}"
        log.error("no plan could be made", extra={"cascade": cascade, "why": watched.why, "error": said})


def _follow(watched: _Watched, stored: StoredCascade) -> None:
    watched.goal_revision = stored.goal_revision
    watched.history.follow(stored.plan, stored.reason_to_plan)


def _label(stored: StoredCascade) -> str:
    return UNKNOWN_CASCADE if stored.record is None else stored.record.name
