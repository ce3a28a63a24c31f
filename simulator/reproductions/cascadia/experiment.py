"""All runs of the reproduction."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from controlplane.planning.cascade.bilevel import PlanRequest, plan
from controlplane.planning.cascade.search import Point
from simulator.cascade.curves import StoredCurve
from simulator.cascade.tier import TierModel
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.accuracy import Throughput, figure_2, table_1
from simulator.reproductions.cascadia.cases import Case, Workload, latency_quality_front, measure_trace
from simulator.reproductions.cascadia.drift import DRIFTING, Drifted, run_drift
from simulator.reproductions.cascadia.scores import Answers, arena_traces, gsm8k, mtbench
from simulator.reproductions.cascadia.setup import FULL, QUICK, Size, tiers_of
from simulator.reproductions.cascadia.tables import measured_curves
from simulator.reproductions.run import ReproductionRun

SCORES = "quality/arenabench_v1_gpt4_scores_even.csv.gz"
CHARS = "quality/arenabench_v1_answer_chars_even.csv.gz"
GSM8K = "quality/routellm_gsm8k.csv.gz"
MTBENCH = "quality/routellm_mtbench.csv.gz"
DEEPSEEK = (setup.SMALL, setup.MIDDLE, setup.LARGE)
LLAMA = (setup.LLAMA_SMALL, setup.MIDDLE)
PLAN_GPUS = (32, 80)
OTHER_LOAD = setup.LOADS[1]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Everything that rows and page are made of."""

    size: Size
    traces: Mapping[str, Workload]
    """Of three tiers."""
    others: Mapping[str, Workload]
    """Of two tiers."""
    cases: tuple[Case, ...]
    other_cases: tuple[Case, ...]
    fronts: Mapping[str, tuple[Point, ...]]
    drifted: tuple[Drifted, ...]
    table_1: tuple[Throughput, ...]
    figure_2: tuple[Throughput, ...]
    plan_s: Mapping[int, float]
    """CPU seconds of one process for a plan, by GPUs; latency tables known."""


def run_all(run: ReproductionRun) -> Measured:
    """Tables first, then all else, in the run's processes."""
    size = QUICK if run.quick else FULL
    answers, everything = arena_traces(run.data_file(SCORES), run.data_file(CHARS))
    others = {
        "GSM8K": gsm8k(run.data_file(GSM8K), run.seed),
        "MT-Bench": mtbench(run.data_file(MTBENCH), run.data_file(CHARS), run.data_file(SCORES), run.seed),
    }
    curves = _tables(run, {"arena": (everything, DEEPSEEK), **{name: (each, LLAMA) for name, each in others.items()}})
    traces = {
        name: Workload(
            name,
            each,
            everything,
            DEEPSEEK,
            load,
            setup.UNIFORM_GPUS,
            curves["arena"],
            run.seed,
            size,
            size.targets,
            size.throughput_targets,
        )
        for (name, each), load in zip(answers.items(), setup.LOADS, strict=True)
    }
    half = setup.GPUS // 2
    other_workloads = {
        name: Workload(
            name,
            each,
            each,
            LLAMA,
            OTHER_LOAD,
            (half, half),
            curves[name],
            run.seed,
            size,
            size.other_targets,
            max_requests=size.other_requests,
        )
        for name, each in others.items()
    }
    return _measured(run, size, traces, other_workloads)


def _measured(
    run: ReproductionRun, size: Size, traces: Mapping[str, Workload], others: Mapping[str, Workload]
) -> Measured:
    of_cases = {
        f"{workload.name}, target {target:g}": partial(measure_trace, replace(workload, targets=(target,)))
        for workload in (*traces.values(), *others.values())
        for target in workload.targets
    }
    of_drift = {
        f"drift x {scale:g}, target {target:g}, {name}": partial(run_drift, tuple(traces.values()), scale, target, name)
        for scale in size.drift_scales
        for target in size.drift_targets
        for name in DRIFTING
    }
    drifted = run.run_jobs(of_drift)
    cases = [case for found in run.run_jobs(of_cases).values() for case in found]
    small = run.run_jobs({"table 1": table_1, "figure 2": figure_2})
    middle = list(traces.values())[1]
    fronts = {name: latency_quality_front(trace, setup.PLAN_QUALITY) for name, trace in traces.items()}
    return Measured(
        size=size,
        traces=traces,
        others=others,
        cases=tuple(case for case in cases if case.trace in traces),
        other_cases=tuple(case for case in cases if case.trace in others),
        fronts=fronts,
        drifted=tuple(drifted.values()),
        table_1=small["table 1"],
        figure_2=small["figure 2"],
        plan_s={gpus: plan_seconds(middle, gpus) for gpus in PLAN_GPUS},
    )


def plan_seconds(workload: Workload, gpus: int) -> float:
    """CPU time of a plan at a rate in proportion to the GPUs, when all tables are known."""
    problem = workload.problem()
    problem = problem.at(problem.sample.rate_per_s * gpus / problem.gpus)
    request = PlanRequest(gpus=gpus, quality=setup.PLAN_QUALITY, judge_s=problem.judge_s)
    plan(problem.sample, problem.source, request)
    started_s = time.process_time()
    plan(problem.sample, problem.source, request)
    return time.process_time() - started_s


def _tables(
    run: ReproductionRun, wanted: Mapping[str, tuple[Answers, tuple[TierModel, ...]]]
) -> dict[str, tuple[StoredCurve, ...]]:
    jobs = {
        f"tables of {models[tier].model} for {name}": partial(
            measured_curves, answers.sample(1.0), tiers_of(models, run.quick), tier, run.seed
        )
        for name, (answers, models) in wanted.items()
        for tier in range(len(models))
    }
    found = run.run_jobs(jobs)
    return {
        name: tuple(curve for job, curves in found.items() if job.endswith(f" for {name}") for curve in curves)
        for name in wanted
    }
