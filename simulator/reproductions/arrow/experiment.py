"""What is run for Arrow's figures 7, 8 and 9, and for the threshold that the paper leaves open."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from simulator.fluid_bound import fluid_bound
from simulator.reproductions.arrow import setup
from simulator.reproductions.measurement import (
    LoadPoint,
    SustainedLoad,
    System,
    Workload,
    find_sustainable_rate,
    measure,
    own_req_s,
    requests_of,
)
from simulator.reproductions.run import ReproductionRun
from simulator.reproductions.sustainable_rate import RateSearch

Rates: TypeAlias = Mapping[str, Mapping[str, SustainedLoad]]
"""Sustainable rates by trace, then by system."""

SCALING_TRACE = setup.TRACES[0]
GPU_COUNTS = (4, 6, 8, 12, 16)
SCALED = (4, 16)
"""For which of these Arrow's sustainable rate is looked for."""
LOW_LOADS = (0.1, 0.25, 0.5, 0.75, 1.0)
LOW_LOAD_RATE = 1.05
"""Rate at which these are compared, as a share of what Arrow sustains with the default."""
SWEEP = (0.75, 1.0, 1.25)
"""Rates at which the two static policies are compared, as shares of the lower of their sustainable rates."""
OVERLOAD = 2.0
"""Overload, as a multiple of Arrow's sustainable rate."""
HOST_STEP_MS = 10.0
"""A what-if: what each step takes on the host, in engines that do not hide it behind the device's work."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All results that Arrow's rows, tables and plots are made from."""

    prefill_tokens_s: Mapping[str, Mapping[str, float]]
    """What all instances of a system together can prefill of a trace's prompts, one by one, by trace."""
    fluid_bounds: Mapping[str, Mapping[str, float]]
    """Requests per second that no schedule on the instances of a system could exceed, by trace and system."""
    rates: Rates
    host_bound: Rates
    """Some of these systems with `HOST_STEP_MS`, for one trace."""
    sweeps: Mapping[str, Mapping[str, tuple[LoadPoint, ...]]]
    """Minimal load and round robin at equal rates, by trace."""
    scaling: Mapping[str, Mapping[int, LoadPoint]]
    """Arrow and minimal load at one rate, by number of GPUs."""
    scaled_rates: Mapping[int, SustainedLoad]
    """Arrow's sustainable rate by number of GPUs."""
    low_loads: Mapping[str, Mapping[float, LoadPoint]]
    """Arrow by trace and by the fraction below which decode load is low."""
    overload: Mapping[str, LoadPoint]
    """Arrow at twice its sustainable rate, by trace."""


def run_all(run: ReproductionRun) -> Measured:
    """Everything, in two rounds of independent jobs: the second asks at rates that the first has found."""
    searches = run.run_jobs(_searches(run))
    rates = {trace.name: {name: searches[f"{trace.name}: {name}"] for name in setup.SYSTEMS} for trace in setup.TRACES}
    points = run.run_jobs(_points(run, rates))
    return Measured(
        prefill_tokens_s={
            trace.name: {
                name: prefill_tokens_s(system, setup.workload(trace, run))
                for name, system in setup.systems(trace, run.seed).items()
            }
            for trace in setup.TRACES
        },
        fluid_bounds={
            trace.name: {
                name: _fluid_bound_req_s(system, setup.workload(trace, run))
                for name, system in setup.systems(trace, run.seed).items()
            }
            for trace in setup.TRACES
        },
        rates=rates,
        host_bound={
            SCALING_TRACE.name: {name: searches[f"host {HOST_STEP_MS:g} ms: {name}"] for name in setup.HOST_SYSTEMS}
        },
        sweeps={
            trace.name: {
                name: tuple(points[f"{trace.name}: {name} x {share:g}"] for share in SWEEP) for name in setup.STATIC
            }
            for trace in setup.TRACES
        },
        scaling={
            name: {gpus: points[f"{gpus} GPUs: {name}"] for gpus in GPU_COUNTS}
            for name in (setup.ARROW, setup.MINIMAL_LOAD)
        },
        scaled_rates={gpus: searches[f"{gpus} GPUs"] for gpus in SCALED},
        low_loads={
            trace.name: {low: points[f"{trace.name}: low_load {low:g}"] for low in LOW_LOADS} for trace in setup.TRACES
        },
        overload={trace.name: points[f"{trace.name}: overload"] for trace in setup.TRACES},
    )


