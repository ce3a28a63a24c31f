"""LMetric's experiments: the runs, and the results that rows and tables are made from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from simulator.fluid_bound import fluid_bound
from simulator.report.outcome import RequestOutcome
from simulator.report.report import Report, Slo, summarise
from simulator.reproductions.lmetric import setup
from simulator.reproductions.lmetric.hotspot import HOTSPOT_CONTENDERS, HotspotResult, measure_hotspot
from simulator.reproductions.measurement import (
    Workload,
    outcomes_at,
    own_req_s,
    requests_of,
)
from simulator.reproductions.run import ReproductionRun

# How unevenly prefill work falls on the instances (LMetric, section 4.3 and figure 27).


WINDOW_S = 10.0


def prefill_imbalance(outcomes: Sequence[RequestOutcome], instances: int) -> float:
    """Mean over windows of 10 s of the gap between the instances that prefilled most and least, in tokens.

    Tokens count in the window in which the request's first token came out; cached ones were not computed. The paper
    shows the time of prefill of two instances, whose difference this is for the two that differ most.
    """
    served = [outcome for outcome in outcomes if outcome.first_token_s is not None and not outcome.error]
    if not served:
        return 0.0
    windows = np.array([int((outcome.first_token_s or 0.0) // WINDOW_S) for outcome in served])
    names = {name: number for number, name in enumerate(sorted({outcome.instance_id for outcome in served}))}
    tokens = np.zeros((int(windows.max()) + 1, max(instances, len(names))))
    for window, outcome in zip(windows.tolist(), served, strict=True):
        tokens[window, names[outcome.instance_id]] += outcome.input_tokens - outcome.cached_tokens
    return float((tokens.max(axis=1) - tokens.min(axis=1)).mean())


SWEEP = (0.25, 0.5, 0.75, 0.9)
"""Shares of the highest rate that are run."""
OVERLOAD = 16.0
"""Times the trace's own rate: far beyond what is served."""
HALF = 0.5
"""Where everything else is measured (section 4.1)."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Results of one policy under one load."""

    report: Report
    imbalance_tokens: float
    ttft_p50_ms: float
    ttft_p95_ms: float


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest rate that the testbed serves of a trace."""

    req_s: float
    own_req_s: float
    """Rate of the trace at scale 1."""

    def scale(self, share: float) -> float:
        """At which the trace offers this share of the highest rate."""
        return share * self.req_s / self.own_req_s


@dataclass(frozen=True, slots=True)
class OnLoad:
    """All runs of one trace on one model."""

    highest: Highest
    at_half: Mapping[str, Placed]
    """By contender: LMetric and variants by name, rivals as `NAME: SETTING`."""
    best: Mapping[str, str]
    """For each rival the setting with the lowest mean TTFT, as it stands in `at_half`."""
    fluid_req_s: float
    """Rate that no schedule could exceed."""
    sweep: Mapping[str, Mapping[float, Placed]]
    """By contender, rivals at their best settings, then by share of the highest rate."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of all runs: the loads by name, and the hotspot by policy."""

    loads: Mapping[str, OnLoad]
    hotspot: Mapping[str, HotspotResult]


def run_all(run: ReproductionRun) -> Measured:
    """Three rounds of independent jobs: the highest rates; at half of them all policies; the rates between."""
    highest = run.run_jobs({load.name: partial(_highest, run_input(run, load), load, run.seed) for load in setup.LOADS})
    first: dict[str, Callable[[], Placed | HotspotResult]] = {}
    for load in setup.LOADS:
        scale = highest[load.name].scale(HALF)
        for name, contender in contenders(load.model).items():
            first[f"{load.name} | {name}"] = partial(_place, run_input(run, load), load, contender, scale, run.seed)
    for name, contender in HOTSPOT_CONTENDERS.items():
        first[f"hotspot | {name}"] = partial(measure_hotspot, contender, run.seed, run.quick)
    results = run.run_jobs(first)
    at_half = {load.name: _of(results, load.name) for load in setup.LOADS}
    best = {load.name: _best(at_half[load.name], load.model) for load in setup.LOADS}
    sweeps = _sweeps(run, highest, best)
    return Measured(
        {
            load.name: OnLoad(
                highest[load.name],
                at_half[load.name],
                best[load.name],
                _fluid_req_s(run_input(run, load), load, run.seed),
                _swept(sweeps, load.name, at_half[load.name], best[load.name]),
            )
            for load in setup.LOADS
        },
        _hotspots(results),
    )


