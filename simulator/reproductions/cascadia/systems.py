"""What is compared: for a rate and a quality target each gives a routing with a deployment."""

from dataclasses import replace

import numpy as np

from controlplane.model.cascade_goal import Minimise
from controlplane.planning.cascade.bilevel import PlanRequest, deploy, plan
from controlplane.planning.cascade.parallelism import Capacity, Mix, capacity
from controlplane.planning.cascade.routing import ESCALATE_ALL, Routed, route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.tables import TierTable, tier_tables
from mesh.errors import PlanInfeasible
from simulator.cascade.deployed import Deployed
from simulator.reproductions.cascadia.cascade_serve import cascade_serve
from simulator.reproductions.cascadia.planning_problem import PlanningProblem, System

CASCADIA = "Cascadia"
END_TO_END = "Cascadia, end to end"
STAND_ALONE = "stand-alone"
CASCADE_SERVE = "CascadeServe-like"
SARATHI = "Sarathi-Serve-like"
"""The stand-alone model on engines whose chunk size is tuned (appendix F)."""
UNIFORM_PARALLELISM = "uniform parallelism"
UNIFORM_ALLOCATION = "uniform allocation"
COMPARED = (CASCADIA, STAND_ALONE, CASCADE_SERVE)
"""The systems of figures 5, 6 and 11."""
ABLATIONS = (UNIFORM_PARALLELISM, UNIFORM_ALLOCATION)
"""Figure 9."""
SERVER_GPUS = 8


def cascadia(problem: PlanningProblem, quality: float, minimise: Minimise = "slowest_tier") -> Deployed:
    """Cascadia's own plan, by algorithm 1."""
    request = PlanRequest(gpus=problem.gpus, quality=quality, judge_s=problem.judge_s, minimise=minimise)
    planned = plan(problem.sample, problem.source, request)
    return Deployed(planned.thresholds, planned.deployment.mixes, planned.routed.quality, planned.routed.shares)


def end_to_end(problem: PlanningProblem, quality: float) -> Deployed:
    """Algorithm 1 with the mean from end to end for L: ours."""
    return cascadia(problem, quality, "end_to_end")


def stand_alone(problem: PlanningProblem, quality: float) -> Deployed:
    """The smallest model that meets the target by itself (where none does: the best), on all GPUs, in the mix of
    replicas that the same tables and the same program choose."""
    tier = stand_alone_tier(problem.sample, quality)
    thresholds = ((ESCALATE_ALL,) * tier + (0.0,) * problem.sample.tiers)[: problem.sample.tiers - 1]
    routed = route(problem.sample, thresholds)
    tables = tier_tables(problem.sample, routed, problem.source, problem.gpus, problem.judge_s)
    deployment = deploy(problem.sample, routed, tables, problem.gpus)
    if deployment is not None:
        return Deployed(thresholds, deployment.mixes, routed.quality, routed.shares)
    mixes = tuple(_most(table.capacity, problem.gpus) if table.tier == tier else () for table in tables)
    return Deployed(thresholds, mixes, routed.quality, routed.shares, is_within=False)


def stand_alone_tier(sample: CascadeSample, quality: float) -> int:
    """The smallest that meets the target by itself; where none does, the best."""
    means = sample.scores.mean(axis=0)
    meeting = np.flatnonzero(means >= quality)
    return int(meeting[0]) if len(meeting) else int(means.argmax())


def uniform_parallelism(problem: PlanningProblem, quality: float) -> Deployed:
    """Cascadia's routing; tensor parallelism within a server, copies across servers; GPUs by the same program."""
    planned, routed, tables = _planned(problem, quality)
    tables = tuple(replace(table, capacity=_uniform(table.capacity, problem.gpus)) for table in tables)
    deployment = deploy(problem.sample, routed, tables, problem.gpus)
    if deployment is None:
        raise PlanInfeasible("uniform parallelism does not hold the load")
    return replace(planned, mixes=deployment.mixes)


def uniform_allocation(problem: PlanningProblem, quality: float) -> Deployed:
    """Cascadia's routing; the same number of GPUs for every tier, in the best mix on them."""
    planned, routed, tables = _planned(problem, quality)
    mixes: list[Mix] = []
    holds = True
    for table, gpus in zip(tables, problem.uniform_gpus, strict=True):
        rate = table.scaled_rate_per_s(routed, problem.sample.rate_per_s)
        mix = table.capacity.mix(gpus, rate)
        if rate > 0 and not mix:
            holds = False
            mix = _most(table.capacity, gpus)
        mixes.append(mix)
    return replace(planned, mixes=tuple(mixes), is_within=holds)


SYSTEMS: dict[str, System] = {
    CASCADIA: cascadia,
    END_TO_END: end_to_end,
    STAND_ALONE: stand_alone,
    CASCADE_SERVE: cascade_serve,
    UNIFORM_PARALLELISM: uniform_parallelism,
    UNIFORM_ALLOCATION: uniform_allocation,
}


def _planned(problem: PlanningProblem, quality: float) -> tuple[Deployed, Routed, tuple[TierTable, ...]]:
    planned = cascadia(problem, quality)
    routed = route(problem.sample, planned.thresholds)
    return planned, routed, tier_tables(problem.sample, routed, problem.source, problem.gpus, problem.judge_s)


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
