"""The planner: goals and workloads in, plans out, applied to the cascade."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.cascade_goal import PLANS_PREFIX, CascadeGoal
from controlplane.model.cascade_record import CascadeRecord
from controlplane.planner.cascade.desk import CascadeDesk
from controlplane.planner.cascade.history import WorkloadHistory
from controlplane.planner.cascade.wire import goal_from, message_from
from controlplane.planner.metrics import PlannerMetrics
from controlplane.planner.role import PlannerRole
from controlplane.planner.settings import PlannerSettings
from controlplane.planning.cascade.drift import DriftSettings
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier, decode_plan, encode_plan
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import read_workload, write_workload
from mesh.errors import ConfigurationError, PlanInfeasible
from mesh.rpc.client import open_channel
from mesh.store import StateStore, open_store
from mesh.tasks import TaskSet
from penstock.v1 import planner_pb2, planner_pb2_grpc
from tests.unit.controlplane.local_mesh import local_mesh

MODELS = ("small", "large")
RECORD = CascadeRecord("both", MODELS, (50.0,), judges=("exact",))
GOAL = CascadeGoal("both", 4, ("Llama-3.2-3B@H100", "Llama-3.1-8B@H100"), quality=60.0, judge_s=0.1)
NOW_UNIX_S = 1_800_000_000.0
DRIFT = DriftSettings(windows=1, pause_windows=0, min_requests=10)


def window(rate_per_s: float = 2.0, score: float = 50.0, requests: int = 40, seed: int = 1) -> CascadeSample:
    rng = np.random.default_rng(seed)
    scores = np.clip(np.stack([rng.normal(score, 5, requests), rng.normal(90, 3, requests)], axis=1), 0, 100)
    return CascadeSample(
        scores, rng.integers(90, 110, requests), rng.integers(20, 24, (requests, 2)), rate_per_s=rate_per_s
    )


def lines(sample: CascadeSample) -> tuple[bytes, ...]:
    return tuple(write_workload(MODELS, sample))


def plan_with(threshold: float, **changes: Any) -> CascadePlan:
    tiers = tuple(PlannedTier(model, 1, (PlannedReplicas(1),), 1.0, 1.0) for model in MODELS)
    fields: dict[str, Any] = {"name": "both", "tiers": tiers, "thresholds": (threshold,), "gpus": 4}
    return CascadePlan(**{**fields, "quality": 80.0, "latency_p95_s": 1.0, "rate_per_s": 2.0, **changes})


class Maker:
    """Makes a plan whose threshold tells how many were made before it; refuses if it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[CascadeGoal, tuple[bytes, ...]]] = []
        self.refuses = False

    async def __call__(self, goal: CascadeGoal, workload: tuple[bytes, ...], profiles: object) -> CascadePlan:
        self.asked.append((goal, workload))
        if self.refuses:
            raise PlanInfeasible("4 GPUs do not hold this")
        return plan_with(60.0 + len(self.asked))


class Desk:
    def __init__(self, store: StateStore, desk: CascadeDesk, maker: Maker, registry: CollectorRegistry) -> None:
        self.store, self.desk, self.maker, self._registry = store, desk, maker, registry

    def metric(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"penstock_planner_{name}", labels)

    def plans(self, outcome: str, cascade: str = "both") -> float | None:
        return self.metric("plans_total", cascade=cascade, outcome=outcome)

    async def verdict(self, holds: Callable[[str], bool]) -> str:
        """Once it is as expected."""
        async with asyncio.timeout(10):
            while True:
                (status,) = await self.desk.statuses()
                if holds(status.verdict):
                    return status.verdict
                await asyncio.sleep(0)

    async def record(self) -> CascadeRecord:
        entry = await self.store.get(RECORD.key)
        assert entry is not None
        return msgspec.json.decode(entry.value, type=CascadeRecord)


@asynccontextmanager
async def desk_with(goal: CascadeGoal | None = GOAL, record: CascadeRecord = RECORD) -> AsyncIterator[Desk]:
    store, maker, tasks = open_store("embedded:"), Maker(), TaskSet("test")
    registry = CollectorRegistry()
    desk = CascadeDesk(store, maker, DRIFT, tasks, PlannerMetrics(registry), lambda: 5.0, lambda: NOW_UNIX_S)
    await store.put(record.key, msgspec.json.encode(record))
    if goal is not None:
        await desk.set_goal(goal)
    tasks.spawn(desk.follow(), name="follow")
    async with asyncio.timeout(10):
        while record.name not in desk._records.records or (goal and goal.cascade not in desk._goals.records):  # noqa: ASYNC110
            await asyncio.sleep(0)
    try:
        yield Desk(store, desk, maker, registry)
    finally:
        await tasks.cancel()
        await store.close()


