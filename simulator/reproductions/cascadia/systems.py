"""What is compared: for a rate and a quality target each gives a routing with a deployment.

CascadeServe-like is our reading of how the paper describes it: a deployment by load, which is requests per second, and
blind to lengths and to which requests are escalated. A request costs each model what a request of mean lengths costs;
every model has replicas of one shape, the one that serves most of those per GPU; thresholds are those that meet the
target at the least cost, whatever the latency; and replicas are added where most load falls on each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.alternate import PlanRequest, deploy, plan
from controlplane.planning.cascade.parallelism import Capacity, Mix, capacity
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.cascade.routing import Routed, candidate_thresholds, route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.search import FINE_CANDIDATES
from controlplane.planning.cascade.tables import CurveSource, TierTable, tier_tables
from mesh.errors import PlanInfeasible
from simulator.cascade.replica import saturation_per_s
from simulator.cascade.tier import Tier
from simulator.reproductions.cascadia.end_to_end import Deployed

CASCADIA = "Cascadia"
STAND_ALONE = "stand-alone"
CASCADE_SERVE = "CascadeServe-like"
UNIFORM_PARALLELISM = "uniform parallelism"
UNIFORM_ALLOCATION = "uniform allocation"
COMPARED = (CASCADIA, STAND_ALONE, CASCADE_SERVE)
"""Those of figures 5 and 6; the others are ablations (figure 9)."""
SERVER_GPUS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A workload on a cascade, and what its replicas are known to do."""

    sample: CascadeSample
    """At the rate to plan for."""
    tiers: Sequence[Tier]
    source: CurveSource
    gpus: int
    judge_s: float
    uniform_gpus: tuple[int, ...]
    mean_lengths_of: CascadeSample
    """What CascadeServe-like knows of lengths: their means over all workloads."""

    def at(self, rate_per_s: float) -> "Bench":
        """The same at another rate."""
        return replace(self, sample=replace(self.sample, rate_per_s=rate_per_s))


System = Callable[[Bench, float], Deployed]
"""Of a bench and a quality target. Raises `PlanInfeasible` where the system knows of no way."""


def cascadia(bench: Bench, quality: float) -> Deployed:
    """Algorithm 1."""
    planned = plan(bench.sample, bench.source, PlanRequest(gpus=bench.gpus, quality=quality, judge_s=bench.judge_s))
    return Deployed(
        _all(bench), planned.thresholds, planned.deployment.mixes, planned.routed.quality, planned.routed.shares
    )


def stand_alone(bench: Bench, quality: float) -> Deployed:
    """The smallest model that meets the target by itself (where none does: the best), on all GPUs, in the mix of
    replicas that the same tables and the same program choose."""
    tier = stand_alone_tier(bench.sample, quality)
    reached = np.zeros(bench.sample.scores.shape, np.bool_)
    reached[:, tier] = True
    mean = float(bench.sample.scores[:, tier].mean())
    routed = Routed(reached, bench.sample.output_tokens, np.full(bench.sample.requests, tier, np.int64), mean)
    tables = tier_tables(bench.sample, routed, bench.source, bench.gpus, 0.0)
    deployment = deploy(bench.sample, routed, tables, bench.gpus)
    mix = deployment.mixes[tier] if deployment is not None else _most(tables[tier].capacity, bench.gpus)
    return Deployed((tier,), (), (mix,), mean, (1.0,), deployment is not None)


def stand_alone_tier(sample: CascadeSample, quality: float) -> int:
    """The smallest that meets the target by itself; where none does, the best."""
    means = sample.scores.mean(axis=0)
    meeting = np.flatnonzero(means >= quality)
    return int(meeting[0]) if len(meeting) else int(means.argmax())


def cascade_serve(bench: Bench, quality: float) -> Deployed:
    """See the module."""
    shapes, held = zip(*(_best_shape(bench, tier) for tier in _all(bench)), strict=True)
    cost = [shape.gpus / rate for shape, rate in zip(shapes, held, strict=True)]
    thresholds, routed = _cheapest(bench.sample, quality, cost)
    rates = [bench.sample.rate_per_s * share for share in routed.shares]
    counts = _replicas_by_load(rates, shapes, held, bench.gpus)
    mixes = tuple(((shape, count),) if count else () for shape, count in zip(shapes, counts, strict=True))
    holds = all(rate <= count * each for rate, count, each in zip(rates, counts, held, strict=True))
    return Deployed(_all(bench), thresholds, mixes, routed.quality, routed.shares, holds)


