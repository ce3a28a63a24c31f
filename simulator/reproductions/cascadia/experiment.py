"""All runs of the reproduction."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from controlplane.planning.cascade.bilevel import PlanRequest, plan
from controlplane.planning.cascade.search import Point
from simulator.cascade.curves import StoredCurve
from simulator.cascade.tier import TierModel
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.accuracy import Throughput, figure_2, table_1
from simulator.reproductions.cascadia.cases import (
    Case,
    SystemResult,
    at_own_rate,
    case_of,
    highest_rates,
    latency_quality_front,
    tuned,
    wants_highest_rates,
)
from simulator.reproductions.cascadia.drift import KEPT, Drifted, minute_s, run_drift
from simulator.reproductions.cascadia.setup import FULL, QUICK, Size
from simulator.reproductions.cascadia.systems import CASCADIA, COMPARED, SARATHI, STAND_ALONE, SYSTEMS
from simulator.reproductions.cascadia.workload import FILES, OTHERS, TRACES, Workload, tables_of, whole_of
from simulator.reproductions.run import ReproductionRun

DEEPSEEK = (setup.SMALL, setup.MIDDLE, setup.LARGE)
LLAMA = (setup.LLAMA_SMALL, setup.MIDDLE)
PLAN_GPUS = (32, 80)
OTHER_LOAD = setup.LOADS[1]
Curves = tuple[StoredCurve, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Everything that rows and page are made of."""

    size: Size
    traces: Mapping[str, Workload]
    """Those on three tiers."""
    others: Mapping[str, Workload]
    """Those on two tiers."""
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
    for file in FILES:
        run.data_file(file)
    tables = _tables(run)
    half = setup.GPUS // 2
    traces = {
        name: _workload(run, size, name, DEEPSEEK, setup.UNIFORM_GPUS, tables).at_load(load)
        for name, load in zip(TRACES, setup.LOADS, strict=True)
    }
    others = {
        name: _workload(run, size, name, LLAMA, (half, half), tables, size.other_requests).at_load(OTHER_LOAD)
        for name in OTHERS
    }
    small = run.run_jobs({"table 1": partial(table_1), "figure 2": partial(figure_2)})
    cases = _cases(run, (*traces.values(), *others.values()), _tables_in_chunks(run, size))
    of_traces = tuple(case for case in cases if case.trace in traces)
    middle = list(traces.values())[1]
    return Measured(
        size=size,
        traces=traces,
        others=others,
        cases=of_traces,
        other_cases=tuple(case for case in cases if case.trace in others),
        fronts={name: latency_quality_front(trace, setup.PLAN_QUALITY) for name, trace in traces.items()},
        drifted=_drifted(run, size, tuple(traces.values()), of_traces),
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


def _workload(
    run: ReproductionRun,
    size: Size,
    name: str,
    models: tuple[TierModel, ...],
    uniform_gpus: tuple[int, ...],
    tables: Mapping[str, Curves],
    max_requests: int | None = None,
) -> Workload:
    return Workload(name, run.data, models, uniform_gpus, tables[whole_of(name)], run.seed, size, max_requests)


def _tables(run: ReproductionRun) -> Mapping[str, Curves]:
    """The latency tables of all tiers, by the questions that they are for."""
    models = {whole_of(TRACES[0]): DEEPSEEK, **dict.fromkeys(OTHERS, LLAMA)}
    jobs = {
        f"tables of {model.model} for {whole}": partial(tables_of, run.data, whole, tiers, tier, run.quick, run.seed)
        for whole, tiers in models.items()
        for tier, model in enumerate(tiers)
    }
    found = iter(run.run_jobs(jobs).values())
    return {whole: tuple(curve for _ in tiers for curve in next(found)) for whole, tiers in models.items()}


def _tables_in_chunks(run: ReproductionRun, size: Size) -> Mapping[int, Curves]:
    """The latency tables of the largest tier of the traces, by the chunk size of its engines."""
    *smaller, largest = DEEPSEEK
    jobs = {
        f"tables in chunks of {tokens}": partial(
            tables_of,
            run.data,
            whole_of(TRACES[0]),
            (*smaller, replace(largest, step_tokens=tokens)),
            len(smaller),
            run.quick,
            run.seed,
        )
        for tokens in size.chunks
    }
    return dict(zip(size.chunks, run.run_jobs(jobs).values(), strict=True))


def _cases(run: ReproductionRun, workloads: Sequence[Workload], in_chunks: Mapping[int, Curves]) -> tuple[Case, ...]:
    asked = [(workload, target) for workload in workloads for target in workload.targets]
    measured = {
        (workload.name, target, system): (workload, target, system) for workload, target in asked for system in SYSTEMS
    }
    for workload, target in asked:
        if workload.name in TRACES and target == setup.SARATHI_QUALITY:
            for tokens, curves in in_chunks.items():
                named = workload.name, target, f"{SARATHI} in chunks of {tokens}"
                measured[named] = workload.in_chunks(tokens, curves), target, STAND_ALONE
    results = _results(run, measured)
    return tuple(case_of(workload, target, _systems(results, workload.name, target)) for workload, target in asked)


def _results(
    run: ReproductionRun, measured: Mapping[tuple[str, float, str], tuple[Workload, float, str]]
) -> Mapping[tuple[str, float, str], SystemResult]:
    named = {key: f"{key[0]}, target {key[1]:g}, {key[2]}" for key in measured}
    own = {named[key]: partial(at_own_rate, *of) for key, of in measured.items()}
    highest = {
        f"{named[key]}: rates": partial(highest_rates, *of) for key, of in measured.items() if wants_highest_rates(*of)
    }
    done = run.run_jobs(own | highest)
    results = {key: done[name] for key, name in named.items()}
    for key, name in named.items():
        if (rates := done.get(f"{name}: rates")) is not None:
            results[key] = replace(
                results[key], sustained_per_s=rates.sustained_per_s, saturated_per_s=rates.saturated_per_s
            )
    return results


def _systems(
    results: Mapping[tuple[str, float, str], SystemResult], name: str, target: float
) -> Mapping[str, SystemResult]:
    of_case = {key[2]: result for key, result in results.items() if key[:2] == (name, target)}
    systems = {system: of_case.pop(system) for system in SYSTEMS}
    if of_case:
        systems[SARATHI] = tuned((systems[STAND_ALONE], *of_case.values()))
    return systems


def _drifted(
    run: ReproductionRun, size: Size, traces: tuple[Workload, ...], cases: Sequence[Case]
) -> tuple[Drifted, ...]:
    jobs = {}
    for target in size.drift_targets:
        scales = {name: _sustained_scale(cases, target, name) for name in COMPARED}
        scales[KEPT] = scales[CASCADIA]
        known = {name: setup.DRIFT_LOAD * scale for name, scale in scales.items() if scale}
        for name, scale in known.items():
            lasting_s = minute_s(traces, max(known.values()))
            for number in range(size.seeds):
                jobs[f"drift, target {target:g}, {name} #{number}"] = partial(
                    run_drift, traces, scale, lasting_s, target, name, run.seed + number
                )
    return tuple(run.run_jobs(jobs).values())


def _sustained_scale(cases: Sequence[Case], target: float, system: str) -> float:
    """The most times the traces' own rates at which the system sustains each of them; 0 where it does not sustain one,
    or was not asked."""
    rates = [(case.result(system).sustained_per_s or 0.0, case.rate_per_s) for case in cases if case.quality == target]
    return min((sustained / own for sustained, own in rates), default=0.0)
