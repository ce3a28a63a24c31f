"""The best mix of replicas on f GPUs: the latency tables l_i(f) (Cascadia, section 3.2).

Replicas of a mix may differ in shape. A dispatcher that evens out their latencies (p95 or mean, whichever the table is
of) gives each the rate that it sustains within the common latency, so a mix serves a rate within L if the rates its
replicas sustain within L sum up to it. For each L the mix of the highest sum on at most f GPUs is an unbounded
knapsack, and l(f) is the lowest L whose knapsack holds the rate. That covers every mix without enumerating any; a test
enumerates them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.replica import ReplicaCurve, ReplicaShape, Statistic

LATENCY_LEVELS = 256
"""Number of latencies that are distinguished, in geometric steps: under 2 % each for a range of 1 to 100."""

_SLACK = 1e-9

Mix = tuple[tuple[ReplicaShape, int], ...]
"""(shape, how many of it), shapes ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """What f GPUs can sustain within each latency level, for one tier and one distribution of lengths."""

    statistic: Statistic
    """The statistic of the latencies that the levels stand for."""
    levels_s: NDArray[np.float64]
    """Shape (levels,), ascending."""
    rates_per_s: NDArray[np.float64]
    """Shape (max GPUs + 1, levels)."""
    chosen: NDArray[np.int16]
    """Shape as `rates_per_s`: the curve whose replica is added last; -1: one GPU fewer does as much."""
    curves: tuple[ReplicaCurve, ...]

    @property
    def max_gpus(self) -> int:
        """The largest number of GPUs f that the table has a row for."""
        return len(self.rates_per_s) - 1

    def latencies_s(self, rate_per_s: float) -> NDArray[np.float64]:
        """l(f) for f = 0..max; infinite where f GPUs do not hold the rate. Shape (max GPUs + 1,)."""
        if rate_per_s <= 0:
            return np.zeros(self.max_gpus + 1)
        return np.append(self.levels_s, np.inf)[self._level(rate_per_s)]

    def mix(self, gpus: int, rate_per_s: float) -> Mix:
        """The replicas that reach l(f); empty for a rate of 0 and where there are none."""
        level = int(self._level(rate_per_s)[gpus])
        if rate_per_s <= 0 or level == len(self.levels_s):
            return ()
        replicas: Counter[ReplicaShape] = Counter()
        while gpus > 0:
            choice = int(self.chosen[gpus, level])
            if choice < 0:
                gpus -= 1
                continue
            shape = self.curves[choice].shape
            replicas[shape] += 1
            gpus -= shape.gpus
        return tuple(sorted(replicas.items()))

    def latency_of_s(self, mix: Mix, rate_per_s: float) -> float:
        """The lowest level within which these replicas sustain the rate; infinite where they do not hold it."""
        by_shape = {curve.shape: curve for curve in self.curves}
        total: NDArray[np.float64] = np.zeros(len(self.levels_s))
        for shape, count in mix:
            total += count * by_shape[shape].sustained_rate_per_s(self.levels_s, self.statistic)
        holds = total >= rate_per_s * (1 - _SLACK)
        return float(self.levels_s[holds.argmax()]) if holds.any() else float("inf")

    def utilisation(self, mix: Mix, rate_per_s: float) -> float:
        """The rate over what these replicas sustain; 0 without replicas."""
        by_shape = {curve.shape: curve.saturation_per_s for curve in self.curves}
        sustained = sum(count * by_shape[shape] for shape, count in mix)
        return rate_per_s / sustained if sustained else 0.0

    def _level(self, rate_per_s: float) -> NDArray[np.intp]:
        """The first level that holds the rate, for each f; the number of levels where none does."""
        holds = self.rates_per_s >= rate_per_s
        return np.where(holds.any(axis=1), holds.argmax(axis=1), len(self.levels_s))


def capacity(curves: Sequence[ReplicaCurve], max_gpus: int, statistic: Statistic = "p95") -> Capacity:
    """Best mixes of the shapes that `curves` describes, for up to `max_gpus`. O(max_gpus x shapes x levels)."""
    levels_s = _levels_s(curves, statistic)
    sustained = [curve.sustained_rate_per_s(levels_s, statistic) for curve in curves]
    rates = np.zeros((max_gpus + 1, len(levels_s)))
    chosen = np.full(rates.shape, -1, np.int16)
    for gpus in range(1, max_gpus + 1):
        rates[gpus] = rates[gpus - 1]
        for number, curve in enumerate(curves):
            if curve.shape.gpus > gpus:
                continue
            total = rates[gpus - curve.shape.gpus] + sustained[number]
            better = total > rates[gpus] * (1 + 1e-12)
            rates[gpus][better] = total[better]
            chosen[gpus][better] = number
    return Capacity(statistic, levels_s, rates, chosen, tuple(curves))


def _levels_s(curves: Sequence[ReplicaCurve], statistic: Statistic) -> NDArray[np.float64]:
    if not curves:
        return np.ones(1)
    lowest = min(float(curve.latencies_s(statistic).min()) for curve in curves)
    highest = max(float(curve.latencies_s(statistic).max()) for curve in curves)
    levels: NDArray[np.float64] = np.geomspace(lowest, max(highest, lowest * 1.001), LATENCY_LEVELS)
    levels[0], levels[-1] = lowest, max(highest, lowest)
    return levels
