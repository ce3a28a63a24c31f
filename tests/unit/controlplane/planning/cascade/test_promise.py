"""A quality with a probability: bounds, calibration, and thresholds that hold on requests they were not chosen by."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from controlplane.planning.cascade.bilevel import PlanRequest, plan
from controlplane.planning.cascade.bounds import lower_bound, reaches, upper_bound
from controlplane.planning.cascade.calibration import calibrate, kept
from controlplane.planning.cascade.judging import judge_gpus
from controlplane.planning.cascade.plan import CascadePlan, cascade_plan, decode_plan, encode_plan
from controlplane.planning.cascade.promise import accepted_quality, divided, plan_as_asked, plan_with_promise
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.cascade.routing import route
from controlplane.planning.cascade.sample import CascadeSample
from mesh.errors import PlanInfeasible
from tests.unit.controlplane.planning.cascade.analytic_source import AnalyticSource

ONE_GPU = (ReplicaShape(1, 1),)


def labels(right: int, wrong: int) -> NDArray[np.float64]:
    return np.array([100.0] * right + [0.0] * wrong)


def confident(requests: int, seed: int) -> CascadeSample:
    """Models that are right 50 and 95 % of the time and nearly always sure, the surer the more often right."""
    rng = np.random.default_rng(seed)
    ease = rng.uniform(0, 1, requests)
    right = np.stack([rng.uniform(0, 1, requests) < ease, rng.uniform(0, 1, requests) < 0.9 + ease / 10], axis=1)
    return CascadeSample(
        scores=np.clip(85 + 15 * np.stack([ease, np.ones(requests)], axis=1), 0, 100),
        input_tokens=np.full(requests, 50),
        output_tokens=np.full((requests, 2), 100),
        rate_per_s=1.0,
        quality=100.0 * right,
    )


def source(sample: CascadeSample) -> AnalyticSource:
    return AnalyticSource(sample, (0.01, 0.1), (ONE_GPU, ONE_GPU))


REQUEST = PlanRequest(gpus=24, quality=80.0, minimise="end_to_end")


@given(st.integers(1, 40), st.data())
def test_the_bound_of_right_or_wrong_is_fishers_exact_one(samples: int, data: st.DataObject) -> None:
    right, needed = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    in_all = right + needed - 1
    ways = sum(
        comb(in_all, of_these) * comb(2 * samples - in_all, samples - of_these)
        for of_these in range(right, min(samples, in_all) + 1)
    )
    chance = ways / comb(2 * samples, samples)
    if abs(chance - 0.05) > 1e-9:
        assert reaches(labels(right, samples - right), 100 * needed / samples, 0.95) == (chance <= 0.05)


@pytest.mark.parametrize("samples", [30, 300])
def test_a_promise_of_right_or_wrong_is_broken_no_more_often_than_it_says(samples: int) -> None:
    rng = np.random.default_rng(samples)
    right = rng.binomial(samples, 0.8, (4000, 2))
    broken = [
        reaches(labels(seen, samples - seen), 78.0, 0.9) and came < 0.78 * samples for seen, came in right.tolist()
    ]
    assert np.mean(broken) < 0.1


def test_a_promise_of_grades_is_broken_no_more_often_than_it_says() -> None:
    rng = np.random.default_rng(5)
    grades = 100 * rng.beta(4, 0.7, (400, 2, 80))
    broken = [lower_bound(seen, 0.9) > came.mean() for seen, came in grades]
    assert np.mean(broken) < 0.1
    assert np.mean([lower_bound(seen, 0.9) for seen, _ in grades]) > grades.mean() - 12, "and promises something"


def test_bounds_lie_around_the_mean_and_close_in() -> None:
    few, many = labels(9, 1), labels(900, 100)
    assert lower_bound(few, 0.95) < lower_bound(many, 0.95) < 90 < upper_bound(many, 0.95) < upper_bound(few, 0.95)
    assert (lower_bound(np.array([]), 0.95), upper_bound(np.array([]), 0.95)) == (0.0, 100.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=40))
def test_calibration_is_the_closest_curve_that_does_not_fall(answers: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in answers], np.float64)
    quality = np.array([100.0 * right for _, right in answers])
    found = calibrate(scores, quality)
    assert (np.diff(found.p_right) >= -1e-12).all()
    assert found.samples == len(answers)
    at = found.at(scores)
    assert at.mean() == pytest.approx(quality.mean() / 100), "isotonic regression keeps the mean"
    seen = sorted(set(scores.tolist()))
    for score in seen:  # the closest curve is a maximum of minima of means
        means = [
            [quality[(scores >= low) & (scores <= high)].mean() / 100 for high in seen if high >= score]
            for low in seen
            if low <= score
        ]
        assert found.at(np.array([score]))[0] == pytest.approx(max(map(min, means)))
    curve = kept(found)
    assert [curve.at(score) for score in scores.tolist()] == pytest.approx(at.tolist())


def test_confidence_is_calibrated_to_how_often_it_is_right() -> None:
    sample = confident(4000, 1)
    found = calibrate(sample.scores[:, 0], sample.true_quality[:, 0])
    assert sample.scores[:, 0].mean() > 92
    assert found.at(np.array([86.5, 92.5, 98.5])) == pytest.approx([0.1, 0.5, 0.9], abs=0.1)


def test_what_is_promised_holds_on_other_requests_where_a_mean_does_not() -> None:
    others = confident(20_000, 99)
    missed = {"mean": 0, "promised": 0}
    for draw in range(20):
        sample = confident(400, draw)
        held, promise = plan_with_promise(sample, source(sample), REQUEST, 95.0, seed=draw)
        assert promise.lower >= promise.quality == 80.0
        assert promise.samples == 240
        just = plan(sample, source(sample), REQUEST)
        missed["promised"] += accepted_quality(others, held.thresholds).mean() < 80
        missed["mean"] += accepted_quality(others, just.thresholds).mean() < 80
        assert held.deployment.latency_s >= just.deployment.latency_s - 1e-9, "what is sure costs something"
    assert missed["promised"] <= 1
    assert missed["mean"] >= 5


def test_too_few_labels_are_refused_with_how_many_would_do() -> None:
    sample = confident(60, 2)
    with pytest.raises(PlanInfeasible, match=r"not held with 95 %.* about \d+ labelled samples like these would do"):
        plan_with_promise(sample, source(sample), REQUEST, 95.0)
    few = replace(sample, labelled=np.arange(60)[:, None].repeat(2, axis=1) < 12)
    with pytest.raises(PlanInfeasible, match="7 labelled requests are left to test it by"):
        plan_with_promise(few, source(few), REQUEST, 95.0)


def test_only_labelled_requests_test_and_none_that_chose() -> None:
    sample = confident(100, 4)
    some = replace(sample, labelled=np.arange(100)[:, None].repeat(2, axis=1) % 2 == 0)
    choosing, checking = divided(some, seed=7)
    assert sorted([*choosing, *checking]) == list(range(100))
    assert len(checking) == 30
    assert (checking % 2 == 0).all()


def test_a_plan_says_what_it_promises_and_survives_the_store() -> None:
    sample = confident(400, 5)
    result, promise = plan_as_asked(sample, source(sample), REQUEST, 95.0, "exact")
    made = cascade_plan(
        "both",
        ("small", "large"),
        result,
        rate_per_s=1.0,
        gpus=24,
        quality_target=80.0,
        promise=promise,
        calibrations=sample.calibrations(),
    )
    assert decode_plan(encode_plan(made)) == made
    assert made.promise is not None
    assert made.promise.label == "exact"
    assert plan_as_asked(sample, source(sample), REQUEST, 0.0)[1] is None


def test_the_judges_gpus_are_taken_out_of_the_plan() -> None:
    sample = confident(400, 6)

    def planned(judge_gpu_s: float) -> CascadePlan:
        request = replace(REQUEST, quality=75.0, gpus=16, judge_gpu_s=judge_gpu_s)
        result = plan(sample, source(sample), request)
        return cascade_plan("both", ("small", "large"), result, rate_per_s=1.0, gpus=16)

    free, paid = planned(0.0), planned(2.0)
    assert free.judge_gpus == 0
    assert paid.judge_gpus == 3, "one judgement a second of 2 s each, at 70 %"
    assert paid.judged_per_s == 1.0
    assert sum(tier.gpus for tier in paid.tiers) <= 13
    all_accepted = route(sample, (0.0,))
    assert judge_gpus(all_accepted, 1.0, 2.0) == 0, "what nobody judges costs nothing"
