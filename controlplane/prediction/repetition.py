"""Whether an answer repeats itself: a model that goes round in circles seldom ends before its limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WINDOW_TOKENS: Final = 256
"""The newest tokens of an answer that are looked at."""
LONGEST_PERIOD_TOKENS: Final = 64
"""Longer cycles are not seen."""
FEATURES: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class Repetition:
    """Of several answers, in columns; each of shape (requests,)."""

    period_tokens: NDArray[np.int32]
    """Length of the cycle that the answer ends with, the one repeated for longest; 0: none."""
    repeated_tokens: NDArray[np.int32]
    """How many tokens at its end are each the same as the one a period before."""
    distinct_share: NDArray[np.float32]
    """Different tokens among the newest, 0 to 1."""

    def features(self) -> NDArray[np.float32]:
        """What a predictor is shown: logarithms of period and length, and the share. Shape (requests, FEATURES)."""
        logs = np.log1p(np.stack([self.period_tokens, self.repeated_tokens], axis=1).astype(np.float32))
        features: NDArray[np.float32] = np.concatenate([logs, self.distinct_share[:, None]], axis=1)
        return features


def repetition(answers: Sequence[Sequence[int]]) -> Repetition:
    """Of each answer's newest `WINDOW_TOKENS` tokens. All answers at once: for each period one comparison."""
    window = max([1, *(min(len(answer), WINDOW_TOKENS) for answer in answers)])
    # What stands before a short answer is like nothing else, itself included.
    tails = np.tile(-1 - np.arange(window, dtype=np.int64), (len(answers), 1))
    for row, answer in enumerate(answers):
        newest = answer[-window:]
        if newest:
            tails[row, window - len(newest) :] = newest
    lengths = np.array([min(len(answer), window) for answer in answers], np.int64)
    period, repeated = np.zeros(len(answers), np.int32), np.zeros(len(answers), np.int32)
    for shift in range(1, min(LONGEST_PERIOD_TOKENS, window - 1) + 1):
        differs = tails[:, :-shift][:, ::-1] != tails[:, shift:][:, ::-1]
        run = np.where(differs.any(axis=1), differs.argmax(axis=1), window - shift)
        # A cycle has come round at least once more, in full; of equal ones the shortest is the cycle.
        better = (run >= shift) & (run + shift > repeated + period)
        period[better], repeated[better] = shift, run[better]
    ordered = np.sort(tails, axis=1)
    distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) - (window - lengths)
    return Repetition(period, repeated, (distinct / np.maximum(lengths, 1)).astype(np.float32))
