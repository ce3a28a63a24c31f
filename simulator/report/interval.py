"""What a handful of runs with different seeds says of a mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond ten the normal's is near enough.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
_NORMAL95 = 1.96


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean; 0 for a single value."""
    count = len(values)
    if count < 2:
        return 0.0
    quantile = _T95[count - 2] if count - 2 < len(_T95) else _NORMAL95
    half: float = quantile * stdev(values) / count**0.5
    return half


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with half of its 95 % interval; 0 for a single run."""

    mean: float | None
    half: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """One value a seed; None where there is none."""
        return cls(fmean(values), half_interval(values)) if values else cls(None)
