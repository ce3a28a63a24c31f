"""How many tokens requests have still to come where no predictor can be asked."""

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

REMEMBERED: Final = 1024
"""Requests that ended last."""
FEWEST_SURVIVORS: Final = 8
"""As many of them must have outlived an age, lest their mean be an accident."""


class MeanResidual:
    """The mean residual life: of the requests that generated more tokens than this one has, how many more on average.

    It knows nothing of a request but its age. Older than nearly all that were seen, a request is taken for one of the
    age that the last `FEWEST_SURVIVORS` of them outlived.
    """

    name: Final = "mean_residual"

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._sorted: NDArray[np.int64] | None = None
        self._sums: NDArray[np.int64] = np.zeros(1, np.int64)

    def ended(self, output_tokens: int) -> None:
        """A request has ended by itself or at its limit, with so many tokens in all."""
        self._lengths.append(output_tokens)
        self._sorted = None

    def remaining(self, generated_tokens: int) -> int | None:
        """Of a request that has generated so many tokens, at least 1; None before any request has ended."""
        if not self._lengths:
            return None
        lengths = self._table()
        oldest_known = max(0, len(lengths) - FEWEST_SURVIVORS)
        first = min(int(np.searchsorted(lengths, generated_tokens, side="right")), oldest_known)
        # The survivors of an age that is known, however old the request itself is.
        age = min(generated_tokens, int(lengths[oldest_known]) - 1)
        survivors = len(lengths) - first
        mean = float(self._sums[-1] - self._sums[first]) / survivors - age
        return max(1, round(mean))

    def _table(self) -> NDArray[np.int64]:
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._lengths, np.int64))
            self._sums = np.concatenate(([0], np.cumsum(self._sorted)))
        return self._sorted
