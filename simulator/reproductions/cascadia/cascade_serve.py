"""CascadeServe-like: our reading of how the paper describes that system.

It deploys by load, which is requests per second, and is blind to their lengths and to which of them are escalated: what
it knows of replicas was measured under a mean of all workloads. Thresholds are those that meet the target at the least
cost, whatever the latency. Every model has replicas of one shape, and they are added where most load falls on each.
Which shapes is tuned for the load, as the paper tunes it ("we tune the parallelism and request routing strategies ...
based on the real-time system load"): of all combinations the one whose slowest model has the least p95.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.replica import ReplicaCurve
from controlplane.planning.cascade.routing import Routed, candidate_thresholds, route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.search import FINE_CANDIDATES
from mesh.errors import PlanInfeasible
from simulator.cascade.deployed import Deployed
from simulator.reproductions.cascadia.planning_problem import PlanningProblem


def cascade_serve(problem: PlanningProblem, quality: float) -> Deployed:
    """CascadeServe's plan for a mean quality of at least `quality`, by the rules in the module's docstring. Raises
    `PlanInfeasible`."""
    cost = [min(curve.shape.gpus / curve.rates_per_s[-1] for curve in curves) for curves in problem.by_load]
    thresholds, routed = _cheapest(problem.sample, quality, cost)
    rates = [problem.sample.rate_per_s * share for share in routed.shares]
    judge_s = [problem.judge_s * is_judged for is_judged in routed.is_judged]
    shapes = [curves if rate else curves[:1] for rate, curves in zip(rates, problem.by_load, strict=True)]
    best: tuple[tuple[float, float], tuple[ReplicaCurve, ...], tuple[int, ...]] | None = None
    for curves in product(*shapes):
        counts = _replicas_by_load(rates, curves, problem.gpus)
        if counts is None:
            continue
        rank = _slowest_s(rates, curves, counts, judge_s), _busiest(rates, curves, counts)
        if best is None or rank < best[0]:
            best = rank, curves, counts
    if best is None:
        raise PlanInfeasible(f"{problem.gpus} GPUs do not hold one replica of every tier")
    (slowest_s, _), curves, counts = best
    mixes = tuple(((curve.shape, count),) if count else () for curve, count in zip(curves, counts, strict=True))
    return Deployed(thresholds, mixes, routed.quality, routed.shares, slowest_s < np.inf)


def _cheapest(sample: CascadeSample, quality: float, cost: Sequence[float]) -> tuple[tuple[float, ...], Routed]:
    weights: NDArray[np.float64] = np.array(cost)
    best: tuple[float, tuple[float, ...], Routed] | None = None
    for thresholds in product(*candidate_thresholds(sample, FINE_CANDIDATES)):
        routed = route(sample, thresholds)
        if routed.quality < quality:
            continue
        spent = float((routed.reached.mean(axis=0) * weights).sum())
        if best is None or spent < best[0]:
            best = spent, thresholds, routed
    if best is None:
        raise PlanInfeasible(f"no thresholds reach a quality of {quality:g}")
    return best[1], best[2]


def _replicas_by_load(rates: Sequence[float], curves: Sequence[ReplicaCurve], gpus: int) -> tuple[int, ...] | None:
    """One replica for each tier that is reached, then one more for the tier with most load on each, while GPUs last;
    None where they do not last for the first ones."""
    needed = [curve.shape.gpus for curve in curves]
    load = [rate / float(curve.rates_per_s[-1]) for rate, curve in zip(rates, curves, strict=True)]
    counts = [1 if rate > 0 else 0 for rate in rates]
    left = gpus - sum(count * each for count, each in zip(counts, needed, strict=True))
    if left < 0:
        return None
    while True:
        fitting = [tier for tier, each in enumerate(needed) if rates[tier] > 0 and each <= left]
        if not fitting:
            return tuple(counts)
        busiest = max(fitting, key=lambda tier: load[tier] / counts[tier])
        counts[busiest] += 1
        left -= needed[busiest]


def _slowest_s(
    rates: Sequence[float], curves: Sequence[ReplicaCurve], counts: Sequence[int], judge_s: Sequence[float]
) -> float:
    """p95 of the slowest tier by what was measured, judgement included; infinite where one is overloaded."""
    each_s = [
        float(np.interp(rate / count, curve.rates_per_s, curve.p95_s, right=np.inf)) + judged_s
        for rate, curve, count, judged_s in zip(rates, curves, counts, judge_s, strict=True)
        if count
    ]
    return max(each_s)


def _busiest(rates: Sequence[float], curves: Sequence[ReplicaCurve], counts: Sequence[int]) -> float:
    """Load of the busiest tier, as a part of what it holds."""
    return max(
        rate / (count * float(curve.rates_per_s[-1]))
        for rate, curve, count in zip(rates, curves, counts, strict=True)
        if count
    )