async def test_the_first_workload_is_planned_for_and_the_plan_applied() -> None:
    async with desk_with() as at:
        assert "planning" in at.desk.report("both", lines(window()))
        await at.verdict(lambda verdict: "planned anew" in verdict)
        revision, plan_json = await at.desk.plan_of("both")
        assert decode_plan(plan_json.encode()).thresholds == (61.0,)
        record = await at.record()
        assert (record.thresholds, record.plan_revision, record.judges) == ((61.0,), revision, ("exact",))
        ((goal, workload),) = at.maker.asked
        assert goal == GOAL
        assert read_workload(workload)[1].requests == 40
        assert at.plans("applied") == 1
        assert at.metric("plan_applied_timestamp_seconds", cascade="both") == NOW_UNIX_S
        assert at.metric("workloads_total", cascade="both") == 1
        assert at.metric("planning_seconds_count") == 1


async def test_a_workload_that_has_not_moved_changes_nothing_and_one_that_has_is_planned_anew() -> None:
    async with desk_with() as at:
        at.desk.report("both", lines(window()))
        await at.verdict(lambda verdict: "planned anew" in verdict)
        assert at.desk.report("both", lines(window(seed=2))) == "the workload is as planned for"
        assert "request rate" in at.desk.report("both", lines(window(rate_per_s=5.0)))
        await at.verdict(lambda verdict: "rate" in verdict and "planned anew" in verdict)
        assert (await at.record()).thresholds == (62.0,)
        assert "mean score" in at.desk.report("both", lines(window(rate_per_s=5.0, score=20.0)))


async def test_without_a_plan_the_old_one_stays_and_the_reason_is_shown() -> None:
    async with desk_with() as at:
        at.desk.report("both", lines(window()))
        await at.verdict(lambda verdict: "planned anew" in verdict)
        at.maker.refuses = True
        at.desk.report("both", lines(window(rate_per_s=50.0)))
        verdict = await at.verdict(lambda verdict: "no new plan" in verdict)
        assert "4 GPUs do not hold this" in verdict
        assert (at.plans("applied"), at.plans("failed")) == (1, 1)
        assert (await at.record()).thresholds == (61.0,)


async def test_without_a_goal_nothing_is_planned() -> None:
    async with desk_with(goal=None) as at:
        assert "no goal" in at.desk.report("both", lines(window()))
        assert at.maker.asked == []


async def test_planning_anew_can_be_switched_off() -> None:
    async with desk_with(msgspec.structs.replace(GOAL, replan=False)) as at:
        at.desk.report("both", lines(window()))
        await at.verdict(lambda verdict: "planned anew" in verdict)
        assert "switched off" in at.desk.report("both", lines(window(rate_per_s=9.0)))


async def test_another_goal_asks_for_another_plan() -> None:
    async with desk_with() as at:
        at.desk.report("both", lines(window()))
        await at.verdict(lambda verdict: "planned anew" in verdict)
        await at.desk.set_goal(msgspec.structs.replace(GOAL, quality=70.0))
        await at.verdict(lambda verdict: verdict == "no workload yet")
        at.desk.report("both", lines(window()))
        await at.verdict(lambda verdict: "planned anew" in verdict)
        assert at.maker.asked[-1][0].quality == 70.0


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_with(70.0, name="other"), "there is no cascade other"),
        (plan_with(70.0, thresholds=()), "thresholds"),
        (plan_with(70.0, gpus=1), "more than its 1 GPUs"),
        (
            plan_with(70.0, tiers=tuple(PlannedTier(m, 1, (PlannedReplicas(1),), 1.0, 1.0) for m in ("x", "large"))),
            "the cascade has",
        ),
    ],
)
async def test_plans_that_contradict_themselves_or_the_cascade_are_refused(plan: CascadePlan, words: str) -> None:
    async with desk_with() as at:
        with pytest.raises(PlanInfeasible, match=words):
            await at.desk.apply(plan)
        assert await at.record() == RECORD
        assert at.plans("refused", "both" if plan.name == "both" else "unknown") == 1


async def test_names_that_callers_make_up_are_no_labels() -> None:
    async with desk_with() as at:
        at.desk.report("made up", lines(window()))
        assert at.metric("workloads_total", cascade="unknown") == 1
        with pytest.raises(PlanInfeasible, match="no cascade plan"):
            await at.desk.apply_encoded(b"{}")
        assert at.plans("refused", "unknown") == 1


def test_a_plan_is_made_for_the_windows_that_have_moved() -> None:
    history = WorkloadHistory(MODELS, DriftSettings(windows=2, pause_windows=0, min_requests=10))
    assert history.seen(window(requests=5)) == ""
    assert history.seen(window()) == "it is the first workload"
    history.planned((50.0,))
    for rate in (9.0, 10.0):
        why = history.seen(window(rate_per_s=rate, requests=20))
    assert "rate" in why
    _, merged = read_workload(history.workload())
    assert (merged.requests, merged.rate_per_s) == (40, 10.0)


