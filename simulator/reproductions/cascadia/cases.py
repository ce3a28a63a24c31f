"""A trace under a quality target: what every system reaches at the trace's rate, and the rate that it sustains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
        """Of the systems that know of a way."""
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


def measure(workload: Workload, quality: float, name: str) -> SystemResult:
    """One of `SYSTEMS`: its plan for the trace's rate with each seed and, for the targets for which throughput is
    searched, how much it serves."""
    problem, size, system = workload.problem(), workload.size, SYSTEMS[name]
    arriving = Arriving(size.seconds, workload.max_requests, workload.seed)
    result = SystemResult()
    try:
        deployed = system(problem, quality)
        seeds = [replace(arriving, seed=workload.seed + number) for number in range(size.seeds)]
        served = [serve_at(problem, deployed, problem.sample.rate_per_s, each) for each in seeds]
        result = replace(result, run=Run.of(deployed, served))
    except PlanInfeasible as error:
        result = replace(result, refused=str(error))
    if workload.name not in TRACES or quality not in size.throughput_targets:
        return result
    if name in (*COMPARED, *ABLATIONS):
        full = replace(arriving, seconds=size.saturated_seconds)
        saturated = saturated_per_s(system, problem, quality, full)
        result = replace(result, saturated_per_s=saturated)
    if name in COMPARED:
        limit_s = setup.FIXED_SLO_SCALE * single_request_s(problem, stand_alone_tier(problem.sample, quality))
        searched = replace(arriving, seconds=size.search_seconds, max_requests=size.throughput_requests)
        in_time = in_time_per_s(system, problem, quality, searched, limit_s, size.tolerance, result.saturated_per_s)
        result = replace(result, sustained_per_s=in_time)
    return result


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
