"""The traces and the two-tier workloads: questions on a cascade, at a rate and under quality targets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np

from controlplane.planning.cascade.parallelism import capacity
from controlplane.planning.cascade.routing import candidate_thresholds, route
from controlplane.planning.cascade.sample import CascadeSample
from simulator.cascade.curves import SimulatedCurves, StoredCurve
from simulator.cascade.replica import alone_s
from simulator.cascade.tier import TierModel
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.planning_problem import PlanningProblem
from simulator.reproductions.cascadia.scores import Answers, arena_traces, gsm8k, mtbench
from simulator.reproductions.cascadia.setup import Size, tiers_of
from simulator.reproductions.cascadia.tables import ScaledCurves

SCORES = "quality/arenabench_v1_gpt4_scores_even.csv.gz"
CHARS = "quality/arenabench_v1_answer_chars_even.csv.gz"
GSM8K = "quality/routellm_gsm8k.csv.gz"
MTBENCH = "quality/routellm_mtbench.csv.gz"
FILES = (SCORES, CHARS, GSM8K, MTBENCH)
"""In the data folder."""
TRACES = ("trace 1 (hard)", "trace 2 (mixed)", "trace 3 (easy)")
OTHERS = ("GSM8K", "MT-Bench")
"""On a cascade of two tiers (figure 7)."""
_GRID = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """Questions on a cascade, in plain values: it travels to other processes, and journals know it by them."""

    name: str
    """One of `TRACES` or `OTHERS`."""
    data: Path
    models: tuple[TierModel, ...]
    uniform_gpus: tuple[int, ...]
    curves: tuple[StoredCurve, ...]
    """Latency tables for all questions that the trace is a part of."""
    seed: int
    size: Size
    max_requests: int | None = None
    """Most requests of one run."""
    rate_per_s: float = 1.0

    @property
    def answers(self) -> Answers:
        """The judged answers to its questions."""
        return answers_of(self.data, self.seed)[self.name]

    @property
    def everything(self) -> Answers:
        """All questions that it is a part of; the tables are simulated for them."""
        return answers_of(self.data, self.seed)[whole_of(self.name)]

    @property
    def targets(self) -> tuple[float, ...]:
        """The quality targets that some thresholds reach, highest first."""
        targets = self.size.targets if self.name in TRACES else self.size.other_targets
        within = self.reachable
        return tuple(target for target in targets if target <= within)

    @property
    def reachable(self) -> float:
        """The best mean quality of any thresholds."""
        sample = self.answers.sample(1.0)
        return max(route(sample, each).quality for each in product(*candidate_thresholds(sample, _GRID)))

    def problem(self) -> PlanningProblem:
        """The planning problem at the trace's own rate."""
        return self.problem_of(self.answers.sample(self.rate_per_s))

    def at_load(self, load: float) -> "Workload":
        """The same at this part of what the largest model alone holds on all GPUs, by its tables."""
        problem = self.problem()
        largest = problem.sample.tiers - 1
        rows = np.arange(problem.sample.requests)
        curves = problem.source.curves(largest, rows, problem.sample.output_tokens[:, largest])
        return replace(self, rate_per_s=load * float(capacity(curves, problem.gpus).rates_per_s[problem.gpus, -1]))

    def in_chunks(self, step_tokens: int, curves: tuple[StoredCurve, ...]) -> "Workload":
        """The same with engines of another chunk size for the largest model, whose tables these are."""
        *smaller, largest = self.models
        models = (*smaller, replace(largest, step_tokens=step_tokens))
        return replace(self, models=models, curves=(*self.curves, *curves))

    def problem_of(self, sample: CascadeSample) -> PlanningProblem:
        """The same problem for other requests."""
        tiers = tiers_of(self.models, self.size.is_quick)
        source = ScaledCurves(self.everything.sample(1.0), sample, tiers, self.curves, self.seed)
        by_load = tuple(source.of_everything(tier) for tier in range(sample.tiers))
        return PlanningProblem(sample, tiers, source, setup.GPUS, setup.JUDGE_S, self.uniform_gpus, by_load)


def whole_of(workload: str) -> str:
    """The name of all questions that the workload is a part of, in `answers_of`."""
    return "arena" if workload in TRACES else workload


@lru_cache(maxsize=4)
def answers_of(data: Path, seed: int) -> Mapping[str, Answers]:
    """Every workload's answers by its name, and those of all traces together as "arena".

    Raises `TraceError` for files of another form.
    """
    traces, everything = arena_traces(data / SCORES, data / CHARS)
    assert tuple(traces) == TRACES
    return {
        **traces,
        "arena": everything,
        "GSM8K": gsm8k(data / GSM8K, seed),
        "MT-Bench": mtbench(data / MTBENCH, data / CHARS, data / SCORES, seed),
    }


def tables_of(
    data: Path, whole: str, models: tuple[TierModel, ...], tier: int, is_quick: bool, seed: int
) -> tuple[StoredCurve, ...]:
    """The latency tables of one tier for all questions of `whole`."""
    everything = answers_of(data, seed)[whole].sample(1.0)
    source = SimulatedCurves(everything, tiers_of(models, is_quick), seed=seed)
    source.curves(tier, np.arange(everything.requests), everything.output_tokens[:, tier])
    return source.measured


def single_request_s(problem: PlanningProblem, tier: int) -> float:
    """Mean time of the trace's requests, one by one, on one replica over the tensor parallel degree of a server."""
    widest = max(
        (replica for replica in problem.tiers[tier].replicas() if replica.shape.pp == 1),
        key=lambda replica: replica.shape.tp,
    )
    step_tokens = widest.engine.max_step_tokens
    lengths = zip(problem.sample.input_tokens.tolist(), problem.sample.output_tokens[:, tier].tolist(), strict=True)
    return float(np.mean([alone_s(widest.cost, step_tokens, inputs, outputs) for inputs, outputs in lengths]))
