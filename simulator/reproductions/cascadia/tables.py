"""Latency tables of the tiers, simulated once for all requests and scaled to those of a trace.

Traces are parts of one set of questions. To simulate every replica for every part would take longer than all the rest,
and its curves differ in little but the work per request: they are scaled by it, as the planner does between routings.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.replica import ReplicaCurve
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.tables import TAIL
from controlplane.planning.cascade.work import TierWork
from simulator.cascade.curves import SimulatedCurves, StoredCurve
from simulator.cascade.tier import Tier


class ScaledCurves:
    """A `CurveSource` over a sample, from the curves of all requests."""

    def __init__(
        self,
        everything: CascadeSample,
        sample: CascadeSample,
        tiers: Sequence[Tier],
        known: Sequence[StoredCurve],
        seed: int,
    ) -> None:
        self._everything = SimulatedCurves(everything, tiers, known=known, seed=seed)
        self._all = np.arange(everything.requests)
        self._all_tokens = everything.output_tokens
        self._sample = SimulatedCurves(sample, tiers, seed=seed)

    def work(self, tier: int) -> TierWork:
        return self._sample.work(tier)

    def of_everything(self, tier: int) -> tuple[ReplicaCurve, ...]:
        """Curves for the whole workload, without scaling."""
        return self._everything.curves(tier, self._all, self._all_tokens[:, tier])

    def curves(
        self, tier: int, requests: NDArray[np.intp], output_tokens: NDArray[np.int64]
    ) -> tuple[ReplicaCurve, ...]:
        of_all = self._everything.work(tier).whole_s
        of_these = self._sample.work(tier).only(requests).seconds(output_tokens)
        work = float(of_these.mean() / of_all.mean())
        tail = float(np.quantile(of_these, TAIL) / np.quantile(of_all, TAIL))
        return tuple(
            ReplicaCurve(
                curve.shape,
                curve.rates_per_s / work,
                curve.p95_s * tail,
                curve.mean_s * work,
                curve.saturation_per_s / work,
            )
            for curve in self.of_everything(tier)
        )
