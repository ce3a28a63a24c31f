"""Algorithm 1 of Cascadia: deployment and routing in turn, until the score stands still."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from controlplane.model.cascade_goal import Minimise
from controlplane.planning.cascade.allocation import allocate
from controlplane.planning.cascade.judging import judge_gpus
from controlplane.planning.cascade.latency import IN_WORDS, STATISTIC, total_latency_s
from controlplane.planning.cascade.objective import MaximiseQuality, MinimiseLatency, Objective
from controlplane.planning.cascade.parallelism import Mix
from controlplane.planning.cascade.replica import Statistic
from controlplane.planning.cascade.routing import ESCALATE_ALL, Routed, proportional_thresholds, route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.search import Point, RoutingSearch
from controlplane.planning.cascade.tables import CurveSource, TierTable, latencies_of, tier_tables
from mesh.errors import ConfigurationError, PlanInfeasible

STABLE_SCORE_RATIO = 1e-3
"""Relative change of the score below which it stands still: the latency levels are coarser."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for: a quality to reach as fast as possible, or a latency to answer within as well as possible."""

    gpus: int
    quality: float | None = None
    """q_min, 0 to 100."""
    latency_s: float | None = None
    """L_max, of whichever latency is minimised."""
    judge_s: float = 0.0
    """What a judgement takes; part of the latency of every tier but the last."""
    stable_rounds: int = 2
    """K."""
    max_rounds: int = 12
    minimise: Minimise = "slowest_tier"
    """Which latency L is: the paper's, or the mean of a request from end to end."""
    judge_gpu_s: float = 0.0
    """GPU time of a judgement: its judge needs GPUs too, which are taken out of `gpus`. 0: judges run elsewhere."""

    def __post_init__(self) -> None:
        if (self.quality is None) == (self.latency_s is None):
            raise ConfigurationError("ask for a plan either by a quality target or by a latency budget")
        if self.gpus < 1 or self.judge_s < 0 or self.judge_gpu_s < 0 or not 1 <= self.stable_rounds <= self.max_rounds:
            raise ConfigurationError(f"a plan needs gpus >= 1, judge_s >= 0 and stable_rounds <= max_rounds: {self}")