def falling(early: float, requests: int = 40) -> CascadeSample:
    """Half of the answers fall to 20 at this part of their length; the mean answer and the mean score are the same."""
    usual = window(requests=requests)
    usual.scores[::2, 0] = 20.0
    tokens = usual.output_tokens.tolist()
    return replace(
        usual,
        falls=tuple(
            (
                ((max(1, round(early * of_small)), 20.0) if row % 2 == 0 else (of_small, float(usual.scores[row, 0])),),
                (),
            )
            for row, (of_small, _) in enumerate(tokens)
        ),
    )


def test_a_tier_that_writes_more_of_its_answers_than_planned_for_has_another_load() -> None:
    for threshold, moved in ((40.0, "what is written of an answer went from"), (10.0, "")):
        history = WorkloadHistory(MODELS, DRIFT)
        assert history.seen(falling(0.1)) == "it is the first workload"
        history.planned((threshold,))
        assert history.seen(falling(0.1)) == ""
        why = history.seen(falling(0.9))
        assert why.startswith(moved), "at a threshold that none is given up for nothing has moved"
        assert bool(why) == bool(moved)


def test_windows_keep_their_falls_if_all_have_them() -> None:
    settings = DriftSettings(windows=2, pause_windows=0, min_requests=10)
    for second, kept in ((falling(0.5, 10), True), (window(requests=10), False)):
        history = WorkloadHistory(MODELS, settings)
        for each in (falling(0.1), second):
            history.seen(each)
        _, merged = read_workload(history.workload())
        assert merged.requests == 50
        assert (merged.falls is not None) == kept
        if merged.falls is not None:
            assert merged.falls[40:] == second.falls


def test_goals_keep_what_they_minimise_and_those_of_older_clients_the_slowest_tier() -> None:
    goal = msgspec.structs.replace(GOAL, minimise="end_to_end")
    assert goal_from(message_from(goal)) == goal
    older = message_from(GOAL)
    older.ClearField("minimise")
    assert goal_from(older) == GOAL
    older.minimise = "cost"
    with pytest.raises(ConfigurationError, match="slowest_tier or end_to_end, not 'cost'"):
        goal_from(older)


async def test_a_real_plan_is_made_in_another_process_and_served() -> None:
    """The only test that simulates: small models, few GPUs."""
    async with local_mesh() as mesh:
        await mesh.store.put(RECORD.key, msgspec.json.encode(RECORD))
        planner = await mesh.start(PlannerRole(PlannerSettings()), "planner-0")
        async with open_channel(planner.address) as channel:
            stub: Any = planner_pb2_grpc.PlannerStub(channel)
            empty = await stub.GetPlan(planner_pb2.GetPlanRequest())
            assert (empty.revision, empty.plan_json) == (0, "")
            goal = planner_pb2.CascadeGoal(
                cascade="both",
                gpus=2,
                tiers=GOAL.tiers,
                quality=60.0,
                judge_s=0.1,
                replan=True,
                minimise="end_to_end",
            )
            await stub.SetGoal(planner_pb2.SetGoalRequest(goal=goal))
            report = planner_pb2.ReportWorkloadRequest(cascade="both", lines=lines(window()))
            async with asyncio.timeout(300):
                while "planning" not in (await stub.ReportWorkload(report)).verdict:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                while not (plan := await stub.GetPlan(planner_pb2.GetPlanRequest())).revision:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            made = decode_plan(plan.plan_json.encode())
            assert made.quality >= 60.0
            assert made.minimise == "end_to_end"
            (status,) = (await stub.ListPlans(planner_pb2.ListPlansRequest())).plans
            assert (status.goal.gpus, status.goal.minimise, status.revision) == (2, "end_to_end", plan.revision)
            assert await mesh.store.get(PLANS_PREFIX + "both") is not None
            with pytest.raises(grpc.aio.AioRpcError, match="line 1") as refused:
                await stub.ReportWorkload(planner_pb2.ReportWorkloadRequest(cascade="both", lines=[b"{"]))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError, match="either a quality or a latency"):
                await stub.SetGoal(
                    planner_pb2.SetGoalRequest(goal=planner_pb2.CascadeGoal(cascade="x", gpus=1, tiers=["a@b"]))
                )
            with pytest.raises(grpc.aio.AioRpcError, match="no cascade plan"):
                await stub.ApplyPlan(planner_pb2.ApplyPlanRequest(plan_json="{}"))
            applied = await stub.ApplyPlan(
                planner_pb2.ApplyPlanRequest(plan_json=encode_plan(plan_with(33.0)).decode())
            )
            assert applied.revision > plan.revision
