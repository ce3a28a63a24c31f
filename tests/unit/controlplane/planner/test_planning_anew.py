"""One plan at a time, for what stands when it is applied; over restarts, by hand, and without some tiers."""

from dataclasses import replace

import msgspec
import pytest

from controlplane.model.cascade_goal import PLANS_PREFIX
from controlplane.planning.cascade.plan import PlannedReplicas, PlannedTier, decode_plan
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import (
    WorkloadWindow,
    read_window,
    read_workload,
    write_window,
)
from tests.unit.controlplane.planner import manager_at_work
from tests.unit.controlplane.planner.cascade_windows import GOAL, MODELS, RECORD, lines, plan_with, window
from tests.unit.controlplane.planner.manager_at_work import desk_with

pytestmark = pytest.mark.live


@pytest.mark.process
async def test_one_plan_is_made_however_many_workloads_come_meanwhile() -> None:
    async with desk_with() as at:
        at.maker.may_end.clear()
        verdicts = [await at.report(window(seed=seed)) for seed in range(4)]
        assert ["a plan is being made" in verdict for verdict in verdicts] == [False, True, True, True]
        at.maker.may_end.set()
        await at.planned()
        assert (len(at.maker.asked), at.plans("applied"), len(at.tasks)) == (1, 1, 0)
        (status,) = await at.manager.statuses()
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
        await at.manager.set_goal(msgspec.structs.replace(GOAL, cascade="other"))
        at.maker.may_end.clear()
        await at.report(window())
        await at.report(window(), cascade="other")
        await at.until(lambda: bool(at.maker.asked))
        await at.manager.remove_goal("other")
        at.maker.may_end.set()
        await at.until(lambda: not len(at.tasks))
        assert [goal.cascade for goal, _ in at.maker.asked] == ["both"]


@pytest.mark.parametrize("change", ["goal", "plan", "judge", "thresholds", "cascade"])
async def test_a_plan_begun_for_what_has_changed_since_is_not_applied(change: str) -> None:
    async with desk_with() as at:
        at.maker.may_end.clear()
        await at.report(window())
        await at.until(lambda: bool(at.maker.asked))
        if change == "goal":
            await at.manager.set_goal(msgspec.structs.replace(GOAL, quality=99.0))
        elif change == "plan":
            await at.manager.apply(plan_with(33.0))
        elif change == "judge":
            await at.store.put(RECORD.key, msgspec.json.encode(msgspec.structs.replace(RECORD, judges=("model:x",))))
        elif change == "thresholds":
            await at.store.put(RECORD.key, msgspec.json.encode(msgspec.structs.replace(RECORD, thresholds=(12.0,))))
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


async def test_after_a_plan_that_was_outdated_the_next_workload_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_at_work, "DRIFT", replace(manager_at_work.DRIFT, pause_windows=1))
    async with desk_with() as at:
        await at.report(window())
        await at.planned()
        faster = window(rate_per_s=9.0)
        assert "compared later" in await at.report(faster)
        at.maker.may_end.clear()
        assert "from 2 to 9: planning" in await at.report(faster)
        await at.until(lambda: len(at.maker.asked) == 2)
        by_hand = msgspec.structs.replace(await at.record(), thresholds=(12.0,), plan_revision=0)
        await at.store.put(RECORD.key, msgspec.json.encode(by_hand))
        at.maker.may_end.set()
        await at.verdict(lambda verdict: "looked at anew" in verdict)
        assert "from 2 to 9: planning" in await at.report(faster)


async def test_a_planner_that_starts_again_keeps_the_plan_and_goes_on_watching() -> None:
    async with desk_with(msgspec.structs.replace(GOAL, replan=False)) as at:
        await at.report(window())
        await at.planned()
        again = at.restarted()
        assert await again.report(window(seed=2)) == "the workload is as planned for"
        assert "switched off" in await again.report(window(score=20.0))
        await again.manager.set_goal(GOAL)
        await again.report(window())
        await again.planned()
        once_more = again.restarted()
        assert "mean score went from 50 to 20: planning" in await once_more.report(window(score=20.0))
        await once_more.planned()
        assert len(at.maker.asked) == 3


@pytest.mark.parametrize("replan", [False, True])
async def test_a_plan_applied_by_hand_counts_and_is_compared_by_its_rate(replan: bool) -> None:
    async with desk_with(msgspec.structs.replace(GOAL, replan=replan)) as at:
        await at.manager.apply(plan_with(33.0))
        assert await at.report(window()) == "the workload is as planned for"
        verdict = await at.report(window(rate_per_s=20.0))
        assert verdict.startswith("the request rate went from 2 to 20")
        assert ("switched off" in verdict) != replan


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
        await at.manager.apply(plan_with(0.0, tiers=ONLY_SMALL))
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
        await at.manager.apply(plan_with(0.0, tiers=ONLY_SMALL))
        faster = window(rate_per_s=9.0)
        await at.report(faster, lines=without_large(faster))
        assert "large has no GPUs and was never seen, so it is left out" in await at.planned()
        goal, workload = at.maker.asked[-1]
        assert (goal.tiers, read_workload(workload)[0]) == (GOAL.tiers[:1], ("small",))
        plan = decode_plan((await at.manager.plan_of("both"))[1].encode())
        assert [(tier.model, tier.gpus, tier.share) for tier in plan.tiers] == [("small", 1, 1.0), ("large", 0, 0.0)]
        assert (plan.thresholds, plan.workload and plan.workload.scores[1]) == ((0.0,), None)
        assert "as planned" in await at.report(faster, lines=without_large(faster))
