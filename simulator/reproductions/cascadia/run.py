"""Runs of a deployed system: what its requests take, with each seed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.cascade.deployed import Deployed, Served, poisson_arrivals, serve
from simulator.reproductions.cascadia.planning_problem import PlanningProblem

_POINTS = 61
"""So many points of the attainment are kept for its plot."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """How long requests arrive for, and the most that do; seeds draw arrivals and requests."""

    seconds: float
    max_requests: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """A deployment under its arrivals, with each seed. Plain values: journals keep it."""

    deployed: Deployed
    p95_s: tuple[float, ...]
    quality: tuple[float, ...]
    """Measured: mean score of the accepted answers."""
    tier_p95_s: tuple[tuple[float, ...], ...]
    """Each tier's in the run of each seed; 0 where no request went."""
    quantiles_s: tuple[float, ...]
    """Latencies of all seeds' requests: the least, every 60th part, the longest."""

    @classmethod
    def of(cls, deployed: Deployed, served: Sequence[Served]) -> "Run":
        """What a deployment has served, with one seed each."""
        latencies_s = np.concatenate([each.latencies_s for each in served])
        return cls(
            deployed,
            tuple(each.p95_s for each in served),
            tuple(float(each.scores.mean()) for each in served),
            tuple(each.tier_p95_s for each in served),
            tuple(np.quantile(latencies_s, np.linspace(0, 1, _POINTS)).tolist()),
        )

    @property
    def mean_tier_p95_s(self) -> tuple[float, ...]:
        """Each tier's, over the seeds."""
        return tuple(np.mean(self.tier_p95_s, axis=0).tolist())


def serve_at(problem: PlanningProblem, deployed: Deployed, rate_per_s: float, arriving: Arriving) -> Served:
    """Poisson arrivals of the problem's requests. Raises `PlanInfeasible` as `serve`."""
    seconds = arriving.seconds
    if arriving.max_requests is not None:
        seconds = min(seconds, arriving.max_requests / rate_per_s)
    arrivals = poisson_arrivals(problem.sample, rate_per_s, seconds, arriving.seed)
    return serve(problem.sample, problem.tiers, deployed, arrivals, problem.judge_s, arriving.seed)
