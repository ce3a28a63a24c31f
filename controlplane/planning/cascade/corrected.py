"""Latency tables corrected by what a whole deployment was measured to take.

A table is one of single replicas, each with the part of a tier's requests that it sustains. Replicas behind one policy
help each other out, so requests wait less than that says, and where shapes differ the policy may give each another
part. For deployments that are alike both are the same: a factor for each tier.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.replica import ReplicaCurve
from controlplane.planning.cascade.tables import CurveSource
from controlplane.planning.cascade.work import TierWork


@dataclass(frozen=True, slots=True)
class Correction:
    """A tier's measured latencies over those of its table."""

    p95: float = 1.0
    mean: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class CorrectedCurves:
    """A `CurveSource` whose latencies are another's times the tier's correction."""

    source: CurveSource
    corrections: tuple[Correction, ...]

    def curves(self, tier: int, requests: NDArray[np.intp], output_tokens: NDArray[np.int64]) -> Sequence[ReplicaCurve]:
        """See `CurveSource`."""
        by = self.corrections[tier]
        return tuple(
            replace(curve, p95_s=curve.p95_s * by.p95, mean_s=curve.mean_s * by.mean)
            for curve in self.source.curves(tier, requests, output_tokens)
        )

    def work(self, tier: int) -> TierWork:
        """See `CurveSource`: work is that of a request alone, which needs no correction."""
        return self.source.work(tier)
