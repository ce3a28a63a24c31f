"""The planner: goals and workloads in, plans out, applied to the cascade."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import BrokenExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.cascade_goal import PLANS_PREFIX, CascadeGoal
from controlplane.model.cascade_record import CascadeRecord
from controlplane.planner.cascade.desk import CascadeDesk
from controlplane.planner.cascade.report import WorkloadReport
from controlplane.planner.cascade.wire import goal_from, message_from
from controlplane.planner.metrics import PlannerMetrics
from controlplane.planner.role import PlannerRole
from controlplane.planner.settings import PlannerSettings
from controlplane.planning.cascade.drift import DriftSettings
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier, decode_plan, encode_plan
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import (
    WorkloadWindow,
    read_window,
    read_workload,
    write_window,
)
from mesh.errors import ConfigurationError, DeadlineExceeded, PlanInfeasible
from mesh.rpc.client import open_channel
from mesh.store import StateStore, open_store
from mesh.tasks import TaskSet
from penstock.v1 import planner_pb2, planner_pb2_grpc
from tests.unit.controlplane.local_mesh import local_mesh
from tests.unit.controlplane.planner.cascade_windows import GOAL, MODELS, RECORD, lines, plan_with, window

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


class Desk:
    def __init__(
        self, store: StateStore, desk: CascadeDesk, maker: Maker, registry: CollectorRegistry, tasks: TaskSet
    ) -> None:
        self.store, self.desk, self.maker, self._registry, self.tasks = store, desk, maker, registry, tasks

    async def report(self, sample: CascadeSample, **fields: Any) -> str:
        return await self.desk.report(WorkloadReport(**{"cascade": "both", "lines": lines(sample), **fields}))

    async def count(self, offered: int, **fields: Any) -> str:
        """A window of 100 s in which so many came; up to 40 were sampled."""
        requests = read_window(lines(window(requests=min(40, offered)))).requests if offered else ()
        header = WorkloadWindow(MODELS, offered / 100.0, requests)
        return await self.report(window(), lines=tuple(write_window(header)), window_s=100.0, offered=offered, **fields)

    async def planned(self) -> str:
        return await self.verdict(lambda verdict: "planned anew" in verdict)

    def restarted(self) -> "Desk":
        """Another planner, that knows what the state store says."""
        return Desk.of(self.store, self.maker, self.tasks)

    @staticmethod
    def of(store: StateStore, maker: "Maker", tasks: TaskSet, **more: Any) -> "Desk":
        registry = CollectorRegistry()
        clocks = (lambda: 5.0, lambda: NOW_UNIX_S)
        desk = CascadeDesk(store, maker, DRIFT, tasks, PlannerMetrics(registry), *clocks, **more)
        return Desk(store, desk, maker, registry, tasks)

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
                (status,) = await self.desk.statuses()
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
) -> AsyncIterator[Desk]:
    store, maker, tasks = open_store("embedded:"), Maker(), TaskSet("test")
    at = Desk.of(store, maker, tasks, **more)
    await store.put(record.key, msgspec.json.encode(record))
    if goal is not None:
        await at.desk.set_goal(goal)
    try:
        yield at
    finally:
        await tasks.cancel()
        await store.close()


async def test_the_first_workload_is_planned_for_and_the_plan_applied() -> None:
    async with desk_with() as at:
        assert await at.report(window()) == "it is the first workload: planning"
        await at.planned()
        revision, plan_json = await at.desk.plan_of("both")
        plan = decode_plan(plan_json.encode())
        assert (plan.thresholds, plan.judge) == ((61.0,), "exact")
        assert plan.workload is not None
        assert (plan.workload.rate_per_s, plan.workload.requests) == (2.0, 40)
        assert plan.workload.scores[0] == pytest.approx(window().scores[:, 0].mean())
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
        await at.report(window())
        await at.planned()
        assert await at.report(window(seed=2)) == "the workload is as planned for"
        assert "request rate" in await at.report(window(rate_per_s=5.0))
        await at.verdict(lambda verdict: "rate" in verdict and "planned anew" in verdict)
        assert (await at.record()).thresholds == (62.0,)
        assert "mean score" in await at.report(window(rate_per_s=5.0, score=20.0))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PlanInfeasible("4 GPUs do not hold this"), "4 GPUs do not hold this"),
        (DeadlineExceeded("no plan was made within 600 s"), "within 600 s"),
        (IndexError("list index out of range"), "IndexError: list index out of range"),
        (BrokenExecutor("a process died"), "BrokenExecutor"),
    ],
)
async def test_whatever_goes_wrong_the_old_plan_stays_the_reason_is_shown_and_counted(
    error: Exception, words: str
) -> None:
    async with desk_with() as at:
        await at.report(window())
        await at.planned()
        at.maker.raises = error
        await at.report(window(rate_per_s=50.0))
        verdict = await at.verdict(lambda verdict: "no new plan" in verdict)
        assert words in verdict
        assert (at.plans("applied"), at.plans("failed")) == (1, 1)
        assert (await at.record()).thresholds == (61.0,)
        at.maker.raises = None
        await at.report(window(rate_per_s=50.0))
        await at.verdict(lambda verdict: "planned anew" in verdict)


async def test_without_a_goal_nothing_is_planned() -> None:
    async with desk_with(goal=None) as at:
        assert "no goal" in await at.report(window())
        assert at.maker.asked == []


async def test_a_goal_can_be_removed_and_the_plan_stays() -> None:
    async with desk_with() as at:
        await at.report(window())
        await at.planned()
        assert await at.desk.remove_goal("both")
        assert not await at.desk.remove_goal("both")
        assert "no goal" in await at.report(window(rate_per_s=50.0))
        assert (await at.desk.plan_of("both"))[0] > 0
        (status,) = await at.desk.statuses()
        assert status.goal is None


async def test_planning_anew_can_be_switched_off() -> None:
    async with desk_with(msgspec.structs.replace(GOAL, replan=False)) as at:
        await at.report(window())
        await at.planned()
        assert "switched off" in await at.report(window(rate_per_s=9.0))


async def test_another_goal_asks_for_another_plan() -> None:
    async with desk_with(msgspec.structs.replace(GOAL, replan=False)) as at:
        await at.report(window())
        await at.planned()
        await at.desk.set_goal(msgspec.structs.replace(GOAL, quality=70.0, replan=False))
        await at.verdict(lambda verdict: "another goal was set" in verdict)
        assert "the goal was set after the plan in force: planning" in await at.report(window())
        await at.planned()
        assert at.maker.asked[-1][0].quality == 70.0
        assert await at.report(window()) == "the workload is as planned for"


async def test_one_plan_is_made_however_many_workloads_come_meanwhile() -> None:
    async with desk_with() as at:
        at.maker.may_end.clear()
        verdicts = [await at.report(window(seed=seed)) for seed in range(4)]
        assert ["a plan is being made" in verdict for verdict in verdicts] == [False, True, True, True]
        at.maker.may_end.set()
        await at.planned()
        assert (len(at.maker.asked), at.plans("applied"), len(at.tasks)) == (1, 1, 0)
        (status,) = await at.desk.statuses()
        assert (status.workloads, status.plans) == (4, 1)


async def test_a_plan_is_for_the_workload_that_it_was_begun_for_and_not_for_one_that_came_meanwhile() -> None:
    async with desk_with() as at:
        at.maker.may_end.clear()
        await at.report(window())
        await at.until(lambda: bool(at.maker.asked))
        await at.report(window(rate_per_s=40.0))
        at.maker.may_end.set()
        await at.planned()
        assert "from 2 to 40" in await at.report(window(rate_per_s=40.0))


async def test_cascades_wait_for_their_turn_and_are_looked_at_again_then() -> None:
    other = msgspec.structs.replace(RECORD, name="other")
    async with desk_with() as at:
        await at.store.put(other.key, msgspec.json.encode(other))
        await at.desk.set_goal(msgspec.structs.replace(GOAL, cascade="other"))
        at.maker.may_end.clear()
        await at.report(window())
        await at.report(window(), cascade="other")
        await at.until(lambda: bool(at.maker.asked))
        await at.desk.remove_goal("other")
        at.maker.may_end.set()
        await at.until(lambda: not len(at.tasks))
        assert [goal.cascade for goal, _ in at.maker.asked] == ["both"]


@pytest.mark.parametrize("change", ["goal", "plan", "judge", "cascade"])
async def test_a_plan_begun_for_what_has_changed_since_is_not_applied(change: str) -> None:
    async with desk_with() as at:
        at.maker.may_end.clear()
        await at.report(window())
        await at.until(lambda: bool(at.maker.asked))
        if change == "goal":
            await at.desk.set_goal(msgspec.structs.replace(GOAL, quality=99.0))
        elif change == "plan":
            await at.desk.apply(plan_with(33.0))
        elif change == "judge":
            await at.store.put(RECORD.key, msgspec.json.encode(msgspec.structs.replace(RECORD, judges=("model:x",))))
        else:
            await at.store.delete(RECORD.key)
        at.maker.may_end.set()
        await at.until(lambda: not len(at.tasks))
        assert at.plans("outdated") == 1
        entry = await at.store.get(PLANS_PREFIX + "both")
        if change == "plan":
            assert entry is not None
            assert decode_plan(entry.value).thresholds == (33.0,)
        else:
            assert entry is None


async def test_a_planner_that_starts_again_keeps_the_plan_and_goes_on_watching() -> None:
    async with desk_with(msgspec.structs.replace(GOAL, replan=False)) as at:
        await at.report(window())
        await at.planned()
        again = at.restarted()
        assert await again.report(window(seed=2)) == "the workload is as planned for"
        assert "switched off" in await again.report(window(score=20.0))
        await again.desk.set_goal(GOAL)
        await again.report(window())
        await again.planned()
        once_more = again.restarted()
        assert "mean score went from 50 to 20: planning" in await once_more.report(window(score=20.0))
        await once_more.planned()
        assert len(at.maker.asked) == 3


@pytest.mark.parametrize("replan", [False, True])
async def test_a_plan_applied_by_hand_counts_and_is_compared_by_its_rate(replan: bool) -> None:
    async with desk_with(msgspec.structs.replace(GOAL, replan=replan)) as at:
        await at.desk.apply(plan_with(33.0))
        assert await at.report(window()) == "the workload is as planned for"
        verdict = await at.report(window(rate_per_s=20.0))
        assert verdict.startswith("the request rate went from 2 to 20")
        assert ("switched off" in verdict) != replan


async def test_scores_of_another_judge_begin_a_new_history() -> None:
    async with desk_with() as at:
        await at.report(window())
        await at.planned()
        await at.store.put(RECORD.key, msgspec.json.encode(msgspec.structs.replace(RECORD, judges=("model:b",))))
        assert await at.report(window(), judge="exact") == (
            "left out: these are scores of exact, the cascade is judged by model:b now"
        )
        assert "the plan in force is by the scores of exact: planning" in await at.report(window(score=80.0))
        await at.verdict(lambda verdict: "scores of exact: planned anew" in verdict)
        assert read_workload(at.maker.asked[-1][1])[1].requests == 40, "none of the former judge's scores"
        assert decode_plan((await at.desk.plan_of("both"))[1].encode()).judge == "model:b"


async def test_too_few_requests_are_said_to_be_too_few() -> None:
    async with desk_with() as at:
        assert await at.count(5) == "too few requests to plan for (5 of 10)"
        assert await at.count(0) == "no requests came, so there is nothing to plan for"
        await at.count(800)
        await at.planned()
        assert await at.count(780) == "the workload is as planned for"
        assert "no requests come any more: the plan for 8 a second is kept" in await at.count(0)
        assert "the request rate went from 8 to 0.03: planning" in await at.count(3)
        await at.verdict(lambda verdict: "0.03: planned anew" in verdict)
        workload = read_workload(at.maker.asked[-1][1])[1]
        assert (workload.requests, workload.rate_per_s) == (40, 0.03), "the last good window at the rate of now"
        assert "the rate is as planned for; too few requests to compare more (3 of 10)" in await at.count(3)


def without_large(sample: CascadeSample) -> tuple[bytes, ...]:
    """As it is sampled while the large tier has no instance."""
    requests = read_window(lines(sample)).requests
    gone = tuple(
        msgspec.structs.replace(
            request, output_tokens=(request.output_tokens[0], None), scores=(request.scores[0], None)
        )
        for request in requests
    )
    return tuple(write_window(WorkloadWindow(MODELS, sample.rate_per_s, gone)))


ONLY_SMALL = (PlannedTier("small", 2, (PlannedReplicas(2),), 1.0, 1.0), PlannedTier("large", 0, (), 0.0, 0.0))


async def test_a_plan_that_gives_a_tier_no_gpus_is_not_the_last_one() -> None:
    async with desk_with() as at:
        await at.report(window())
        await at.planned()
        await at.desk.apply(plan_with(0.0, tiers=ONLY_SMALL))
        await at.report(window(), lines=without_large(window()))
        harder = window(score=20.0)
        assert "mean score went from 50 to 20: planning" in await at.report(harder, lines=without_large(harder))
        verdict = await at.planned()
        assert verdict.endswith("large has not answered 40 of 40 samples: its answers of 2 windows ago stand in")
        assert read_workload(at.maker.asked[-1][1])[1].scores[:, 1].mean() == pytest.approx(90, abs=3)


async def test_a_tier_that_nobody_has_seen_is_left_out_or_waited_for() -> None:
    async with desk_with() as at:
        await at.report(window(), lines=without_large(window()))
        verdict = await at.verdict(lambda verdict: "no new plan" in verdict)
        assert "large has answered too few samples since this planner started" in verdict
        await at.desk.apply(plan_with(0.0, tiers=ONLY_SMALL))
        faster = window(rate_per_s=9.0)
        await at.report(faster, lines=without_large(faster))
        assert "large has no GPUs and was never seen, so it is left out" in await at.planned()
        goal, workload = at.maker.asked[-1]
        assert (goal.tiers, read_workload(workload)[0]) == (GOAL.tiers[:1], ("small",))
        plan = decode_plan((await at.desk.plan_of("both"))[1].encode())
        assert [(tier.model, tier.gpus, tier.share) for tier in plan.tiers] == [("small", 1, 1.0), ("large", 0, 0.0)]
        assert (plan.thresholds, plan.workload and plan.workload.scores[1]) == ((0.0,), None)
        assert "as planned" in await at.report(faster, lines=without_large(faster))


async def test_the_windows_of_all_routers_are_added_up() -> None:
    async with desk_with(routers=lambda: ("a", "b")) as at:
        assert await at.count(400, router="a") == "taken down; waiting for the windows of b"
        assert await at.count(400, router="b") == "it is the first workload: planning"
        await at.planned()
        workload = read_workload(at.maker.asked[-1][1])[1]
        assert (workload.rate_per_s, workload.requests) == (8.0, 80)


async def test_a_goal_has_as_many_tiers_as_the_cascade() -> None:
    async with desk_with(goal=None) as at:
        three = msgspec.structs.replace(GOAL, tiers=(*GOAL.tiers, "x@H100"))
        with pytest.raises(ConfigurationError, match=r"names 3 tiers, the cascade has 2 \(small, large\)"):
            await at.desk.set_goal(three)
        await at.store.put(three.key, msgspec.json.encode(three))
        await at.report(window())
        await at.verdict(lambda verdict: "the goal names 3 tiers, the cascade has 2" in verdict)
        assert at.plans("failed") == 1


@pytest.mark.parametrize(("judge", "seconds"), [("exact", 0.0), ("confidence", 0.0), ("model:b", 1.0)])
async def test_what_a_judgement_takes_depends_on_the_judge_unless_it_is_said(judge: str, seconds: float) -> None:
    unsaid = msgspec.structs.replace(GOAL, judge_s=None)
    async with desk_with(unsaid, msgspec.structs.replace(RECORD, judges=(judge,))) as at:
        await at.report(window())
        await at.planned()
        assert at.maker.asked[0][0].judge_s == seconds
        with pytest.raises(ConfigurationError, match="--judge-s"):
            await at.desk.set_goal(msgspec.structs.replace(unsaid, cascade="unknown"))
        await at.desk.set_goal(msgspec.structs.replace(GOAL, cascade="unknown"))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_with(70.0, name="other"), "there is no cascade other"),
        (plan_with(70.0, thresholds=()), "thresholds"),
        (plan_with(70.0, gpus=1), "more than its 1 GPUs"),
        (plan_with(70.0, judge="model:b"), "scores of model:b, the cascade is judged by exact"),
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
        assert "there is no cascade made up" in await at.report(window(), cascade="made up")
        assert at.metric("workloads_total", cascade="unknown") == 1
        with pytest.raises(PlanInfeasible, match="no cascade plan"):
            await at.desk.apply_encoded(b"{}")
        assert at.plans("refused", "unknown") == 1


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


async def test_the_planner_waits_for_the_routers_that_are_announced_and_a_goal_may_leave_the_judge_to_it() -> None:
    async with local_mesh() as mesh:
        await mesh.store.put(RECORD.key, msgspec.json.encode(RECORD))
        for router in ("cascade-0", "cascade-1"):
            await mesh.announce("cascade", router)
        planner = await mesh.start(PlannerRole(PlannerSettings()), "planner-0")
        async with asyncio.timeout(10):
            while len(mesh.directory.members("cascade")) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        async with open_channel(planner.address) as channel:
            stub: Any = planner_pb2_grpc.PlannerStub(channel)
            goal = message_from(msgspec.structs.replace(GOAL, judge_s=None, tiers=GOAL.tiers[:1]))
            with pytest.raises(grpc.aio.AioRpcError, match="names 1 tiers, the cascade has 2") as refused:
                await stub.SetGoal(planner_pb2.SetGoalRequest(goal=goal))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            goal.tiers.append(GOAL.tiers[1])
            await stub.SetGoal(planner_pb2.SetGoalRequest(goal=goal))
            (status,) = (await stub.ListPlans(planner_pb2.ListPlansRequest())).plans
            assert not status.goal.HasField("judge_s")
            empty = WorkloadWindow(MODELS, 0.0, ())
            verdicts = []
            for router in ("cascade-0", "cascade-1"):
                report = planner_pb2.ReportWorkloadRequest(
                    cascade="both", lines=write_window(empty), judge="exact", router=router, window_s=300.0, offered=0
                )
                verdicts.append((await stub.ReportWorkload(report)).verdict)
            assert verdicts == [
                "taken down; waiting for the windows of cascade-1",
                "no requests came, so there is nothing to plan for",
            ]
            removal = planner_pb2.RemoveGoalRequest(cascade="both")
            assert (await stub.RemoveGoal(removal)).removed
            assert not (await stub.RemoveGoal(removal)).removed
