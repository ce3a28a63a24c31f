"""Predictors of remaining lengths in a simulation, where the truth is known.

A prediction is a function of the request, the tokens it has generated and the truth, so equal runs predict alike.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simulator.instance.splitmix import splitmix_words

Tokens = NDArray[np.int64]
Keys = NDArray[np.uint64]


class RemainingLengths(Protocol):
    """Predicts for many requests at once; all arrays have shape (requests,)."""

    def predict(self, keys: Keys, generated: Tokens, total: Tokens) -> Tokens:
        """Tokens that requests, known by `keys`, will still generate after `generated` ones, of `total` in truth."""

    def band(self, generated: Tokens, predicted: Tokens) -> Tokens:
        """How many remain at least and at most where so many were `predicted`, each with a probability of 90 %, shape
        (2, requests)."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows the truth (STAR, section 6.3)."""

    def predict(self, keys: Keys, generated: Tokens, total: Tokens) -> Tokens:
        """See `RemainingLengths`."""
        return total - generated

    def band(self, generated: Tokens, predicted: Tokens) -> Tokens:
        """See `RemainingLengths`."""
        return np.stack([predicted, predicted])


@dataclass(frozen=True, slots=True)
class Figure7Errors:
    """An error model fitted to what STAR says of its predictor (section 4.3, figure 7), not a predictor.

    For requests of 30 to 32K tokens the mean absolute error is 18,256 tokens with the prompt alone and 2,929 after
    8,000 tokens. Read as: with the prompt alone the prediction is that of an average request, `prior_tokens`, and what
    is wrong with it fades exponentially as tokens come. Each request is wrong by a lasting factor of its own (0.5 to
    1.5) and each prediction by a further one, both of mean 1.
    """

    seed: int
    prior_tokens: float = 31_000 - 18_256
    fade_tokens: float = 8_000 / np.log(18_256 / 2_929)
    flutter: float = 0.2
    """Relative standard deviation from one prediction to the next."""
    longest_tokens: int = 32_768

    def predict(self, keys: Keys, generated: Tokens, total: Tokens) -> Tokens:
        """See `RemainingLengths`."""
        lasting = 0.5 + _uniform(keys, np.uint64(self.seed))
        fresh = 1 + self.flutter * np.sqrt(3) * (
            2 * _uniform(keys, np.uint64(self.seed + 1) + generated.astype(np.uint64)) - 1
        )
        error = np.exp(-generated / self.fade_tokens) * (self.prior_tokens - total) * lasting * fresh
        predicted = np.rint(total + error - generated).astype(np.int64)
        remaining: Tokens = np.clip(predicted, 0, self.longest_tokens - np.minimum(generated, self.longest_tokens))
        return remaining

    def band(self, generated: Tokens, predicted: Tokens) -> Tokens:
        """See `RemainingLengths`: the error turned round, for the 10 and 90 % quantiles of its factors. As long as the
        factor may make up for all that the prediction knows, anything up to the longest is possible."""
        most = np.maximum(self.longest_tokens - generated, 0)
        fading = np.exp(-generated / self.fade_tokens) * np.array([[0.6], [1.4]])
        totals = (generated + predicted - fading * self.prior_tokens) / np.maximum(1 - fading, 1e-9)
        left = np.where(fading[1] < 1, totals - generated, np.array([[0.0], [np.inf]]))
        band: Tokens = np.sort(np.clip(np.rint(left), 0, most).astype(np.int64), axis=0)
        return band


@dataclass(frozen=True, slots=True)
class Binned:
    """Another predictor of which only the bin of the remaining length is known (table 3): its middle is taken."""

    inner: RemainingLengths
    edges: tuple[int, ...]
    """Ascending, from 0 to the longest."""

    def predict(self, keys: Keys, generated: Tokens, total: Tokens) -> Tokens:
        """See `RemainingLengths`."""
        edges = np.array(self.edges, dtype=np.int64)
        bins = np.searchsorted(edges[1:-1], self.inner.predict(keys, generated, total), side="right")
        middles: Tokens = (edges[:-1] + edges[1:]) // 2
        return middles[bins]

    def band(self, generated: Tokens, predicted: Tokens) -> Tokens:
        """See `RemainingLengths`: the bin's ends."""
        edges = np.array(self.edges, dtype=np.int64)
        bins = np.searchsorted(edges[1:-1], predicted, side="right")
        return np.stack([edges[bins], edges[bins + 1]])


@dataclass(frozen=True, slots=True)
class Every:
    """Another predictor that is asked every `steps` tokens (section 5.3); in between its answer counts down."""

    inner: RemainingLengths
    steps: int

    def predict(self, keys: Keys, generated: Tokens, total: Tokens) -> Tokens:
        """See `RemainingLengths`."""
        asked_at = generated // self.steps * self.steps
        remaining: Tokens = np.maximum(self.inner.predict(keys, asked_at, total) - (generated - asked_at), 0)
        return remaining

    def band(self, generated: Tokens, predicted: Tokens) -> Tokens:
        """See `RemainingLengths`."""
        since = generated % self.steps
        band: Tokens = np.maximum(self.inner.band(generated - since, predicted + since) - since, 0)
        return band


def _uniform(keys: Keys, salt: np.uint64 | Keys) -> NDArray[np.float64]:
    """In [0, 1), a function of its arguments."""
    words = splitmix_words(keys, np.broadcast_to(np.asarray(salt, dtype=np.uint64), keys.shape))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