def _searches(run: ReproductionRun) -> dict[str, Callable[[], SustainedLoad]]:
    jobs: dict[str, Callable[[], SustainedLoad]] = {}

    def add(name: str, system: System, workload: Workload) -> None:
        jobs[name] = partial(find_sustainable_rate, system, workload, _search(run, system, workload))

    for trace in reversed(setup.TRACES):  # the longest first
        for name, system in setup.systems(trace, run.seed).items():
            add(f"{trace.name}: {name}", system, setup.workload(trace, run))
    workload = setup.workload(SCALING_TRACE, run)
    host_bound = setup.systems(SCALING_TRACE, run.seed, HOST_STEP_MS)
    for name in setup.HOST_SYSTEMS:
        add(f"host {HOST_STEP_MS:g} ms: {name}", host_bound[name], workload)
    for gpus in SCALED:
        add(f"{gpus} GPUs", _scaled(gpus, run.seed)[setup.ARROW], workload)
    return jobs


def _points(run: ReproductionRun, rates: Rates) -> dict[str, Callable[[], LoadPoint]]:
    jobs: dict[str, Callable[[], LoadPoint]] = {}
    for trace in reversed(setup.TRACES):
        workload, systems = setup.workload(trace, run), setup.systems(trace, run.seed)
        found = {name: load.found.scale or load.points[0].scale for name, load in rates[trace.name].items()}
        for name in setup.STATIC:
            for share in SWEEP:
                scale = share * min(found[each] for each in setup.STATIC)
                jobs[f"{trace.name}: {name} x {share:g}"] = partial(measure, systems[name], workload, scale)
        arrow = systems[setup.ARROW]
        jobs[f"{trace.name}: overload"] = partial(measure, arrow, workload, OVERLOAD * found[setup.ARROW])
        for low in LOW_LOADS:
            changed = replace(arrow, parameters={**arrow.parameters, "low_load": low})
            jobs[f"{trace.name}: low_load {low:g}"] = partial(
                measure, changed, workload, LOW_LOAD_RATE * found[setup.ARROW]
            )
    found_scale = rates[SCALING_TRACE.name][setup.ARROW].found.scale or 1.0
    for gpus in GPU_COUNTS:
        for name, system in _scaled(gpus, run.seed).items():
            workload = setup.workload(SCALING_TRACE, run)
            jobs[f"{gpus} GPUs: {name}"] = partial(measure, system, workload, found_scale)
    return jobs


def _scaled(gpus: int, seed: int) -> dict[str, System]:
    fleet = setup.fleet_of(gpus, seed)
    return {
        setup.ARROW: setup.arrow(SCALING_TRACE, fleet),
        setup.MINIMAL_LOAD: replace(fleet, policy="static_pd"),
    }


def prefill_tokens_s(system: System, workload: Workload) -> float:
    """Prompt tokens a second that all instances of a system prefill together, prompts one by one."""
    requests = requests_of(workload, system)
    prefill_ms = sum(setup.curve_of(system).prefill_ms(request.input_tokens) for request in requests)
    return 1000 * system.cluster.instances * sum(request.input_tokens for request in requests) / prefill_ms


def _fluid_bound_req_s(system: System, workload: Workload) -> float:
    return fluid_bound(requests_of(workload, system), system.cluster, system.cost).requests_per_s


def _search(run: ReproductionRun, system: System, workload: Workload) -> RateSearch:
    """From a rate at which the instances would spend a third of their time on prompts."""
    requests = requests_of(workload, system)
    mean_tokens = sum(request.input_tokens for request in requests) / len(requests)
    busy_at_once = own_req_s(workload, system) * mean_tokens / prefill_tokens_s(system, workload)
    start = min(max(0.33 / busy_at_once, 0.05), 200.0)
    return RateSearch(start_scale=start, growth=1.6, tolerance=0.1 if run.quick else 0.03)
