"""The last step of every scoring policy: the candidate with the lowest score."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_MODELS: Final = 10_000


class RoundRobinCounter:
    """A counter for each model, for breaking ties: requests of several models that come in turn must not meet on the
    same few instances."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def next(self, model: str) -> int:
        """One more than the last time; 1 at first."""
        if model not in self._turns and len(self._turns) >= MAX_MODELS:
            del self._turns[next(iter(self._turns))]
        self._turns[model] = self._turns.get(model, 0) + 1
        return self._turns[model]

    def last(self, model: str) -> int:
        """What `next` returned last for the model; 0 before the first."""
        return self._turns.get(model, 0)


def among_candidates(
    scores: NDArray[np.int64] | NDArray[np.floating[Any]], candidates: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The scores, with infinity where an instance is no candidate."""
    return np.where(candidates, scores, np.inf)


def lowest(scores: NDArray[np.float64], turn: int, tie_break: NDArray[np.int64] | None = None) -> int:
    """Row of the lowest score; among equals the lowest `tie_break`, and among those the `turn`-th, cyclically.

    Published policies leave ties open. Always taking the first would send every request of a quiet cluster
    to one instance.
    """
    tied = (scores == scores[scores.argmin()]).nonzero()[0]
    if tie_break is not None and len(tied) > 1:
        keys = tie_break[tied]
        tied = tied[keys == keys[keys.argmin()]]
    return int(tied[turn % len(tied)])
