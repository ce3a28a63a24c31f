"""A deployed cascade under load: requests pass its tiers in turn, and answers that might not do are judged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.parallelism import Mix
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.policies.registry import create_policy
from mesh.errors import PlanInfeasible
from simulator.cascade.executor import SimulatedExecutor
from simulator.cascade.tier import Tier
from simulator.cluster.config import ClusterConfig, InstanceSpec
from simulator.cluster.simulation import ClusterSimulation
from simulator.traces.request import TraceRequest

DISPATCH = "least_loaded"


@dataclass(frozen=True, slots=True)
class Deployed:
    """Thresholds with the replicas that serve them."""

    thresholds: tuple[float, ...]
    mixes: tuple[Mix, ...]
    """Of every tier; empty where no request goes."""
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
class Served:
    """What became of them; shape (requests,), in the order of arrival."""

    latencies_s: NDArray[np.float64]
    """Arrival to accepted answer, judgements included."""
    scores: NDArray[np.float64]
    tier_p95_s: tuple[float, ...]
    """Of each tier, by the requests that reached it; 0 where none did."""
    tier_finished_s: tuple[NDArray[np.float64], ...]
    """When each tier's answers were complete."""
    tier_fed_until_s: tuple[float, ...]
    """When the last request came to each tier; 0 where none did."""

    @property
    def p95_s(self) -> float:
        """95 % of the requests took no longer."""
        return float(np.quantile(self.latencies_s, 0.95, method="higher"))

    @property
    def throughput_per_s(self) -> float:
        """Requests per second of the whole that the slowest tier keeps up with: of a run with more arrivals than are
        served, what is served. Each tier is looked at from its first tenth of answers on for as long as requests come
        to it: not while batches fill, nor while replicas empty their queues, of which slow ones take longer."""
        tiers = zip(self.tier_finished_s, self.tier_fed_until_s, strict=True)
        return min(self._kept_up_per_s(ends_s, until_s) for ends_s, until_s in tiers if len(ends_s))

    def _kept_up_per_s(self, ends_s: NDArray[np.float64], until_s: float) -> float:
        from_s, median_s = np.quantile(ends_s, (0.1, 0.5)).tolist()
        until_s = max(until_s, median_s)  # of a run so short that all had come before much was answered
        answered = float(((ends_s > from_s) & (ends_s <= until_s)).mean())
        return answered * len(self.latencies_s) / (until_s - from_s) if until_s > from_s else np.inf


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
) -> Served:
    """Simulate the tiers one after the other, routed by the live cascade's state machine (`SimulatedExecutor`). Raises
    `PlanInfeasible` where requests reach a tier without replicas."""
    executor = SimulatedExecutor(deployed.thresholds, arrivals.times_s, judge_s)
    scores = np.zeros(len(arrivals.rows))
    tails: list[float] = []
    ends: list[NDArray[np.float64]] = []
    fed_until: list[float] = []
    for number, tier in enumerate(tiers):
        here = executor.asked(number)
        if not len(here):
            tails.append(0.0)
            ends.append(np.zeros(0))
            fed_until.append(0.0)
            continue
        asked_s, rows = executor.ready_s[here], arrivals.rows[here]
        trace = [
            TraceRequest(at_s, int(sample.input_tokens[row]), int(sample.output_tokens[row, number]))
            for at_s, row in zip(asked_s.tolist(), rows.tolist(), strict=True)
        ]
        finished_s = _finished_s(tier, deployed.mixes[number], trace, seed)
        scores[here] = sample.scores[rows, number]
        executor.answered(number, here, finished_s, scores[here])
        ends.append(finished_s)
        fed_until.append(float(asked_s[-1]))
        tails.append(float(np.quantile(executor.ready_s[here] - asked_s, 0.95)))
    return Served(executor.ready_s - arrivals.times_s, scores, tuple(tails), tuple(ends), tuple(fed_until))


def _finished_s(tier: Tier, mix: Mix, trace: list[TraceRequest], seed: int) -> NDArray[np.float64]:
    replicas = {replica.shape: replica for replica in tier.replicas()}
    # Of what is overloaded the time in the queue is measured, not what a short queue would turn away.
    specs = tuple(
        InstanceSpec(replace(replicas[shape].engine, max_queued_requests=len(trace)), cost=replicas[shape].cost)
        for shape, count in mix
        for _ in range(count * replicas[shape].engines)
    )
    if not specs:
        raise PlanInfeasible(f"{len(trace)} requests reach {tier.key}, which has no replica")
    config = ClusterConfig(len(specs), specs[0].config, report_interval_ms=0, seed=seed, specs=specs)
    cost = specs[0].cost
    assert cost is not None  # every spec was given one
    outcomes = ClusterSimulation(trace, config, cost, create_policy(DISPATCH)).run()
    failed = next((outcome.error for outcome in outcomes if outcome.error), "")
    if failed:
        raise PlanInfeasible(f"{tier.key} cannot serve the sample: {failed}")
    return np.array([outcome.finished_s for outcome in outcomes])