@dataclass(frozen=True, slots=True, eq=False)
class Deployment:
    """GPUs and replicas of every tier under a routing, with the latencies that they reach."""

    gpus: tuple[int, ...]
    mixes: tuple[Mix, ...]
    latencies_s: tuple[float, ...]
    """Of each tier: p95 or mean, whichever is minimised."""
    latency_s: float
    """L, the latency that the plan minimises."""
    judge_gpus: int = 0
    """GPUs that are left to the judge."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanResult:
    """The best routing and its deployment, what they are expected to reach, and what was looked at on the way."""

    minimise: Minimise
    thresholds: tuple[float, ...]
    routed: Routed
    deployment: Deployment
    p95_s: tuple[float, ...]
    """Of each tier, its judgement included; 0 where no request comes."""
    mean_s: tuple[float, ...]
    """Mean latency of each tier, its judgement included; 0 where no request comes."""
    scores: tuple[float, ...]
    """The score J that each round reached."""
    points: tuple[Point, ...]
    """The routings that the last search evaluated, for the front of latency and quality."""


@dataclass(frozen=True, slots=True, eq=False)
class _Best:
    thresholds: tuple[float, ...]
    routed: Routed
    deployment: Deployment


def plan(
    sample: CascadeSample,
    source: CurveSource,
    request: PlanRequest,
    on_round: Callable[[int, float], None] | None = None,
) -> PlanResult:
    """Alternate until J has been stable for K rounds; `on_round` is called with each round's number and J.

    Raises `PlanInfeasible` where no routing that was found meets the target within the GPUs.
    """
    anchors = route(sample, (0.0,) * (sample.tiers - 1)), route(sample, (ESCALATE_ALL,) * (sample.tiers - 1))
    statistic = STATISTIC[request.minimise]
    thresholds = proportional_thresholds(sample)
    best: _Best | None = None
    points: tuple[Point, ...] = ()
    best_score, stable, scores = np.inf, 0, []
    for round_number in range(request.max_rounds):
        routed = route(sample, thresholds)
        tables = tier_tables(sample, routed, source, request.gpus, request.judge_s, statistic)
        objective = _objective(sample, request, anchors, tables)
        deployment = deploy(sample, routed, tables, request.gpus, request.minimise, request.judge_gpu_s)
        score = np.inf if deployment is None else objective.score(deployment.latency_s, routed.quality)
        search = RoutingSearch(sample, tables, request.gpus, objective, request.minimise, request.judge_gpu_s)
        found = search.run(thresholds)
        points = found.points
        scores.append(score)
        if on_round is not None:
            on_round(round_number, score)
        stands_still = score >= best_score - STABLE_SCORE_RATIO * abs(best_score) if np.isfinite(best_score) else False
        if deployment is not None and score < best_score:
            best_score = score
            best = _Best(thresholds, routed, deployment)
        stable = stable + 1 if stands_still else 0
        if stable >= request.stable_rounds or (round_number and found.best.thresholds == thresholds):
            break
        thresholds = found.best.thresholds
    return _result(_meeting(best, sample, request, anchors), sample, source, request, tuple(scores), points)


def plan_for(
    sample: CascadeSample,
    source: CurveSource,
    request: PlanRequest,
    thresholds: tuple[float, ...],
    points: tuple[Point, ...] = (),
) -> PlanResult:
    """The deployment alone, for thresholds that were chosen otherwise; `points` is what was looked at then.

    Raises `PlanInfeasible` where the GPUs do not hold the load.
    """
    routed = route(sample, thresholds)
    tables = tier_tables(sample, routed, source, request.gpus, request.judge_s, STATISTIC[request.minimise])
    deployment = deploy(sample, routed, tables, request.gpus, request.minimise, request.judge_gpu_s)
    if deployment is None:
        raise PlanInfeasible(
            f"{request.gpus} GPUs do not hold {sample.rate_per_s:g} requests/s with thresholds {thresholds}: give more "
            "GPUs or plan for a lower rate"
        )
    return _result(_Best(thresholds, routed, deployment), sample, source, request, (), points)


def _result(
    best: _Best,
    sample: CascadeSample,
    source: CurveSource,
    request: PlanRequest,
    scores: tuple[float, ...],
    points: tuple[Point, ...],
) -> PlanResult:
    return PlanResult(
        minimise=request.minimise,
        thresholds=best.thresholds,
        routed=best.routed,
        deployment=best.deployment,
        p95_s=_tier_latencies_s(best, sample, source, request, "p95"),
        mean_s=_tier_latencies_s(best, sample, source, request, "mean"),
        scores=scores,
        points=points,
    )


def deploy(
    sample: CascadeSample,
    routed: Routed,
    tables: tuple[TierTable, ...],
    gpus: int,
    minimise: Minimise = "slowest_tier",
    judge_gpu_s: float = 0.0,
) -> Deployment | None:
    """The deployment solver of algorithm 1, from tables of the statistic that `minimise` asks for; None where the GPUs,
    less those of a judge that takes so much GPU time for an answer, do not hold the load."""
    for_judge = judge_gpus(routed, sample.rate_per_s, judge_gpu_s)
    gpus -= for_judge
    if gpus < 1:
        return None
    latencies = latencies_of(sample, routed, tables)
    try:
        allocation = allocate(latencies, routed.shares, gpus, minimise)
    except PlanInfeasible:
        return None
    mixes = tuple(
        table.capacity.mix(given, table.scaled_rate_per_s(routed, sample.rate_per_s))
        for table, given in zip(tables, allocation, strict=True)
    )
    of_tiers = tuple(float(table_s[f]) for table_s, f in zip(latencies, allocation, strict=True))
    return Deployment(allocation, mixes, of_tiers, total_latency_s(of_tiers, routed.shares, minimise), for_judge)


def _objective(
    sample: CascadeSample, request: PlanRequest, anchors: tuple[Routed, Routed], tables: tuple[TierTable, ...]
) -> Objective:
    smallest, largest = anchors
    if request.quality is not None:
        return MinimiseLatency(request.quality, utopia=largest.quality, nadir=smallest.quality)
    assert request.latency_s is not None  # a request has one of the two
    ends = [deploy(sample, routed, tables, request.gpus, request.minimise, request.judge_gpu_s) for routed in anchors]
    best_s, worst_s = (None if end is None else end.latency_s for end in ends)
    best_s = request.latency_s if best_s is None else best_s
    return MaximiseQuality(request.latency_s, best_s=best_s, worst_s=2 * best_s if worst_s is None else worst_s)


def _tier_latencies_s(
    best: _Best, sample: CascadeSample, source: CurveSource, request: PlanRequest, statistic: Statistic
) -> tuple[float, ...]:
    """What each tier's replicas reach, also in the statistic that was not minimised."""
    if statistic == STATISTIC[request.minimise]:
        return best.deployment.latencies_s
    # No GPUs: levels and curves are all that a known mix needs.
    tables = tier_tables(sample, best.routed, source, 0, request.judge_s, statistic)
    return tuple(
        table.latency_of_s(mix, best.routed, sample.rate_per_s)
        for table, mix in zip(tables, best.deployment.mixes, strict=True)
    )


def _meeting(best: _Best | None, sample: CascadeSample, request: PlanRequest, anchors: tuple[Routed, Routed]) -> _Best:
    """The plan, if it meets what was asked."""
    if best is None:
        raise PlanInfeasible(
            f"{request.gpus} GPUs do not hold {sample.rate_per_s:g} requests/s under any routing that was tried: give "
            "more GPUs or plan for a lower rate"
        )
    if request.quality is not None and best.routed.quality < request.quality:
        raise PlanInfeasible(
            f"a quality of {request.quality:g} is not met: the best found on {request.gpus} GPUs is "
            f"{best.routed.quality:.1f} (all answers by the largest tier: {anchors[1].quality:.1f}); lower the target, "
            "give more GPUs or add a better tier"
        )
    if request.latency_s is not None and best.deployment.latency_s > request.latency_s:
        raise PlanInfeasible(
            f"a latency of {request.latency_s:g} s ({IN_WORDS[request.minimise]}) is not met: the least found on "
            f"{request.gpus} GPUs is {best.deployment.latency_s:.2f} s; raise the budget, give more GPUs or plan "
            "for a lower rate"
        )
    return best
