"""Runs a system's deployment under Poisson arrivals and measures it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.cascade.deployed import Deployed, Served, poisson_arrivals, serve
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.planning_problem import PlanningProblem


@dataclass(frozen=True, slots=True)
class Arriving:
    """How long requests arrive, at most how many, and the seed that draws them."""

    seconds: float
    max_requests: int | None
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What one deployment reached under its arrivals."""

    deployed: Deployed
    p95_s: float
    quality: float
    """Measured: mean score of the accepted answers."""
    tier_p95_s: tuple[float, ...]
    latencies_s: NDArray[np.float64]
    """Ascending."""

    @classmethod
    def of(cls, deployed: Deployed, served: Served) -> "Run":
        """Measure a deployment that has served its arrivals."""
        quality = float(served.scores.mean())
        return cls(deployed, served.p95_s, quality, served.tier_p95_s, np.sort(served.latencies_s))


def serve_at(problem: PlanningProblem, deployed: Deployed, rate_per_s: float, arriving: Arriving) -> Served:
    """Poisson arrivals of the problem's requests. Raises `PlanInfeasible` as `serve`."""
    seconds = arriving.seconds
    if arriving.max_requests is not None:
        seconds = min(seconds, arriving.max_requests / rate_per_s)
    arrivals = poisson_arrivals(problem.sample, rate_per_s, seconds, arriving.seed)
    return serve(problem.sample, problem.tiers, deployed, arrivals, problem.judge_s, arriving.seed, setup.DISPATCH)
