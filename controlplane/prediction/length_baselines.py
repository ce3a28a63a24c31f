"""What can be said of remaining lengths without a hidden state: the predictions that a predictor has to beat.

All are fitted to the training samples of a dataset and minimise the absolute error as the predictor does, so they
answer with medians.
"""

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from controlplane.prediction.length_samples import LengthSamples

MOST_BINS: Final = 64
FEWEST_IN_BIN: Final = 50
"""Samples (or requests) that a bin must have, lest its median be noise."""


class LengthBaseline(Protocol):
    """Fitted; tells the remaining tokens of samples."""

    def predict(self, samples: LengthSamples) -> NDArray[np.float64]:
        """Remaining tokens of each sample, as floats; shape (samples,)."""


class Constant:
    """The `LengthBaseline` that predicts the same for every request at any time: the median remaining length of the
    training samples."""

    def __init__(self, train: LengthSamples) -> None:
        self._tokens = float(np.median(train.remaining_tokens))

    def predict(self, samples: LengthSamples) -> NDArray[np.float64]:
        return np.full(len(samples), self._tokens)


class PromptOnly:
    """The whole length, predicted once from the length of the prompt, less what has been generated since."""

    def __init__(self, train: LengthSamples) -> None:
        _, first = np.unique(train.requests, return_index=True)
        totals = train.remaining_tokens[first] + train.generated_tokens[first]
        self._table = _MedianTable(train.prompt_tokens[first], totals)

    def predict(self, samples: LengthSamples) -> NDArray[np.float64]:
        """See `LengthBaseline`; at least one token."""
        return np.maximum(1.0, self._table.look_up(samples.prompt_tokens) - samples.generated_tokens)


class GeneratedOnly:
    """The `LengthBaseline` that knows the progress alone: the median remaining length of requests that have generated
    as much."""

    def __init__(self, train: LengthSamples) -> None:
        self._table = _MedianTable(train.generated_tokens, train.remaining_tokens)

    def predict(self, samples: LengthSamples) -> NDArray[np.float64]:
        return self._table.look_up(samples.generated_tokens)


class _MedianTable:
    """Medians of `values` in bins of `keys`; each bin begins at a key and has at least `FEWEST_IN_BIN` members."""

    def __init__(self, keys: NDArray[np.int32], values: NDArray[np.int32]) -> None:
        order = np.argsort(keys, kind="stable")
        sorted_keys, sorted_values = keys[order], values[order]
        size = max(FEWEST_IN_BIN, -(-len(keys) // MOST_BINS))
        starts = [0]
        for index in range(1, len(keys)):
            is_new_key = sorted_keys[index] != sorted_keys[index - 1]
            if is_new_key and index - starts[-1] >= size and len(keys) - index >= size:
                starts.append(index)
        self._first_keys = sorted_keys[starts]
        self._medians = np.array([np.median(part) for part in np.split(sorted_values, starts[1:])])

    def look_up(self, keys: NDArray[np.int32]) -> NDArray[np.float64]:
        """The median of each key's bin; keys below the first bin fall into it."""
        bins = np.searchsorted(self._first_keys, keys, side="right") - 1
        found: NDArray[np.float64] = self._medians[np.maximum(bins, 0)]
        return found
