"""How long requests will still run, as a range: what may be little, what is as likely as not, what may be much."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

QUANTILES: Final = (0.1, 0.5, 0.9)
COVERAGE: Final = QUANTILES[-1] - QUANTILES[0]
"""Share of the requests whose length is to lie in the range."""

_NARROWEST: Final = 0.1
_MOST_TOKENS: Final = 1e9

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LengthQuantiles:
    """Remaining tokens of several requests, each of shape (requests,): as many or fewer with a probability of 10, 50
    and 90 %."""

    low: Floats
    median: Floats
    high: Floats

    @classmethod
    def of_columns(cls, columns: Floats) -> "LengthQuantiles":
        """From shape (requests, 3), in any order; a running request has at least one token to come."""
        ordered = np.clip(np.sort(columns, axis=1), 1.0, _MOST_TOKENS)
        return cls(ordered[:, 0], ordered[:, 1], ordered[:, 2])

    @property
    def log_widths(self) -> Floats:
        """Logarithms of how many times `low` `high` is, at least `_NARROWEST`."""
        widths: Floats = np.maximum(np.log(self.high / self.low), _NARROWEST)
        return widths

    def columns(self) -> Floats:
        """Shape (requests, 3)."""
        return np.stack([self.low, self.median, self.high], axis=1)

    def cover(self, remaining_tokens: Floats) -> NDArray[np.bool_]:
        """Whether what came lies in the range, shape (requests,)."""
        inside: NDArray[np.bool_] = (self.low <= remaining_tokens) & (remaining_tokens <= self.high)
        return inside


def residual_life(
    sorted_lengths: NDArray[np.int64], generated_tokens: Floats, fewest_survivors: int
) -> LengthQuantiles:
    """Of the requests that got longer than each is now, how much longer: the quantiles of the mean residual's
    (`length_fallback`) distribution. Older than nearly all, a request is taken for one of the age that the last
    `fewest_survivors` outlived. `sorted_lengths` are not empty."""
    count = len(sorted_lengths)
    oldest_known = max(0, count - fewest_survivors)
    first = np.minimum(np.searchsorted(sorted_lengths, generated_tokens, side="right"), oldest_known)
    ages = np.minimum(generated_tokens, sorted_lengths[oldest_known] - 1)
    ranks = first[:, None] + np.floor(np.array(QUANTILES) * (count - first)[:, None]).astype(np.int64)
    return LengthQuantiles.of_columns(sorted_lengths[np.minimum(ranks, count - 1)] - ages[:, None])
