"""A trace under a quality target: what every system takes at the trace's rate, and the highest rates that it serves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controlplane.planning.cascade.bilevel import PlanRequest, plan
from controlplane.planning.cascade.search import Point, pareto_front
from mesh.errors import PlanInfeasible
from simulator.report.interval import Estimate
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.run import Arriving, Run, serve_at
from simulator.reproductions.cascadia.systems import (
    ABLATIONS,
    COMPARED,
    SYSTEMS,
    stand_alone_tier,
)
from simulator.reproductions.cascadia.throughput import in_time_per_s, saturated_per_s
from simulator.reproductions.cascadia.workload import TRACES, Workload, single_request_s


@dataclass(frozen=True, slots=True)
class SystemResult:
    """One system in a case. Plain values: journals keep it."""

    run: Run | None = None
    """At the trace's own rate; None where the system knows of no way."""
    refused: str = ""
    """The reason it gives then."""
    sustained_per_s: float | None = None
    """Within the limit. None where it was not searched, or where even a 64th of the trace's own rate is too much."""
    saturated_per_s: float | None = None
    """With no limit."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A trace under a quality target."""

    trace: str
    quality: float
    rate_per_s: float
    alone_s: float
    """SLO scale 1: mean time of a request by itself on the stand-alone model, tensor parallel over a server."""
    stand_alone_tier: int
    stand_alone_quality: float
    """Less than the target where no model meets it by itself."""
    systems: Mapping[str, SystemResult]

    @property
    def runs(self) -> Mapping[str, Run]:
        """What the systems take that know of a way."""
        return {name: result.run for name, result in self.systems.items() if result.run is not None}

    def scale(self, system: str) -> Estimate:
        """The least SLO scale at which 95 % of the requests are in time."""
        run = self.runs.get(system)
        return Estimate.of([p95_s / self.alone_s for p95_s in run.p95_s] if run is not None else [])

    def result(self, system: str) -> SystemResult:
        """What the system reached; nothing where it was not measured."""
        return self.systems.get(system, SystemResult())

    def is_searched(self, system: str) -> bool:
        """Whether the highest rate of the system was searched, and found."""
        result = self.result(system)
        return result.saturated_per_s is not None or result.sustained_per_s is not None


def case_of(workload: Workload, quality: float, systems: Mapping[str, SystemResult]) -> Case:
    """The results of a case with what they are measured by."""
    problem = workload.problem()
    tier = stand_alone_tier(problem.sample, quality)
    return Case(
        trace=workload.name,
        quality=quality,
        rate_per_s=problem.sample.rate_per_s,
        alone_s=single_request_s(problem, tier),
        stand_alone_tier=tier,
        stand_alone_quality=float(problem.sample.scores[:, tier].mean()),
        systems=systems,
    )


def at_own_rate(workload: Workload, quality: float, name: str) -> SystemResult:
    """One of `SYSTEMS`: its plan for the trace's own rate, with each seed."""
    problem, size = workload.problem(), workload.size
    try:
        deployed = SYSTEMS[name](problem, quality)
        served = [
            serve_at(problem, deployed, problem.sample.rate_per_s, Arriving(size.seconds, workload.max_requests, seed))
            for seed in range(workload.seed, workload.seed + size.seeds)
        ]
    except PlanInfeasible as error:
        return SystemResult(refused=str(error))
    return SystemResult(run=Run.of(deployed, served))


def wants_highest_rates(workload: Workload, quality: float, name: str) -> bool:
    """Whether figures 6 and 9 show the system's `highest_rates`."""
    return workload.name in TRACES and quality in workload.size.throughput_targets and name in (*COMPARED, *ABLATIONS)


def highest_rates(workload: Workload, quality: float, name: str) -> SystemResult:
    """One of `COMPARED` or `ABLATIONS`: what it serves saturated and, of those compared, within the limit."""
    problem, size, system = workload.problem(), workload.size, SYSTEMS[name]
    saturated = saturated_per_s(system, problem, quality, workload.seed)
    if name not in COMPARED:
        return SystemResult(saturated_per_s=saturated)
    limit_s = setup.FIXED_SLO_SCALE * single_request_s(problem, stand_alone_tier(problem.sample, quality))
    arriving = Arriving(size.search_seconds, size.throughput_requests, workload.seed)
    in_time = in_time_per_s(system, problem, quality, arriving, limit_s, size.tolerance, saturated)
    return SystemResult(sustained_per_s=in_time, saturated_per_s=saturated)


def tuned(results: Sequence[SystemResult]) -> SystemResult:
    """The same system with several settings, each figure that of the best: the least p95, the highest rates."""
    runs = [result.run for result in results if result.run is not None]
    return SystemResult(
        run=min(runs, key=lambda run: sum(run.p95_s), default=None),
        refused=results[0].refused,
        sustained_per_s=_highest([result.sustained_per_s for result in results]),
        saturated_per_s=_highest([result.saturated_per_s for result in results]),
    )


def latency_quality_front(workload: Workload, quality: float) -> tuple[Point, ...]:
    """Routings that the planner looked at and that nothing beats."""
    problem = workload.problem()
    request = PlanRequest(gpus=problem.gpus, quality=quality, judge_s=problem.judge_s)
    return pareto_front(plan(problem.sample, problem.source, request).points)


def _highest(rates_per_s: Sequence[float | None]) -> float | None:
    return max((rate for rate in rates_per_s if rate is not None), default=None)
