"""What a system serves at most: with 95 % of the requests in time, and with no limit of latency at all."""

from mesh.errors import PlanInfeasible
from simulator.cascade import saturated
from simulator.cascade.deployed import Deployed
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.planning_problem import PlanningProblem, System
from simulator.reproductions.cascadia.run import Arriving, serve_at
from simulator.reproductions.sustainable_rate import RateSearch, sustainable_rate

_MAX_GROWTH = 16.0
"""Of a rate over the trace's own."""
_HELD = RateSearch(highest_scale=_MAX_GROWTH, growth=1.6, tolerance=0.02, target=0.5)


def in_time_per_s(
    system: System,
    problem: PlanningProblem,
    quality: float,
    arriving: Arriving,
    limit_s: float,
    tolerance: float,
    at_most_per_s: float | None,
) -> float | None:
    """The highest rate at which 95 % of the requests end within the limit; each rate is planned for by itself. None
    where even a 64th of the problem's own rate is too much.

    No higher than `at_most_per_s`, what the system serves saturated (None: not known): a run of so many requests that
    it ends within the limit does not show that they are too many.
    """
    own = problem.sample.rate_per_s

    def attainment_at(scale: float) -> float:
        try:
            served = serve_at(problem, system(problem.at(own * scale), quality), own * scale, arriving)
        except PlanInfeasible:
            return 0.0
        return float((served.latencies_s <= limit_s).mean())

    highest = _MAX_GROWTH if at_most_per_s is None else at_most_per_s / own
    search = RateSearch(
        start_scale=min(1.0, highest),
        highest_scale=highest,
        growth=1.6,
        tolerance=tolerance,
        target=setup.ATTAINMENT,
    )
    found = sustainable_rate(attainment_at, search)
    return None if found.scale is None else found.scale * own


def saturated_per_s(system: System, problem: PlanningProblem, quality: float, seed: int) -> float | None:
    """What a system's deployment for the highest rate that it holds by its own tables serves when more arrives. None
    where there is no such rate."""
    scale = held_scale(system, problem, quality)
    deployed = None if scale is None else _deployed_at(system, problem, quality, scale)
    if scale is None or deployed is None:
        return None
    sample = problem.at(problem.sample.rate_per_s * scale).sample
    return saturated.saturated_per_s(sample, problem.tiers, deployed, seed)


def held_scale(system: System, problem: PlanningProblem, quality: float) -> float | None:
    """The highest multiple of the problem's own rate which the system holds by its own tables; None where it holds
    none."""
    return sustainable_rate(lambda scale: float(_deployed_at(system, problem, quality, scale) is not None), _HELD).scale


def _deployed_at(system: System, problem: PlanningProblem, quality: float, scale: float) -> Deployed | None:
    try:
        deployed = system(problem.at(problem.sample.rate_per_s * scale), quality)
    except PlanInfeasible:
        return None
    return deployed if deployed.is_within else None
