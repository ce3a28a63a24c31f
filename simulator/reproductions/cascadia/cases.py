"""A trace under a quality target: every system, the least SLO scale that it meets and the rate that it sustains."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.alternate import PlanRequest, plan
from controlplane.planning.cascade.parallelism import capacity
from controlplane.planning.cascade.routing import candidate_thresholds, route
from controlplane.planning.cascade.search import Point, front
from mesh.errors import PlanInfeasible
from simulator.cascade.curves import StoredCurve
from simulator.cascade.replica import alone_s
from simulator.cascade.tier import TierModel
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.end_to_end import Deployed, poisson_arrivals, serve
from simulator.reproductions.cascadia.scores import Answers
from simulator.reproductions.cascadia.setup import Size, tiers_of
from simulator.reproductions.cascadia.systems import COMPARED, SYSTEMS, Bench, System, stand_alone_tier
from simulator.reproductions.cascadia.tables import ScaledCurves
from simulator.reproductions.sustainable_rate import RateSearch, sustainable_rate

_GRID = 32
_MAX_GROWTH = 16.0
"""Of a sustained rate over the trace's own."""


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
    """In one run."""

    def bench(self) -> Bench:
        """At the trace's own rate."""
        tiers = tiers_of(self.models, self.size.is_quick)
        everything = self.everything.sample(1.0)
        sample = self.answers.sample(1.0)
        source = ScaledCurves(everything, sample, tiers, self.curves, self.seed)
        bench = Bench(sample, tiers, source, setup.GPUS, setup.JUDGE_S, self.uniform_gpus, everything)
        return bench.at(self.load * _largest_holds_per_s(bench))


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A system at the trace's rate."""

    deployed: Deployed
    p95_s: float
    quality: float
    """Measured: mean score of the accepted answers."""
    tier_p95_s: tuple[float, ...]
    latencies_s: NDArray[np.float64]
    """Ascending."""


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
    """Of the systems for which it was searched; None where even a 64th of the trace's own rate is too much."""

    def scale(self, system: str) -> float | None:
        """The least SLO scale at which 95 % of the requests are in time."""
        return self.runs[system].p95_s / self.alone_s if system in self.runs else None


def measure_trace(workload: Workload) -> tuple[Case, ...]:
    """Every target that the scores can reach."""
    bench = workload.bench()
    within = reachable(workload.answers)
    return tuple(_measure(workload, bench, quality) for quality in workload.targets if quality <= within)


def reachable(answers: Answers) -> float:
    """The best mean quality of any thresholds."""
    sample = answers.sample(1.0)
    return max(route(sample, each).quality for each in product(*candidate_thresholds(sample, _GRID)))


def latency_quality_front(workload: Workload, quality: float) -> tuple[Point, ...]:
    """Routings that the planner looked at and that nothing beats."""
    bench = workload.bench()
    request = PlanRequest(gpus=bench.gpus, quality=quality, judge_s=bench.judge_s)
    return front(plan(bench.sample, bench.source, request).points)


def single_request_s(bench: Bench, tier: int) -> float:
    """Mean time of the trace's requests, one by one, on one replica over the tensor parallel degree of a server."""
    widest = max(
        (replica for replica in bench.tiers[tier].replicas() if replica.shape.pp == 1),
        key=lambda replica: replica.shape.tp,
    )
    step_tokens = widest.engine.max_step_tokens
    lengths = zip(bench.sample.input_tokens.tolist(), bench.sample.output_tokens[:, tier].tolist(), strict=True)
    return float(np.mean([alone_s(widest.cost, step_tokens, inputs, outputs) for inputs, outputs in lengths]))


def _measure(workload: Workload, bench: Bench, quality: float) -> Case:
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    sustained: dict[str, float | None] = {}
    tier = stand_alone_tier(bench.sample, quality)
    alone = single_request_s(bench, tier)
    for name, system in SYSTEMS.items():
        try:
            runs[name] = _run(system, bench, quality, workload)
        except PlanInfeasible as error:
            refused[name] = str(error)
        if quality in workload.throughput_targets and (workload.size.ablation_throughput or name in COMPARED):
            sustained[name] = _sustained_per_s(system, bench, quality, workload, setup.FIXED_SLO_SCALE * alone)
    by_itself = float(bench.sample.scores[:, tier].mean())
    return Case(workload.name, quality, bench.sample.rate_per_s, alone, tier, by_itself, runs, refused, sustained)


def _run(system: System, bench: Bench, quality: float, workload: Workload) -> Run:
    deployed = system(bench, quality)
    rate, seconds = bench.sample.rate_per_s, workload.size.seconds
    if workload.max_requests is not None:
        seconds = min(seconds, workload.max_requests / rate)
    arrivals = poisson_arrivals(bench.sample, rate, seconds, workload.seed)
    served = serve(bench.sample, bench.tiers, deployed, arrivals, bench.judge_s, workload.seed)
    return Run(deployed, served.p95_s, float(served.scores.mean()), served.tier_p95_s, np.sort(served.latencies_s))


def _sustained_per_s(system: System, bench: Bench, quality: float, workload: Workload, limit_s: float) -> float | None:
    """The highest rate at which 95 % of the requests end within the limit; each rate is planned for by itself."""
    own = bench.sample.rate_per_s

    def attainment_at(scale: float) -> float:
        try:
            run = _run(system, bench.at(own * scale), quality, workload)
        except PlanInfeasible:
            return 0.0
        return float((run.latencies_s <= limit_s).mean())

    search = RateSearch(
        highest_scale=_MAX_GROWTH, growth=1.6, tolerance=workload.size.tolerance, target=setup.ATTAINMENT
    )
    found = sustainable_rate(attainment_at, search)
    return None if found.scale is None else found.scale * own


def _largest_holds_per_s(bench: Bench) -> float:
    """By the tables."""
    largest = bench.sample.tiers - 1
    curves = bench.source.curves(largest, np.arange(bench.sample.requests), bench.sample.output_tokens[:, largest])
    return float(capacity(curves, bench.gpus).rates_per_s[bench.gpus, -1])
