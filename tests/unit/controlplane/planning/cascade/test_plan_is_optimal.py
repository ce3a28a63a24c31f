"""Tables, allocation and plan against enumeration of everything."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.planning.cascade.allocation import allocate, lowest_latency_s
from controlplane.planning.cascade.alternate import PlanRequest, plan
from controlplane.planning.cascade.objective import FastestWithin
from controlplane.planning.cascade.parallelism import capacity
from controlplane.planning.cascade.replica import ReplicaCurve, ReplicaShape, Statistic
from controlplane.planning.cascade.routing import ESCALATE_ALL, candidate_thresholds, route
from controlplane.planning.cascade.sample import CascadeSample
from mesh.errors import PlanInfeasible
from tests.unit.controlplane.planning.cascade.analytic_source import AnalyticSource, random_sample

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
@settings(max_examples=90, deadline=None)
def test_the_tables_hold_the_best_of_all_mixes(seed: int, rate: float, gpus: int, statistic: Statistic) -> None:
    source = AnalyticSource(random_sample(seed, 20, 1), [0.01], [(ONE, TWO, FOUR)])
    curves = source.curves(0, np.arange(20))
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
@settings(max_examples=60, deadline=None)
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
    assert lowest_latency_s(tables_s, gpus) == expected
    shares = [1.0] * len(tables_s)
    if np.isinf(expected):
        with pytest.raises(PlanInfeasible, match="GPUs"):
            allocate(tables_s, shares, gpus)
        return
    split = allocate(tables_s, shares, gpus)
    assert sum(split) <= gpus
    assert max(table[f] for table, f in zip(tables_s, split, strict=True)) == pytest.approx(expected)


def enumerated_score(sample: CascadeSample, source: AnalyticSource, gpus: int, quality: float) -> float:
    """J of the best of all thresholds, allocations and mixes."""
    ends = (0.0,) * (sample.tiers - 1), (ESCALATE_ALL,) * (sample.tiers - 1)
    objective = FastestWithin(quality, utopia=route(sample, ends[1]).quality, nadir=route(sample, ends[0]).quality)
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
            curves = source.curves(tier, reached)
            per_tier.append([enumerated_latency_s(curves, f, rate) for f in range(gpus + 1)])
        latency_s = min(
            max(per_tier[tier][f] for tier, f in enumerate(split))
            for split in product(range(gpus + 1), repeat=sample.tiers)
            if sum(split) <= gpus
        )
        best = min(best, objective.score(latency_s, routed.quality))
    return best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tiers", [2, 3])
def test_the_plan_is_the_enumerated_optimum(seed: int, tiers: int) -> None:
    sample = random_sample(seed, 24, tiers, rate_per_s=1.5, levels=3)
    source = AnalyticSource(sample, [0.001, 0.004, 0.01][:tiers], [(ONE, TWO), (ONE, TWO), (TWO,)][:tiers])
    gpus, quality = 5, 65.0
    expected = enumerated_score(sample, source, gpus, quality)
    planned = plan(sample, source, PlanRequest(gpus=gpus, quality=quality))
    ends = (0.0,) * (tiers - 1), (ESCALATE_ALL,) * (tiers - 1)
    objective = FastestWithin(quality, utopia=route(sample, ends[1]).quality, nadir=route(sample, ends[0]).quality)
    assert objective.score(planned.deployment.latency_s, planned.routed.quality) == pytest.approx(expected, rel=1e-9)
