"""What is asked of a plan, what comes of it, and plans that are refused."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from controlplane.planning.cascade.bilevel import PlanRequest, plan
from controlplane.planning.cascade.objective import MaximiseQuality, MinimiseLatency
from controlplane.planning.cascade.plan import CascadePlan, cascade_plan, decode_plan, encode_plan
from controlplane.planning.cascade.replica import ReplicaCurve, ReplicaShape
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.search import Point, pareto_front
from mesh.errors import ConfigurationError, PlanInfeasible
from tests.unit.controlplane.planning.cascade.analytic_source import AnalyticSource, random_sample

SHAPES = [(ReplicaShape(1), ReplicaShape(2)), (ReplicaShape(1), ReplicaShape(2)), (ReplicaShape(4), ReplicaShape(8))]
SAMPLE = random_sample(5, 200, 3, rate_per_s=4.0, levels=20)
TOKEN_S = [0.001, 0.006, 0.03]


LIGHT = replace(
    SAMPLE,
    rate_per_s=0.05,
    input_tokens=np.full(SAMPLE.requests, 100),
    output_tokens=np.full(SAMPLE.scores.shape, 200),
)
"""Requests that hardly meet and are all alike: a tier is no slower for more of them."""


def made(request: PlanRequest, sample: CascadeSample = SAMPLE) -> CascadePlan:
    planned = plan(sample, AnalyticSource(sample, TOKEN_S, SHAPES), request)
    return cascade_plan(
        "cascade",
        ("small", "medium", "large"),
        planned,
        rate_per_s=sample.rate_per_s,
        gpus=request.gpus,
        quality_target=request.quality,
        latency_target_s=request.latency_s,
    )


@pytest.mark.slow
def test_a_better_answer_takes_longer_and_more_gpus_answer_sooner() -> None:
    by_quality = [made(PlanRequest(gpus=32, quality=quality)) for quality in (45, 60, 70, 80)]
    assert [each.quality >= target for each, target in zip(by_quality, (45, 60, 70, 80), strict=True)] == [True] * 4
    latencies = [each.latency_p95_s for each in by_quality]
    assert latencies == sorted(latencies)
    by_gpus = [made(PlanRequest(gpus=gpus, quality=75)).latency_p95_s for gpus in (28, 32, 64)]
    assert by_gpus == sorted(by_gpus, reverse=True)


@pytest.mark.slow
def test_a_tier_that_nothing_reaches_gets_no_gpu() -> None:
    easy = made(PlanRequest(gpus=32, quality=10))
    assert [tier.share for tier in easy.tiers[1:]] == [0.0, 0.0]
    assert [tier.gpus for tier in easy.tiers[1:]] == [0, 0]
    assert easy.tiers[0].replica_count >= 1


@pytest.mark.slow
def test_a_latency_budget_buys_the_best_quality_within_it() -> None:
    tight, wide = (made(PlanRequest(gpus=32, latency_s=seconds)) for seconds in (1.0, 8.0))
    assert tight.latency_p95_s <= 1.0
    assert wide.latency_p95_s <= 8.0
    assert wide.quality > tight.quality


@pytest.mark.slow
def test_the_judges_time_is_part_of_the_latency_of_every_tier_that_is_judged() -> None:
    without, judged = (made(PlanRequest(gpus=32, quality=75, judge_s=seconds)) for seconds in (0.0, 50.0))
    assert judged.latency_p95_s > without.latency_p95_s
    assert min(tier.p95_s for tier in judged.tiers[:-1] if tier.share) >= 50.0


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (PlanRequest(gpus=32, quality=99.9), "lower the target"),
        (PlanRequest(gpus=1, quality=60), "GPUs"),
        (PlanRequest(gpus=32, latency_s=0.01), "raise the budget"),
    ],
)
def test_what_cannot_be_reached_is_refused_with_what_could(request_: PlanRequest, words: str) -> None:
    with pytest.raises(PlanInfeasible, match=words):
        made(request_)


@pytest.mark.slow
@pytest.mark.parametrize("target", [55.0, 65.0, 75.0])
def test_at_light_load_a_plan_from_end_to_end_wastes_no_time_on_quality_that_nobody_asked_for(target: float) -> None:
    """A plan for the slowest tier escalates for free there, and so it does."""
    slowest, end_to_end = (
        made(PlanRequest(gpus=32, quality=target, judge_s=0.2, minimise=minimise), LIGHT)
        for minimise in ("slowest_tier", "end_to_end")
    )
    assert end_to_end.latency_mean_s is not None
    assert slowest.latency_mean_s is not None
    assert min(end_to_end.quality, slowest.quality) >= target
    assert end_to_end.latency_mean_s < 0.9 * slowest.latency_mean_s
    assert slowest.latency_p95_s <= end_to_end.latency_p95_s * 1.001


@pytest.mark.slow
def test_from_end_to_end_a_request_waits_for_every_tier_that_it_passes_and_for_their_judges() -> None:
    end_to_end = made(PlanRequest(gpus=32, quality=75, judge_s=0.5, minimise="end_to_end"))
    total_s = sum(tier.share * (tier.mean_s or 0.0) for tier in end_to_end.tiers)
    assert end_to_end.latency_s == end_to_end.latency_mean_s == pytest.approx(total_s)
    assert all(0.5 < (tier.mean_s or 0.0) < tier.p95_s for tier in end_to_end.tiers[:-1] if tier.share)
    assert end_to_end.latency_p95_s == max(tier.p95_s for tier in end_to_end.tiers)
    without = made(PlanRequest(gpus=32, quality=75, judge_s=0.0, minimise="end_to_end"))
    assert without.latency_s < end_to_end.latency_s - 0.45


@pytest.mark.slow
def test_a_budget_is_of_the_latency_that_is_minimised() -> None:
    tight, wide = (made(PlanRequest(gpus=32, latency_s=seconds, minimise="end_to_end")) for seconds in (0.5, 2.0))
    assert tight.latency_mean_s is not None
    assert tight.latency_mean_s <= 0.5 < tight.latency_p95_s
    assert wide.latency_s <= 2.0
    assert wide.quality > tight.quality
    with pytest.raises(PlanInfeasible, match="mean from end to end"):
        made(PlanRequest(gpus=32, latency_s=0.01, minimise="end_to_end"))


def test_from_end_to_end_a_tier_that_nothing_reaches_gets_no_gpu_either() -> None:
    easy = made(PlanRequest(gpus=32, quality=10, minimise="end_to_end"))
    assert [(tier.share, tier.gpus, tier.mean_s) for tier in easy.tiers[1:]] == [(0.0, 0, 0.0)] * 2


def test_plans_from_before_means_were_measured_are_still_read() -> None:
    whole = made(PlanRequest(gpus=32, quality=75))
    old = msgspec.to_builtins(whole)
    del old["minimise"], old["latency_mean_s"]
    for tier in old["tiers"]:
        del tier["mean_s"]
    read = decode_plan(msgspec.json.encode(old))
    assert (read.minimise, read.latency_s, read.latency_mean_s) == ("slowest_tier", whole.latency_p95_s, None)
    assert [tier.p95_s for tier in read.tiers] == [tier.p95_s for tier in whole.tiers]


def test_a_plan_is_asked_for_by_quality_or_by_latency() -> None:
    for wrong in ({}, {"quality": 80.0, "latency_s": 1.0}):
        with pytest.raises(ConfigurationError, match="either"):
            PlanRequest(gpus=4, **wrong)


def test_plans_survive_the_store() -> None:
    whole = made(PlanRequest(gpus=32, quality=75))
    assert decode_plan(encode_plan(whole)) == whole


def test_a_plan_of_a_later_release_is_read_without_what_is_not_known() -> None:
    whole = made(PlanRequest(gpus=32, quality=75))
    later = msgspec.to_builtins(whole) | {"colour": "blue"}
    later["tiers"][0]["colour"] = "red"
    assert decode_plan(msgspec.json.encode(later)) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"thresholds": (50.0,)}, "thresholds"),
        ({"gpus": 1}, "more than its 1 GPUs"),
        ({"format": 9}, "format"),
        ({"tiers": ()}, "no tier"),
        ({"minimise": "end_to_end", "latency_mean_s": None}, "does not say what it is"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(change: dict[str, object], words: str) -> None:
    whole = made(PlanRequest(gpus=32, quality=75))
    with pytest.raises(PlanInfeasible, match=words):
        decode_plan(encode_plan(msgspec.structs.replace(whole, **change)))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"name": 3}'])
def test_what_is_no_plan_is_refused(content: bytes) -> None:
    with pytest.raises(PlanInfeasible, match="no cascade plan"):
        decode_plan(content)


def test_the_papers_example_of_the_score() -> None:
    """Section 3.3: utopia 0.95, nadir 0.75, target 0.90, mu 100; here in hundredths."""
    objective = MinimiseLatency(90.0, utopia=95.0, nadir=75.0, penalty=100.0)
    assert objective.score(11.0, 88.0) == pytest.approx(21.0)
    assert objective.score(11.4, 91.0) == pytest.approx(11.4)
    assert objective.score(12.2, 93.0) == pytest.approx(12.2)


def test_the_score_under_a_latency_budget() -> None:
    objective = MaximiseQuality(10.0, best_s=2.0, worst_s=22.0, penalty=100.0)
    assert objective.score(9.0, 80.0) == -80.0
    assert objective.score(12.0, 90.0) == pytest.approx(100.0 * 0.1 - 90.0)


def test_the_front_keeps_what_nothing_beats() -> None:
    points = [Point((1.0,), 1.0, 50.0), Point((2.0,), 2.0, 40.0), Point((3.0,), 3.0, 70.0), Point((4.0,), 3.0, 60.0)]
    assert [point.thresholds for point in pareto_front([*points, Point((5.0,), float("inf"), 100.0)])] == [
        (1.0,),
        (3.0,),
    ]


def test_a_replica_sustains_what_its_curve_says() -> None:
    p95_s = np.array([1.0, 1.0, 3.0])
    curve = ReplicaCurve(ReplicaShape(1), np.array([1.0, 2.0, 4.0]), p95_s, p95_s / 2, 4.4)
    within_s = np.array([0.5, 1.0, 2.0, 3.0, 9.0])
    assert curve.sustained_rate_per_s(within_s, "p95").tolist() == [0.0, 2.0, 3.0, 4.0, 4.0]
    assert curve.sustained_rate_per_s(within_s / 2, "mean").tolist() == [0.0, 2.0, 3.0, 4.0, 4.0]
