"""One replica of a tier's model: its shape, and how its latency grows with the rate it is given."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mesh.errors import ConfigurationError

Statistic = Literal["p95", "mean"]
"""Statistic of the latencies of a replica's requests."""


@dataclass(frozen=True, slots=True, order=True)
class ReplicaShape:
    """GPUs that one copy of the model is cut over: tensor x pipeline parallel."""

    tp: int
    pp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ConfigurationError(f"tensor and pipeline parallel degrees are at least 1, got {self}")

    @property
    def gpus(self) -> int:
        """GPUs of one replica: tensor times pipeline parallel degree."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP={self.tp}" if self.pp == 1 else f"TP={self.tp},PP={self.pp}"


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaCurve:
    """Latency of one replica at ascending rates, for requests of certain lengths."""

    shape: ReplicaShape
    rates_per_s: NDArray[np.float64]
    """Ascending, above 0; the first so low that requests hardly meet. Nothing beyond the last is planned."""
    p95_s: NDArray[np.float64]
    mean_s: NDArray[np.float64]
    saturation_per_s: float
    """The rate that the replica sustains: above the last."""

    def __post_init__(self) -> None:
        if not len(self.rates_per_s) == len(self.p95_s) == len(self.mean_s) or not len(self.rates_per_s):
            raise ConfigurationError("a replica's curve needs as many latencies as rates, and at least one")
        if self.rates_per_s[0] <= 0 or (np.diff(self.rates_per_s) <= 0).any():
            raise ConfigurationError("a replica's curve needs ascending rates above 0")
        if self.saturation_per_s < self.rates_per_s[-1]:
            raise ConfigurationError("a replica's curve ends below the rate that the replica sustains")
        if (self.p95_s <= 0).any() or (self.mean_s <= 0).any():
            raise ConfigurationError("a replica's curve needs latencies above 0")

    def latencies_s(self, statistic: Statistic) -> NDArray[np.float64]:
        """The measured latencies in seconds, one for each rate."""
        return self.p95_s if statistic == "p95" else self.mean_s

    def sustained_rate_per_s(self, within_s: NDArray[np.float64], statistic: Statistic) -> NDArray[np.float64]:
        """The highest rate at which the replica's p95 or mean stays within each given latency; shape as given.

        Linear between the measured points; 0 below the latency of a replica that is all but idle. Measured
        latencies that fall with the rate are noise and count as the highest up to there.
        """
        latencies_s = np.maximum.accumulate(self.latencies_s(statistic))
        # Of equal latencies the last, highest, rate counts.
        last = np.append(latencies_s[1:] > latencies_s[:-1], True)
        rates: NDArray[np.float64] = np.interp(within_s, latencies_s[last], self.rates_per_s[last], left=0.0)
        first_s = latencies_s[0]
        return np.where(within_s < first_s, 0.0, np.maximum(rates, self.rates_per_s[0]))
