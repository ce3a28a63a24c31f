"""Which runs a reproduction of STAR is made of, by name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from controlplane.policies.rescheduling.parameters import ReschedulerParameters
from simulator.reproductions.star.experiment import Experiment, Reschedules, Result, run
from simulator.reproductions.star.lengths import ALPACA, SHAREGPT, Workload
from simulator.reproductions.star.setups import (
    BINS,
    LARGE,
    LARGE_RATE,
    LARGE_SLO,
    LARGE_STRESS,
    SCALE_RATE_PER_INSTANCE,
    SMALL,
    SMALL_RATE,
    SMALL_SLO,
    SMALL_STRESS,
    Plan,
    scaled,
)

Jobs = dict[str, Experiment]

LONG_INTERVAL_S = 60.0
SERVEGEN_RATE = 1.1
"""Requests per second, at which these shorter answers fill the small cluster about as ShareGPT's do at 0.17."""
SEVERAL = 8
SEVERAL_INSTANCES = 64


def experiments(plan: Plan, servegen: Workload, seed: int) -> Jobs:
    """All runs but for the repetitions with other seeds."""
    jobs: Jobs = {}
    for system in Reschedules:
        small = Experiment(SMALL, SHAREGPT, system, SMALL_RATE, plan.seconds, SMALL_SLO, seed)
        large = Experiment(LARGE, SHAREGPT, system, LARGE_RATE, plan.seconds, LARGE_SLO, seed)
        for rate in sorted({*plan.sweep, SMALL_RATE, SMALL_STRESS}):
            jobs[small_key(system, rate)] = replace(small, rate_per_s=rate)
        jobs[f"alpaca {system}"] = replace(small, workload=ALPACA, rate_per_s=SMALL_RATE)
        jobs[f"servegen {system}"] = replace(small, workload=servegen, rate_per_s=SERVEGEN_RATE)
        for rate in (LARGE_RATE, LARGE_STRESS):
            jobs[large_key(system, rate)] = replace(large, rate_per_s=rate)
        for instances in plan.scale_sizes:
            jobs[scale_key(system, instances)] = Experiment(
                scaled(instances),
                SHAREGPT,
                system,
                SCALE_RATE_PER_INSTANCE * instances,
                plan.scale_seconds,
                SMALL_SLO,
                seed,
            )
        if system is not Reschedules.VLLM:
            slow = ReschedulerParameters(interval_s=LONG_INTERVAL_S)
            jobs[f"slow {system}"] = replace(small, rate_per_s=SMALL_STRESS, parameters=slow)
    predicted = jobs[large_key(Reschedules.PREDICTED, LARGE_STRESS)]
    for name, edges in BINS.items():
        jobs[f"bins {name}"] = replace(predicted, bins=edges)
    for every in (1, 100):
        jobs[f"every {every}"] = replace(predicted, predict_every=every)
    several = ReschedulerParameters(migrations=SEVERAL)
    for system in (Reschedules.CURRENT, Reschedules.PREDICTED):
        jobs[f"several {system}"] = replace(jobs[scale_key(system, SEVERAL_INSTANCES)], parameters=several)
    return jobs


def with_seeds(jobs: Jobs, seeds: int) -> Jobs:
    """Every run but the scaled ones with each of the seeds, under `NAME #SEED`."""
    return {
        f"{name} #{number}": replace(experiment, seed=experiment.seed + number)
        for name, experiment in jobs.items()
        for number in range(1 if name.startswith(("scale", "several")) else seeds)
    }


def as_calls(jobs: Jobs) -> dict[str, Callable[[], Result]]:
    """The longest first, so that no process is left alone with one at the end."""
    ordered = sorted(jobs.items(), key=lambda item: -item[1].rate_per_s * item[1].hardware.decodes * item[1].seconds)
    return {name: partial(run, experiment) for name, experiment in ordered}


class Results:
    """The runs by name; figures are means over seeds."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self._runs: dict[str, list[Result]] = {}
        for name, result in results.items():
            self._runs.setdefault(name.rpartition(" #")[0], []).append(result)

    def first(self, name: str) -> Result:
        """The run with the first seed."""
        return min(self._runs[name], key=lambda result: result.experiment.seed)

    def figure(self, name: str, what: str) -> float:
        """One attribute of a `Result`."""
        return float(np.mean([getattr(result, what) for result in self._runs[name]]))

    def full_share(self, name: str) -> float:
        """Share of the time in which some decode instance holds more than 99 % of its KV blocks (figure 12)."""
        return float(np.mean([(result.fullest > 0.99).mean() for result in self._runs[name]]))


def small_key(system: Reschedules, rate: float) -> str:
    """ShareGPT on the small cluster."""
    return f"small {rate:g} {system}"


def large_key(system: Reschedules, rate: float) -> str:
    """ShareGPT on the large cluster."""
    return f"large {rate:g} {system}"


def scale_key(system: Reschedules, instances: int) -> str:
    """Key of the run on this number of instances, for figure 13."""
    return f"scale {instances} {system}"
