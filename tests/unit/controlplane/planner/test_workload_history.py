"""What is made of the windows of a workload, one after the other."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from controlplane.planner.cascade.history import WorkloadHistory
from controlplane.planner.cascade.plan_case import SeenBefore, plan_case
from controlplane.planning.cascade.drift import DriftSettings
from controlplane.planning.cascade.observed import ObservedWindow
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import WorkloadRequest, read_workload
from mesh.errors import PlanInfeasible
from tests.unit.controlplane.planner.cascade_windows import MODELS, observed, plan_with, window

SETTINGS = DriftSettings(windows=2, pause_windows=0, min_requests=10)
FIRST = "it is the first workload"


def history_with(plan: CascadePlan | None = None, settings: DriftSettings = SETTINGS) -> WorkloadHistory:
    history = WorkloadHistory(MODELS, "exact", settings)
    history.follow(plan, "" if plan else FIRST)
    return history


def planned(history: WorkloadHistory, threshold: float = 50.0, **changes: Any) -> CascadePlan:
    """A plan for what it has seen is in force."""
    plan = plan_with(threshold, judge="exact", workload=history.case().summary(threshold), **changes)
    history.planned(plan)
    return plan


def counted(offered: int, sampled: int) -> ObservedWindow:
    """Of 100 s."""
    requests = observed(window(requests=sampled)).requests if sampled else ()
    return ObservedWindow(offered / 100.0, 100.0, requests)


def without(tier: int, seen: ObservedWindow) -> ObservedWindow:
    """No instance of the tier was there."""

    def gone(request: WorkloadRequest) -> WorkloadRequest:
        tokens, scores = list(request.output_tokens), list(request.scores)
        tokens[tier] = scores[tier] = None
        return msgspec.structs.replace(request, output_tokens=tuple(tokens), scores=tuple(scores))

    return replace(seen, requests=tuple(map(gone, seen.requests)))


def test_a_plan_is_made_for_the_windows_that_have_moved() -> None:
    history = history_with()
    assert history.seen(observed(window(requests=5))).why == ""
    assert history.seen(observed(window())).why == FIRST
    planned(history)
    for rate in (9.0, 10.0):
        finding = history.seen(observed(window(rate_per_s=rate, requests=20)))
    assert "rate" in finding.why
    _, merged = read_workload(history.case().lines())
    assert (merged.requests, merged.rate_per_s) == (40, 10.0)


def test_a_window_that_moved_once_is_told_of() -> None:
    history = history_with()
    history.seen(observed(window()))
    planned(history)
    assert history.seen(observed(window(rate_per_s=9.0))).says == (
        "the request rate went from 2 to 9, in 1 of 2 windows that it takes to plan anew"
    )
    assert history.seen(observed(window())).says == "the workload is as planned for"


def test_small_windows_neither_push_out_large_ones_nor_are_planned_for() -> None:
    history = history_with(settings=replace(SETTINGS, windows=1))
    history.seen(counted(800, 40))
    planned(history)
    for _ in range(5):
        assert history.seen(counted(790, 3)).why == ""
    finding = history.seen(counted(3, 3))
    assert finding.why == "the request rate went from 8 to 0.03"
    case = history.case()
    assert (len(case.window.requests), case.window.rate_per_s) == (40, 0.03)
    summary = case.summary(50.0)
    assert (summary.requests, summary.rate_per_s) == (40, 0.03)
    planned(history)
    assert history.seen(counted(3, 3)).why == ""


def test_windows_without_requests_keep_the_plan_and_say_so() -> None:
    history = history_with()
    assert history.seen(counted(0, 0)).says == "no requests came, so there is nothing to plan for"
    history.seen(counted(800, 40))
    planned(history)
    assert "in 1 of 2 windows" in history.seen(counted(0, 0)).says
    assert history.seen(counted(0, 0)).says == "no requests come any more: the plan for 8 a second is kept"
    assert history.seen(counted(800, 40)).says == "the workload is as planned for"


def test_a_plan_that_does_not_say_what_it_is_for_is_for_its_rate_and_the_first_lengths_and_scores() -> None:
    history = history_with(plan_with(50.0, rate_per_s=8.0), replace(SETTINGS, windows=1))
    assert "the rate is as planned for; too few requests" in history.seen(counted(790, 3)).says
    assert history.seen(counted(790, 40)).says == "the workload is as planned for"
    harder = replace(observed(window(rate_per_s=8.0, score=20.0)), seconds=100.0)
    assert "mean score went from 50 to 20" in history.seen(harder).why
    later = history_with(plan_with(50.0, rate_per_s=8.0), replace(SETTINGS, windows=1))
    finding = later.seen(counted(30, 3))
    assert finding.why == "", "there is nothing to plan with"
    assert "from 8 to 0.3, but there are too few requests to plan for (3 of 10; 30 came)" in finding.says


def test_a_plan_counts_on_after_a_restart_as_it_did_before() -> None:
    history = history_with()
    history.seen(counted(800, 40))
    plan = planned(history)
    restarted = history_with(msgspec.json.decode(msgspec.json.encode(plan), type=CascadePlan))
    for each in (history, restarted):
        assert each.seen(counted(800, 40)).says == "the workload is as planned for"
        each.follow(plan, "")
        assert "1 of 2" in each.seen(counted(200, 40)).says
        each.follow(plan, "")
        assert each.seen(counted(200, 40)).why, "being told of the same plan again changes nothing"


def test_a_new_plan_is_left_alone_for_a_while_but_one_from_before_the_start_is_not() -> None:
    history = history_with(settings=replace(SETTINGS, pause_windows=1))
    history.seen(counted(800, 40))
    plan = planned(history)
    restarted = history_with(plan, replace(SETTINGS, pause_windows=1))
    assert "watched, and compared later" in history.seen(counted(200, 40)).says
    assert "in 1 of 2 windows" in restarted.seen(counted(200, 40)).says


def test_a_tier_without_instances_is_stood_in_for_by_what_it_answered_before() -> None:
    history = history_with(settings=replace(SETTINGS, windows=1))
    history.seen(observed(window()))
    tiers = (PlannedTier("small", 2, (PlannedReplicas(2),), 1.0, 1.0), PlannedTier("large", 0, (), 0.0, 0.0))
    planned(history, 0.0, tiers=tiers)
    for _ in range(2):
        assert history.seen(without(1, observed(window(seed=3)))).says == "the workload is as planned for"
    assert "mean score" in history.seen(without(1, observed(window(score=20.0, seed=4)))).why
    case = history.case()
    assert case.planned == (0, 1)
    assert case.notes == ("large has not answered 40 of 40 samples: its answers of 3 windows ago stand in",)
    assert {request.scores[1] for request in case.window.requests} <= {
        request.scores[1] for request in observed(window()).requests
    }
    models, sample = read_workload(case.lines())
    assert (models, sample.tiers, sample.scores[:, 0].mean() < 30) == (MODELS, 2, True)


def test_a_few_missing_answers_are_taken_from_the_same_window() -> None:
    history = history_with()
    whole = observed(window())
    some = replace(whole, requests=(*without(0, whole).requests[:5], *whole.requests[5:]))
    history.seen(some)
    case = history.case()
    assert case.notes == ("small has not answered 5 of 40 samples: its answers to the most alike ones stand in",)
    assert all(request.is_complete for request in case.window.requests)


def test_a_tier_never_seen_is_left_out_if_the_plan_gives_it_no_gpus_and_waited_for_otherwise() -> None:
    tiers = (PlannedTier("small", 2, (PlannedReplicas(2),), 1.0, 1.0), PlannedTier("large", 0, (), 0.0, 0.0))
    drained = history_with(plan_with(0.0, tiers=tiers), replace(SETTINGS, windows=1))
    assert drained.seen(without(1, observed(window(rate_per_s=9.0)))).why
    case = drained.case()
    assert (case.planned, case.notes) == ((0,), ("large has no GPUs and was never seen, so it is left out",))
    assert read_workload(case.lines())[0] == ("small",)
    for plan in (None, plan_with(50.0)):
        history = history_with(plan, replace(SETTINGS, windows=1))
        assert history.seen(without(1, observed(window(rate_per_s=9.0)))).why
        with pytest.raises(PlanInfeasible, match="large has answered too few samples"):
            history.case()


def falling(early: float, requests: int = 40) -> CascadeSample:
    """Half of the answers fall to 20 at this part of their length; the mean answer and the mean score are the same."""
    usual = window(requests=requests)
    usual.scores[::2, 0] = 20.0
    tokens = usual.output_tokens.tolist()
    return replace(
        usual,
        score_bounds=tuple(
            (
                ((max(1, round(early * of_small)), 20.0) if row % 2 == 0 else (of_small, float(usual.scores[row, 0])),),
                (),
            )
            for row, (of_small, _) in enumerate(tokens)
        ),
    )


def test_a_tier_that_writes_more_of_its_answers_than_planned_for_has_another_load() -> None:
    for threshold, moved in ((40.0, "what is written of an answer went from"), (10.0, "")):
        history = history_with(settings=replace(SETTINGS, windows=1))
        assert history.seen(observed(falling(0.1))).why == FIRST
        planned(history, threshold)
        assert history.seen(observed(falling(0.1))).why == ""
        why = history.seen(observed(falling(0.9))).why
        assert why.startswith(moved), "at a threshold that none is given up for nothing has moved"
        assert bool(why) == bool(moved)


def test_windows_keep_their_score_bounds_if_all_have_them() -> None:
    for second, kept in ((falling(0.5, 10), True), (window(requests=10), False)):
        history = history_with()
        for each in (falling(0.1), second):
            history.seen(observed(each))
        case = history.case()
        assert len(case.window.requests) == 50
        assert all(request.score_bounds is not None for request in case.window.requests) == kept
        _, merged = read_workload(case.lines())
        assert (merged.score_bounds is not None) == kept
        if merged.score_bounds is not None and second.score_bounds is not None:
            assert merged.score_bounds[40:] == second.score_bounds


def test_answers_that_stand_in_without_their_score_bounds_leave_the_window_readable() -> None:
    whole, before = observed(falling(0.1)), observed(window(requests=10))
    lacking = msgspec.structs.replace(
        whole.requests[0], output_tokens=(20, None), scores=(20.0, None), score_bounds=(((2, 20.0),), None)
    )
    seen = replace(whole, requests=(lacking, *whole.requests[1:]))
    tiers = [SeenBefore("small", seen.requests, 0, False), SeenBefore("large", before.requests, 1, False)]
    assert read_workload(plan_case(seen, tiers).lines())[1].score_bounds is None
