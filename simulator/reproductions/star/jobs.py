"""Which runs a reproduction of STAR is made of, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from controlplane.policies.rescheduling.parameters import ReschedulerParameters
from simulator.report.interval import Estimate
from simulator.reproductions.run import EngineEra
from simulator.reproductions.star.experiment import Experiment, Reschedules, Result, Rival, run
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
System = Reschedules | Rival

SWEPT: tuple[System, ...] = (*Reschedules, *Rival)
"""Systems on the small cluster at each of its rates, in both eras."""
LONG_INTERVAL_S = 60.0
SERVEGEN_RATE = 1.1
"""Requests per second, at which these shorter answers fill the small cluster about as ShareGPT's do at 0.17."""
SEVERAL = 8
SEVERAL_INSTANCES = 64


def experiments(plan: Plan, servegen: Workload, seed: int, era: EngineEra) -> Jobs:
    """All runs but for the repetitions with other seeds."""
    jobs: Jobs = {}
    for swept in SWEPT:
        small = Experiment(SMALL, SHAREGPT, swept, SMALL_RATE, plan.seconds, SMALL_SLO, seed)
        for of_era in EngineEra:
            for rate in plan.sweep:
                jobs[small_key(swept, rate, of_era)] = replace(small, rate_per_s=rate, engine_era=of_era)
    for system in Reschedules:
        small = Experiment(SMALL, SHAREGPT, system, SMALL_RATE, plan.seconds, SMALL_SLO, seed, engine_era=era)
        large = Experiment(LARGE, SHAREGPT, system, LARGE_RATE, plan.seconds, LARGE_SLO, seed, engine_era=era)
        jobs[f"alpaca {system}"] = replace(small, workload=ALPACA)
        jobs[f"servegen {system}"] = replace(small, workload=servegen, rate_per_s=SERVEGEN_RATE)
        for rate in (LARGE_RATE, LARGE_STRESS):
            jobs[large_key(system, rate)] = replace(large, rate_per_s=rate)
        for instances in plan.scale_sizes:
            jobs[scale_key(system, instances)] = replace(
                small,
                hardware=scaled(instances),
                rate_per_s=SCALE_RATE_PER_INSTANCE * instances,
                seconds=plan.scale_seconds,
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
    """Every run with each of the seeds, under `NAME #SEED`."""
    return {
        f"{name} #{number}": replace(experiment, seed=experiment.seed + number)
        for number in range(seeds)
        for name, experiment in jobs.items()
    }


def as_calls(jobs: Jobs) -> dict[str, Callable[[], Result]]:
    """The longest first, so that no process is left alone with one at the end."""
    ordered = sorted(jobs.items(), key=lambda item: -item[1].rate_per_s * item[1].hardware.decodes * item[1].seconds)
    return {name: partial(run, experiment) for name, experiment in ordered}


class Results:
    """The runs by name; figures are means over seeds."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self._runs: dict[str, list[Result]] = {}
        for name, result in sorted(results.items(), key=lambda item: item[1].seed):
            self._runs.setdefault(name.rpartition(" #")[0], []).append(result)

    def first(self, name: str) -> Result:
        """The run with the first seed."""
        return self._runs[name][0]

    def figure(self, name: str, what: str) -> Estimate:
        """One attribute of a `Result`."""
        return Estimate.of(self._values(name, what))

    def mean(self, name: str, what: str) -> float:
        """The same without its interval."""
        return float(np.mean(self._values(name, what)))

    def ratio(self, names: Sequence[tuple[str, str]], what: str) -> Estimate:
        """The geometric mean of the first runs' attribute over the second ones': of pairs with one seed, and so with
        equal requests. None where one is 0."""
        pairs = np.array([self.pairs(ours, theirs, what) for ours, theirs in names])
        if not pairs.all():
            return Estimate(None)
        of_pairs = np.log(pairs[..., 0] / pairs[..., 1])
        return Estimate.of(np.exp(of_pairs.mean(axis=0)).tolist())

    def pairs(self, ours: str, theirs: str, what: str) -> list[tuple[float, float]]:
        """The attribute of both on equal requests, seed by seed."""
        return list(zip(self._values(ours, what), self._values(theirs, what), strict=True))

    def _values(self, name: str, what: str) -> list[float]:
        return [float(getattr(result, what)) for result in self._runs[name]]


def small_key(system: System, rate: float, era: EngineEra) -> str:
    """ShareGPT on the small cluster."""
    return f"small {era} {rate:g} {system}"


def large_key(system: Reschedules, rate: float) -> str:
    """ShareGPT on the large cluster."""
    return f"large {rate:g} {system}"


def scale_key(system: Reschedules, instances: int) -> str:
    """Key of the run on this number of instances, for figure 13."""
    return f"scale {instances} {system}"
