"""Tables, allocation and plan against enumeration of everything."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.cascade_goal import Minimise
from controlplane.planning.cascade.allocation import allocate, lowest_latency_s
from controlplane.planning.cascade.bilevel import PlanRequest, plan
from controlplane.planning.cascade.latency import STATISTIC, total_latency_s
from controlplane.planning.cascade.objective import MinimiseLatency
from controlplane.planning.cascade.parallelism import capacity
from controlplane.planning.cascade.replica import ReplicaCurve, ReplicaShape, Statistic
from controlplane.planning.cascade.routing import ESCALATE_ALL, candidate_thresholds, proportional_thresholds, route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.search import RoutingSearch
from controlplane.planning.cascade.tables import latencies_of, tier_tables
from mesh.errors import PlanInfeasible
from tests.examples import examples
from tests.unit.controlplane.planning.cascade.analytic_source import AnalyticSource, random_sample, with_score_bounds

ONE, TWO, FOUR = ReplicaShape(1), ReplicaShape(2), ReplicaShape(2, 2)


def all_mixes(shapes: Sequence[ReplicaShape], gpus: int) -> Iterator[tuple[int, ...]]:
    for counts in product(*(range(gpus // shape.gpus + 1) for shape in shapes)):
        if sum(count * shape.gpus for count, shape in zip(counts, shapes, strict=True)) <= gpus:
            yield counts


def enumerated_latency_s(
    curves: Sequence[ReplicaCurve], gpus: int, rate_per_s: float, statistic: Statistic = "p95"
) -> float:
    """l(f) over every mix, on the levels that the tables tell apart."""
    levels_s = capacity(curves, gpus, statistic).levels_s
    sustained = np.array([curve.sustained_rate_per_s(levels_s, statistic) for curve in curves])
    best = float("inf")
    for counts in all_mixes([curve.shape for curve in curves], gpus):
        holds = np.asarray(counts) @ sustained >= rate_per_s
        if holds.any():
            best = min(best, float(levels_s[holds.argmax()]))
    return best


@given(
    seed=st.integers(0, 1000),
    rate=st.floats(0.05, 20),
    gpus=st.integers(1, 9),
    statistic=st.sampled_from(["p95", "mean"]),
)
@settings(max_examples=examples(90), deadline=None)
def test_the_tables_hold_the_best_of_all_mixes(seed: int, rate: float, gpus: int, statistic: Statistic) -> None:
    sample = random_sample(seed, 20, 1)
    source = AnalyticSource(sample, [0.01], [(ONE, TWO, FOUR)])
    curves = source.curves(0, np.arange(20), sample.output_tokens[:, 0])
    table = capacity(curves, 9, statistic)
    latency_s = float(table.latencies_s(rate)[gpus])
    expected_s = enumerated_latency_s(curves, gpus, rate, statistic)
    # Levels are the same for any number of GPUs, so the two agree to the last bit.
    assert latency_s == expected_s
    mix = table.mix(gpus, rate)
    if np.isinf(latency_s):
        assert mix == ()
        return
    assert sum(shape.gpus * count for shape, count in mix) <= gpus
    at = np.array([latency_s])
    by_shape = {curve.shape: curve for curve in curves}
    held = sum(count * by_shape[shape].sustained_rate_per_s(at, statistic)[0] for shape, count in mix)
    assert held >= rate * (1 - 1e-9)
    assert table.latency_of_s(mix, rate) == latency_s
    assert table.latency_of_s(mix, 1e9) == float("inf")


@given(
    tables=st.lists(
        st.lists(st.one_of(st.floats(0.1, 100), st.just(float("inf"))), min_size=7, max_size=7), min_size=1, max_size=3
    ),
    gpus=st.integers(1, 6),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_integer_program_and_the_bisection_find_the_enumerated_optimum(
    tables: list[list[float]], gpus: int
) -> None:
    tables_s = [np.minimum.accumulate(np.array(table)) for table in tables]
    expected = min(
        (
            max(float(table[f]) for table, f in zip(tables_s, split, strict=True))
            for split in product(range(gpus + 1), repeat=len(tables_s))
            if sum(split) <= gpus
        ),
    )
    shares = [1.0] * len(tables_s)
    assert lowest_latency_s(tables_s, shares, gpus) == expected
    if np.isinf(expected):
        with pytest.raises(PlanInfeasible, match="GPUs"):
            allocate(tables_s, shares, gpus)
        return
    split = allocate(tables_s, shares, gpus)
    assert sum(split) <= gpus
    assert max(table[f] for table, f in zip(tables_s, split, strict=True)) == pytest.approx(expected)


@given(
    tables=st.lists(
        st.tuples(
            st.lists(st.one_of(st.floats(0.1, 100), st.just(float("inf"))), min_size=7, max_size=7),
            st.floats(0.01, 1.0),
        ),
        min_size=1,
        max_size=3,
    ),
    gpus=st.integers(1, 6),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_integer_program_and_the_search_find_the_enumerated_least_sum(
    tables: list[tuple[list[float], float]], gpus: int
) -> None:
    tables_s = [np.minimum.accumulate(np.array(table)) for table, _ in tables]
    shares = [share for _, share in tables]
    sums = {
        split: total_latency_s([table[f] for table, f in zip(tables_s, split, strict=True)], shares, "end_to_end")
        for split in product(range(gpus + 1), repeat=len(tables_s))
        if sum(split) <= gpus
    }
    expected = min(sums.values())
    assert lowest_latency_s(tables_s, shares, gpus, "end_to_end") == pytest.approx(expected, rel=1e-12)
    if np.isinf(expected):
        with pytest.raises(PlanInfeasible, match="GPUs"):
            allocate(tables_s, shares, gpus, "end_to_end")
        return
    split = allocate(tables_s, shares, gpus, "end_to_end")
    assert sums[split] == pytest.approx(expected, rel=2e-6)
    fewest = min(sum(other) for other, total in sums.items() if total <= expected * (1 + 1e-12))
    assert sum(split) <= fewest, "GPUs that would not help stay free"


def test_a_tier_that_no_request_reaches_costs_nothing_end_to_end() -> None:
    reached, idle = np.array([np.inf, 4.0, 3.0]), np.zeros(3)
    assert allocate([reached, idle], [1.0, 0.0], 2, "end_to_end") == (2, 0)
    assert lowest_latency_s([reached, idle], [1.0, 0.0], 2, "end_to_end") == 3.0


def enumerated_score(sample: CascadeSample, source: AnalyticSource, request: PlanRequest) -> float:
    """J of the best of all thresholds, allocations and mixes."""
    assert request.quality is not None
    objective = fastest_within(sample, request.quality)
    gpus, statistic = request.gpus, STATISTIC[request.minimise]
    best = float("inf")
    for thresholds in product(*candidate_thresholds(sample, 100)):
        routed = route(sample, thresholds)
        per_tier = []
        for tier in range(sample.tiers):
            reached = np.flatnonzero(routed.reached[:, tier])
            if not len(reached):
                per_tier.append([0.0] * (gpus + 1))
                continue
            rate = sample.rate_per_s * len(reached) / sample.requests
            curves = source.curves(tier, reached, routed.output_tokens[reached, tier])
            judged = (
                (routed.output_tokens == sample.output_tokens)[reached, tier].mean() if statistic == "mean" else 1.0
            )
            judge_s = request.judge_s * judged if routed.is_judged[tier] else 0.0
            per_tier.append([enumerated_latency_s(curves, f, rate, statistic) + judge_s for f in range(gpus + 1)])
        latency_s = min(
            total_latency_s([per_tier[tier][f] for tier, f in enumerate(split)], routed.shares, request.minimise)
            for split in product(range(gpus + 1), repeat=sample.tiers)
            if sum(split) <= gpus
        )
        best = min(best, objective.score(latency_s, routed.quality))
    return best


def fastest_within(sample: CascadeSample, quality: float) -> MinimiseLatency:
    ends = (0.0,) * (sample.tiers - 1), (ESCALATE_ALL,) * (sample.tiers - 1)
    return MinimiseLatency(quality, utopia=route(sample, ends[1]).quality, nadir=route(sample, ends[0]).quality)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("minimise", ["slowest_tier", "end_to_end"])
@pytest.mark.parametrize("gives_up", [False, True])
def test_the_plan_is_the_enumerated_optimum(seed: int, tiers: int, minimise: Minimise, gives_up: bool) -> None:
    sample = random_sample(seed, 24, tiers, rate_per_s=1.5, levels=3)
    if gives_up:
        sample = with_score_bounds(sample, seed)
    source = AnalyticSource(sample, [0.001, 0.004, 0.01][:tiers], [(ONE, TWO), (ONE, TWO), (TWO,)][:tiers])
    request = PlanRequest(gpus=5, quality=65.0, judge_s=0.05 * (seed % 3), minimise=minimise)
    expected = enumerated_score(sample, source, request)
    planned = plan(sample, source, request)
    objective = fastest_within(sample, 65.0)
    assert objective.score(planned.deployment.latency_s, planned.routed.quality) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gives_up", [False, True])
def test_thresholds_that_must_move_together_are_found_among_scores_that_all_differ(seed: int, gives_up: bool) -> None:
    """Of a latency from end to end: one threshold at a time ends some percent above the best."""
    rng = np.random.default_rng(seed)
    hard = 0.8 * rng.normal(0, 1, (60, 1))
    right = rng.normal((0.0, 0.9, 1.8), 1, (60, 3)) > hard
    scores = np.clip(60 + 25 * right + rng.normal(0, 12, (60, 3)), 0, 100)
    inputs, outputs = rng.integers(10, 2000, 60), rng.integers(10, 500, (60, 3))
    sample = CascadeSample(scores, inputs, outputs, 4.0, 100.0 * right)
    if gives_up:
        sample = with_score_bounds(sample, seed)
    source = AnalyticSource(sample, [0.001, 0.006, 0.03], [(ONE, TWO), (ONE, TWO), (FOUR,)])
    smallest, _, largest = sample.true_quality.mean(axis=0)
    quality = smallest + 0.7 * (largest - smallest)
    first = proportional_thresholds(sample)
    tables = tier_tables(sample, route(sample, first), source, 24, 0.1, "mean")
    found = RoutingSearch(sample, tables, 24, fastest_within(sample, quality), "end_to_end").run(first)
    every = (route(sample, thresholds) for thresholds in product(*candidate_thresholds(sample, 100)))
    least_s = min(
        lowest_latency_s(latencies_of(sample, routed, tables), routed.shares, 24, "end_to_end")
        for routed in every
        if routed.quality >= quality
    )
    assert found.best.quality >= quality
    assert found.best.latency_s == pytest.approx(least_s, rel=1e-9)
    assert len(found.points) < 61**2 / 2, "not by looking at all"
