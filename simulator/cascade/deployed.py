"""A deployed cascade under load: requests pass its tiers in turn, and answers that might not do are judged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.parallelism import Mix
from controlplane.planning.cascade.routing import route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.policies.registry import create_policy
from mesh.errors import PlanInfeasible
from simulator.cascade.executor import SimulatedExecutor
from simulator.cascade.tier import Tier
from simulator.cluster.config import ClusterConfig, InstanceSpec
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.placement_costs import fitted_costs
from simulator.traces.request import TraceRequest

DISPATCH = "penstock"
"""The mesh's default, which knows from profiles what each replica's steps cost."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """Thresholds with the replicas that serve them."""

    thresholds: tuple[float, ...]
    mixes: tuple[Mix, ...]
    """The replicas of each tier; empty where no request goes."""
    quality: float
    """Expected, on the sample it was made for."""
    shares: tuple[float, ...]
    is_within: bool = True
    """The planner expects the GPUs to hold the load."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRequests:
    """Requests drawn from a sample's rows."""

    times_s: NDArray[np.float64]
    """Ascending."""
    rows: NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class TierServed:
    """What one tier did, in the order in which requests came to it; shapes (requests that reached it,)."""

    requests: NDArray[np.intp]
    """Which of all they are, in the order of arrival."""
    latencies_s: NDArray[np.float64]
    """Until it was accepted or went on to the next tier: its judgement is included."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What became of them; shape (requests,), in the order of arrival."""

    latencies_s: NDArray[np.float64]
    """Arrival to accepted answer, judgements included."""
    scores: NDArray[np.float64]
    tiers: tuple[TierServed, ...]

    @property
    def tier_p95_s(self) -> tuple[float, ...]:
        """Each tier's, by the requests that reached it; 0 where none did."""
        return tuple(float(np.quantile(tier.latencies_s, 0.95)) if len(tier.requests) else 0.0 for tier in self.tiers)

    @property
    def p95_s(self) -> float:
        """95 % of the requests took no longer."""
        return float(np.quantile(self.latencies_s, 0.95, method="higher"))


def poisson_arrivals(sample: CascadeSample, rate_per_s: float, seconds: float, seed: int) -> DrawnRequests:
    """At random, every row as likely. Equal seeds draw the same requests in the same order at any rate."""
    gaps, rows = (np.random.default_rng((seed, stream)) for stream in range(2))
    count = max(1, round(rate_per_s * seconds))
    times_s = np.cumsum(gaps.exponential(1.0, count)) / rate_per_s
    return DrawnRequests(times_s, rows.integers(0, sample.requests, count))


def serve(
    sample: CascadeSample,
    tiers: Sequence[Tier],
    deployed: Deployed,
    arrivals: DrawnRequests,
    judge_s: float,
    seed: int = 0,
    policy: str = DISPATCH,
) -> Served:
    """Simulate the tiers one after the other, routed by the live cascade's state machine (`SimulatedExecutor`) and
    placed by the live policy. Raises `PlanInfeasible` where requests reach a tier without replicas."""
    executor = SimulatedExecutor(deployed.thresholds, arrivals.times_s, judge_s)
    scores = np.zeros(len(arrivals.rows))
    generated = route(sample, deployed.thresholds).output_tokens
    served: list[TierServed] = []
    for number, tier in enumerate(tiers):
        here = executor.asked(number)
        asked_s, rows = executor.ready_s[here], arrivals.rows[here]
        trace = [
            TraceRequest(at_s, int(sample.input_tokens[row]), int(generated[row, number]))
            for at_s, row in zip(asked_s.tolist(), rows.tolist(), strict=True)
        ]
        finished_s = serve_tier(tier, deployed.mixes[number], trace, policy, seed) if trace else np.zeros(0)
        scores[here] = sample.scores[rows, number]
        given_up = generated[rows, number] < sample.output_tokens[rows, number]
        executor.answered(number, here, finished_s, scores[here], given_up)
        served.append(TierServed(here, executor.ready_s[here] - asked_s))
    return Served(executor.ready_s - arrivals.times_s, scores, tuple(served))


def serve_tier(
    tier: Tier, mix: Mix, trace: list[TraceRequest], policy: str = DISPATCH, seed: int = 0
) -> NDArray[np.float64]:
    """When a tier's replicas, placed to by the live policy, have finished each request. Raises `PlanInfeasible` where
    there are none, or where one refuses a request."""
    instances = _instances(tier, mix)
    if not instances:
        raise PlanInfeasible(f"{len(trace)} requests reach {tier.key}, which has no replica")
    # Of what is overloaded the time in the queue is measured, not what a short queue would turn away.
    specs = tuple(replace(spec, config=replace(spec.config, max_queued_requests=len(trace))) for spec in instances)
    config = ClusterConfig(len(specs), specs[0].config, report_interval_ms=0, seed=seed, specs=specs)
    cost = specs[0].cost
    assert cost is not None  # every spec was given one
    outcomes = ClusterSimulation(trace, config, cost, create_policy(policy)).run()
    failed = next((outcome.error for outcome in outcomes if outcome.error), "")
    if failed:
        raise PlanInfeasible(f"{tier.key} cannot serve the sample: {failed}")
    return np.array([outcome.finished_s for outcome in outcomes])


@lru_cache(maxsize=64)
def _instances(tier: Tier, mix: Mix) -> tuple[InstanceSpec, ...]:
    """One for each batch that the replicas have under way, with a profile of what its steps cost."""
    replicas = {replica.shape: replica for replica in tier.replicas()}
    specs: list[InstanceSpec] = []
    for shape, count in mix:
        replica = replicas[shape]
        spec = InstanceSpec(replica.engine, cost=replica.cost, profiled=fitted_costs(replica.cost))
        specs += [spec] * (count * replica.engines)
    return tuple(specs)