def run_input(run: ReproductionRun, load: setup.Load) -> Workload:
    """The workload as this run replays it."""
    return setup.workload_of(run, load)


def contenders(model: str) -> dict[str, setup.Contender]:
    """Everything that is run at half the highest rate."""
    tuned = {
        f"{name}: {setting}": contender
        for name, settings in setup.rivals(model).items()
        for setting, contender in settings.items()
    }
    return {**setup.PLAIN, **tuned}


def swept(best: Mapping[str, str]) -> tuple[str, ...]:
    """Who is measured at other rates: LMetric, vLLM's policy, and each rival at its best."""
    return (setup.OURS, setup.VLLM, *best.values())


def _highest(workload: Workload, load: setup.Load, seed: int) -> Highest:
    """What the testbed serves when far more is offered than it can, by vLLM's own policy: an operator's profiling.

    The last tenth is left out, in which ever fewer instances have work.
    """
    system = setup.system_of(load.model, setup.PLAIN[setup.VLLM], seed)
    outcomes = outcomes_at(system, workload, OVERLOAD)
    ended_s = sorted(outcome.finished_s for outcome in outcomes)
    counted = max(1, round(0.9 * len(ended_s)))
    return Highest(counted / ended_s[counted - 1], own_req_s(workload, system))


def _place(workload: Workload, load: setup.Load, contender: setup.Contender, scale: float, seed: int) -> Placed:
    system = setup.system_of(load.model, contender, seed)
    return placed(outcomes_at(system, workload, scale), workload.slo, contender.policy, seed)


def placed(outcomes: list[RequestOutcome], slo: Slo, policy: str, seed: int) -> Placed:
    """The results that are kept of a run."""
    report = summarise(outcomes, slo, policy=policy, seed=seed)
    ttft_ms = [outcome.ttft_ms for outcome in outcomes if outcome.ttft_ms is not None] or [0.0]
    p50, p95 = np.quantile(ttft_ms, (0.5, 0.95)).tolist()
    return Placed(report, prefill_imbalance(outcomes, setup.INSTANCES), p50, p95)


def _fluid_req_s(workload: Workload, load: setup.Load, seed: int) -> float:
    system = setup.system_of(load.model, setup.PLAIN[setup.OURS], seed)
    return fluid_bound(requests_of(workload, system), system.cluster, system.cost).requests_per_s


def _of(results: Mapping[str, Placed | HotspotResult], load: str) -> dict[str, Placed]:
    prefix = f"{load} | "
    return {
        name.removeprefix(prefix): result
        for name, result in results.items()
        if name.startswith(prefix) and isinstance(result, Placed)
    }


def _hotspots(results: Mapping[str, Placed | HotspotResult]) -> dict[str, HotspotResult]:
    return {name.partition(" | ")[2]: result for name, result in results.items() if isinstance(result, HotspotResult)}


def _best(at_half: Mapping[str, Placed], model: str) -> dict[str, str]:
    best: dict[str, str] = {}
    for rival, settings in setup.rivals(model).items():
        names = [f"{rival}: {setting}" for setting in settings if setting != "not tuned"]
        best[rival] = min(names, key=lambda name: at_half[name].report.ttft_ms.mean or float("inf"))
    return best


def _sweeps(
    run: ReproductionRun, highest: Mapping[str, Highest], best: Mapping[str, Mapping[str, str]]
) -> dict[str, Placed]:
    jobs: dict[str, Callable[[], Placed]] = {}
    for load in setup.LOADS:
        everyone = contenders(load.model)
        for name in swept(best[load.name]):
            for share in SWEEP:
                if share == HALF:
                    continue
                scale = highest[load.name].scale(share)
                jobs[f"{load.name} | {name} | {share:g}"] = partial(
                    _place, run_input(run, load), load, everyone[name], scale, run.seed
                )
    return run.run_jobs(jobs)


def _swept(
    sweeps: Mapping[str, Placed], load: str, at_half: Mapping[str, Placed], best: Mapping[str, str]
) -> dict[str, dict[float, Placed]]:
    return {
        name: {share: at_half[name] if share == HALF else sweeps[f"{load} | {name} | {share:g}"] for share in SWEEP}
        for name in swept(best)
    }
