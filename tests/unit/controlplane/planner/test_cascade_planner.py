"""The planner: goals and workloads in, plans out, applied to the cascade."""

import asyncio
from concurrent.futures import BrokenExecutor
from typing import Any

import grpc
import msgspec
import pytest

import simulator.cascade.make_plan
from controlplane.model.cascade_goal import PLANS_PREFIX
from controlplane.planner.cascade.wire import goal_from, message_from
from controlplane.planner.role import PlannerRole
from controlplane.planner.settings import PlannerSettings
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier, decode_plan, encode_plan
from controlplane.planning.cascade.workload import (
    WorkloadWindow,
    read_workload,
    write_window,
)
from mesh.errors import ConfigurationError, DeadlineExceeded, PlanInfeasible
from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import planner_pb2, planner_pb2_grpc
from tests.unit.controlplane.local_mesh import local_mesh
from tests.unit.controlplane.planner.cascade_windows import GOAL, MODELS, RECORD, lines, plan_with, window
from tests.unit.controlplane.planner.manager_at_work import NOW_UNIX_S, desk_with
from tests.unit.simulator.cascade.short_runs import make_short_plan

pytestmark = pytest.mark.live


async def test_the_first_workload_is_planned_for_and_the_plan_applied() -> None:
    async with desk_with() as at:
        assert await at.report(window()) == "it is the first workload: planning"
        await at.planned()
        revision, plan_json = await at.manager.plan_of("both")
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
        assert await at.manager.remove_goal("both")
        assert not await at.manager.remove_goal("both")
        assert "no goal" in await at.report(window(rate_per_s=50.0))
        assert (await at.manager.plan_of("both"))[0] > 0
        (status,) = await at.manager.statuses()
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
        await at.manager.set_goal(msgspec.structs.replace(GOAL, quality=70.0, replan=False))
        await at.verdict(lambda verdict: "another goal was set" in verdict)
        assert "the goal was set after the plan in force: planning" in await at.report(window())
        await at.planned()
        assert at.maker.asked[-1][0].quality == 70.0
        assert await at.report(window()) == "the workload is as planned for"


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
        assert decode_plan((await at.manager.plan_of("both"))[1].encode()).judge == "model:b"


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
            await at.manager.set_goal(three)
        await at.store.put(three.key, msgspec.json.encode(three))
        await at.report(window())
        await at.verdict(lambda verdict: "the goal names 3 tiers, the cascade has 2" in verdict)
        assert at.plans("failed") == 1


@pytest.mark.parametrize(("judge", "seconds"), [("exact", 0.0), ("confidence", 0.0), ("model:b", 1.0)])
async def test_what_a_judgement_takes_depends_on_the_judge_unless_it_is_said(judge: str, seconds: float) -> None:
    unsaid = msgspec.structs.replace(GOAL, judge_s=None)
    async with desk_with(unsaid, msgspec.structs.replace(RECORD, judges=(judge,), label="exact")) as at:
        await at.report(window())
        await at.planned()
        assert at.maker.asked[0][0].judge_s == seconds
        with pytest.raises(ConfigurationError, match="--judge-s"):
            await at.manager.set_goal(msgspec.structs.replace(unsaid, cascade="unknown"))
        await at.manager.set_goal(msgspec.structs.replace(GOAL, cascade="unknown"))


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
            await at.manager.apply(plan)
        assert await at.record() == RECORD
        assert at.plans("refused", "both" if plan.name == "both" else "unknown") == 1


async def test_names_that_callers_make_up_are_no_labels() -> None:
    async with desk_with() as at:
        assert "there is no cascade made up" in await at.report(window(), cascade="made up")
        assert at.metric("workloads_total", cascade="unknown") == 1
        with pytest.raises(PlanInfeasible, match="no cascade plan"):
            await at.manager.apply_encoded(b"{}")
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


@pytest.mark.slow
async def test_a_real_plan_is_made_in_another_process_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only test that simulates: small models, few GPUs, short runs."""
    monkeypatch.setattr(simulator.cascade.make_plan, "make_plan", make_short_plan)
    async with local_mesh() as mesh:
        await mesh.store.put(RECORD.key, msgspec.json.encode(RECORD))
        planner = await mesh.start(PlannerRole(PlannerSettings()), "planner-0")
        async with open_channel(GrpcTransport(), planner.address) as channel:
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


@pytest.mark.process
async def test_the_planner_waits_for_the_routers_that_are_announced_and_a_goal_may_leave_the_judge_to_it() -> None:
    async with local_mesh() as mesh:
        await mesh.store.put(RECORD.key, msgspec.json.encode(RECORD))
        for router in ("cascade-0", "cascade-1"):
            await mesh.announce("cascade", router)
        planner = await mesh.start(PlannerRole(PlannerSettings()), "planner-0")
        async with asyncio.timeout(10):
            while len(mesh.directory.members("cascade")) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        async with open_channel(GrpcTransport(), planner.address) as channel:
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