def uniform_parallelism(bench: Bench, quality: float) -> Deployed:
    """Cascadia's routing; tensor parallelism within a server, copies across servers; GPUs by the same program."""
    planned, routed, tables = _planned(bench, quality)
    tables = tuple(replace(table, capacity=_uniform(table.capacity, bench.gpus)) for table in tables)
    deployment = deploy(bench.sample, routed, tables, bench.gpus)
    if deployment is None:
        raise PlanInfeasible("uniform parallelism does not hold the load")
    return replace(planned, mixes=deployment.mixes)


def uniform_allocation(bench: Bench, quality: float) -> Deployed:
    """Cascadia's routing; the same number of GPUs for every tier, in the best mix on them."""
    planned, routed, tables = _planned(bench, quality)
    mixes: list[Mix] = []
    holds = True
    for table, gpus in zip(tables, bench.uniform_gpus, strict=True):
        rate = table.scaled_rate_per_s(routed, bench.sample.rate_per_s)
        mix = table.capacity.mix(gpus, rate)
        if rate > 0 and not mix:
            holds = False
            mix = _most(table.capacity, gpus)
        mixes.append(mix)
    return replace(planned, mixes=tuple(mixes), is_within=holds)


SYSTEMS: dict[str, System] = {
    CASCADIA: cascadia,
    STAND_ALONE: stand_alone,
    CASCADE_SERVE: cascade_serve,
    UNIFORM_PARALLELISM: uniform_parallelism,
    UNIFORM_ALLOCATION: uniform_allocation,
}


def _all(bench: Bench) -> tuple[int, ...]:
    return tuple(range(bench.sample.tiers))


def _planned(bench: Bench, quality: float) -> tuple[Deployed, Routed, tuple[TierTable, ...]]:
    planned = cascadia(bench, quality)
    routed = route(bench.sample, planned.thresholds)
    return planned, routed, tier_tables(bench.sample, routed, bench.source, bench.gpus, bench.judge_s)


def _most(of: Capacity, gpus: int) -> Mix:
    """The mix that holds the highest rate, for loads that none holds."""
    return of.mix(gpus, float(of.rates_per_s[gpus, -1]) * (1 - 1e-9))


def _uniform(of: Capacity, max_gpus: int) -> Capacity:
    """Whole servers as one replica each; of what is left the largest tensor parallel replica that fits, and so on."""
    tensor = sorted((curve for curve in of.curves if curve.shape.pp == 1), key=lambda curve: -curve.shape.tp)
    if not tensor:
        raise PlanInfeasible("the model fits in no server by tensor parallelism alone")
    curves = of.curves
    full = capacity(curves, 0, of.statistic)
    rates = np.zeros((max_gpus + 1, len(full.levels_s)))
    chosen = np.full(rates.shape, -1, np.int16)
    for gpus in range(1, max_gpus + 1):
        curve = next((each for each in tensor if each.shape.tp <= min(gpus, SERVER_GPUS)), None)
        if curve is None:
            continue
        rates[gpus] = rates[gpus - curve.shape.gpus] + curve.sustained_rate_per_s(full.levels_s, of.statistic)
        chosen[gpus] = curves.index(curve)
    return Capacity(of.statistic, full.levels_s, rates, chosen, curves)


def _best_shape(bench: Bench, tier: int) -> tuple[ReplicaShape, float]:
    """The shape that serves most requests of mean lengths per GPU, and how many per second."""
    known = bench.mean_lengths_of
    inputs = np.array([round(known.input_tokens.mean())])
    outputs = np.array([round(known.output_tokens[:, tier].mean())])
    found = [(each.shape, saturation_per_s(each, inputs, outputs)) for each in bench.tiers[tier].replicas()]
    return max(found, key=lambda one: one[1] / one[0].gpus)


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


def _replicas_by_load(
    rates: Sequence[float], shapes: Sequence[ReplicaShape], held: Sequence[float], gpus: int
) -> tuple[int, ...]:
    """One replica for each tier that is reached, then one more for the tier with most load on each, while GPUs last."""
    counts = [1 if rate > 0 else 0 for rate in rates]
    left = gpus - sum(count * shape.gpus for count, shape in zip(counts, shapes, strict=True))
    if left < 0:
        raise PlanInfeasible(f"{gpus} GPUs do not hold one replica of every tier")
    while True:
        fitting = [tier for tier, shape in enumerate(shapes) if rates[tier] > 0 and shape.gpus <= left]
        if not fitting:
            return tuple(counts)
        busiest = max(fitting, key=lambda tier: rates[tier] / (counts[tier] * held[tier]))
        counts[busiest] += 1
        left -= shapes[busiest].gpus
