"""A trace under a quality target: every system, the least SLO scale that it meets and the rate that it sustains."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from controlplane.planning.cascade.bilevel import PlanRequest, plan
from controlplane.planning.cascade.parallelism import capacity
from controlplane.planning.cascade.routing import candidate_thresholds, route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.search import Point, pareto_front
from mesh.errors import PlanInfeasible
from simulator.cascade.curves import StoredCurve
from simulator.cascade.replica import alone_s
from simulator.cascade.tier import TierModel
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.planning_problem import PlanningProblem
from simulator.reproductions.cascadia.run import Arriving, Run, serve_at
from simulator.reproductions.cascadia.scores import Answers
from simulator.reproductions.cascadia.setup import Size, tiers_of
from simulator.reproductions.cascadia.systems import ABLATIONS, COMPARED, SYSTEMS, stand_alone_tier
from simulator.reproductions.cascadia.tables import ScaledCurves
from simulator.reproductions.cascadia.throughput import in_time_per_s, saturated_per_s

_GRID = 32


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A trace on a cascade. It travels to other processes."""

    name: str
    answers: Answers
    everything: Answers
    """All questions of which the trace is a part: the tables are simulated for them."""
    models: tuple[TierModel, ...]
    load: float
    """The rate, as a part of what the largest model alone holds on all GPUs."""
    uniform_gpus: tuple[int, ...]
    curves: tuple[StoredCurve, ...]
    seed: int
    size: Size
    targets: tuple[float, ...]
    throughput_targets: tuple[float, ...] = ()
    max_requests: int | None = None
    """Most requests of one run."""

    def problem(self) -> PlanningProblem:
        """The planning problem at the trace's own rate."""
        problem = self.problem_of(self.answers.sample(1.0))
        return problem.at(self.load * _largest_holds_per_s(problem))

    def problem_of(self, sample: CascadeSample) -> PlanningProblem:
        """The same problem for other requests."""
        tiers = tiers_of(self.models, self.size.is_quick)
        source = ScaledCurves(self.everything.sample(1.0), sample, tiers, self.curves, self.seed)
        by_load = tuple(source.of_everything(tier) for tier in range(sample.tiers))
        return PlanningProblem(sample, tiers, source, setup.GPUS, setup.JUDGE_S, self.uniform_gpus, by_load)


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
    runs: Mapping[str, Run]
    refused: Mapping[str, str]
    """Systems that know of no way at this rate, and what they say."""
    sustained_per_s: Mapping[str, float | None]
    """Within the limit; of the systems for which it was searched. None where even a 64th of the trace's own rate is too
    much."""
    saturated_per_s: Mapping[str, float | None]
    """With no limit, the ablations too."""

    def scale(self, system: str) -> float | None:
        """The least SLO scale at which 95 % of the requests are in time."""
        return self.runs[system].p95_s / self.alone_s if system in self.runs else None


def measure_trace(workload: Workload) -> tuple[Case, ...]:
    """Every target that the scores can reach."""
    problem = workload.problem()
    within = reachable(workload.answers)
    return tuple(_measure(workload, problem, quality) for quality in workload.targets if quality <= within)


def reachable(answers: Answers) -> float:
    """The best mean quality of any thresholds."""
    sample = answers.sample(1.0)
    return max(route(sample, each).quality for each in product(*candidate_thresholds(sample, _GRID)))


def latency_quality_front(workload: Workload, quality: float) -> tuple[Point, ...]:
    """Routings that the planner looked at and that nothing beats."""
    problem = workload.problem()
    request = PlanRequest(gpus=problem.gpus, quality=quality, judge_s=problem.judge_s)
    return pareto_front(plan(problem.sample, problem.source, request).points)


def single_request_s(problem: PlanningProblem, tier: int) -> float:
    """Mean time of the trace's requests, one by one, on one replica over the tensor parallel degree of a server."""
    widest = max(
        (replica for replica in problem.tiers[tier].replicas() if replica.shape.pp == 1),
        key=lambda replica: replica.shape.tp,
    )
    step_tokens = widest.engine.max_step_tokens
    lengths = zip(problem.sample.input_tokens.tolist(), problem.sample.output_tokens[:, tier].tolist(), strict=True)
    return float(np.mean([alone_s(widest.cost, step_tokens, inputs, outputs) for inputs, outputs in lengths]))


def _measure(workload: Workload, problem: PlanningProblem, quality: float) -> Case:
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    sustained: dict[str, float | None] = {}
    saturated: dict[str, float | None] = {}
    tier = stand_alone_tier(problem.sample, quality)
    alone = single_request_s(problem, tier)
    size = workload.size
    arriving = Arriving(size.seconds, workload.max_requests, workload.seed)
    searched = replace(arriving, max_requests=size.throughput_requests)
    for name, system in SYSTEMS.items():
        try:
            deployed = system(problem, quality)
            runs[name] = Run.of(deployed, serve_at(problem, deployed, problem.sample.rate_per_s, arriving))
        except PlanInfeasible as error:
            refused[name] = str(error)
        if quality not in workload.throughput_targets:
            continue
        if name in COMPARED:
            limit_s = setup.FIXED_SLO_SCALE * alone
            sustained[name] = in_time_per_s(system, problem, quality, searched, limit_s, size.tolerance)
        if name in (*COMPARED, *ABLATIONS):
            full = replace(arriving, seconds=size.seconds / 2)
            saturated[name] = saturated_per_s(system, problem, quality, full, size.saturated_at)
    by_itself = float(problem.sample.scores[:, tier].mean())
    rate = problem.sample.rate_per_s
    return Case(workload.name, quality, rate, alone, tier, by_itself, runs, refused, sustained, saturated)


def _largest_holds_per_s(problem: PlanningProblem) -> float:
    """Requests a second that all GPUs hold with the largest tier alone, by its tables."""
    largest = problem.sample.tiers - 1
    curves = problem.source.curves(
        largest, np.arange(problem.sample.requests), problem.sample.output_tokens[:, largest]
    )
    return float(capacity(curves, problem.gpus).rates_per_s[problem.gpus, -1])
