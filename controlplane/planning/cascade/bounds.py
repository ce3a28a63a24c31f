"""How low a mean quality may turn out, given the qualities of a sample: bounds that hold for any number of samples.

What is bounded is the mean of the next requests, as many as the sample has, and not the mean of an endless stream:
whoever checks a promise has so many to check it by, and chance moves their mean as it moved the sample's. Of
right-or-wrong labels the bound is exact (Fisher's test: which of all requests happened to be sampled), and becomes
Clopper and Pearson's where more are to come. Graded labels have the betting bound on the endless mean (Waudby-Smith
and Ramdas, Estimating means of bounded random variables by betting, 2024): it needs no assumption but the range,
adapts to how far the grades scatter, and is wide enough for the next mean: about 2.4 standard errors with 95 %, where
2.3 would do. A normal approximation was left out: grades pile up at the top, and there it promises too much.
"""

import math

import numpy as np
from numpy.typing import NDArray

from controlplane.model.cascade_record import MAX_SCORE

_BISECTIONS = 40
_MOST_OF_A_STAKE = 0.75
"""Of what a bet may lose at most. All of it would end the betting with one answer of quality 0."""


def reaches(quality: NDArray[np.float64], target: float, probability: float) -> bool:
    """Whether the next requests, as many as these, reach a mean of `target`: a sample as good as this comes before
    requests that miss it with a probability of at most 1 - `probability`. Qualities and target 0 to 100, probability 0
    to 1, exclusive."""
    if not len(quality):
        return False
    risk = 1.0 - probability
    share = min(max(target / MAX_SCORE, 0.0), 1.0)
    shares = quality / MAX_SCORE
    if _is_right_or_wrong(shares):
        return _as_many_right(int(shares.sum()), len(shares), share) <= risk
    return _most_won(shares, share) >= 1.0 / risk


def lower_bound(quality: NDArray[np.float64], probability: float) -> float:
    """The quality, 0 to 100, that the next mean reaches with this probability; 0 for an empty sample."""
    low, high = 0.0, MAX_SCORE
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if reaches(quality, middle, probability) else (low, middle)
    return low


def upper_bound(quality: NDArray[np.float64], probability: float) -> float:
    """The quality, 0 to 100, that the next mean does not exceed with this probability; 100 for an empty sample."""
    return MAX_SCORE - lower_bound(MAX_SCORE - quality, probability)


def _as_many_right(right: int, samples: int, share: float) -> float:
    """The most likely that so many of the samples are right and of as many further ones fewer than `share` are.

    All of them together may have any number of right ones; most likely it is with the most for which the further ones
    still miss. Which of all are the samples is chance: a hypergeometric tail.
    """
    in_all = right + math.ceil(samples * share - 1e-9) - 1
    if in_all < right:
        return 0.0  # there is no missing it
    counts = np.arange(right, min(samples, in_all) + 1)
    logs = (
        _log_choices(in_all, counts)
        + _log_choices(2 * samples - in_all, samples - counts)
        - _log_choices(2 * samples, np.array([samples]))
    )
    return min(1.0, float(np.exp(logs).sum()))


def _log_choices(of: int, taken: NDArray[np.int64]) -> NDArray[np.float64]:
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, of + 1)))])
    possible = (taken >= 0) & (taken <= of)
    within = np.where(possible, taken, 0)
    logs = log_factorials[of] - log_factorials[within] - log_factorials[of - within]
    return np.where(possible, logs, -np.inf)


def _is_right_or_wrong(shares: NDArray[np.float64]) -> bool:
    return bool(((shares == 0.0) | (shares == 1.0)).all())


def _most_won(shares: NDArray[np.float64], mean: float) -> float:
    """The most that a gambler ever had, who starts with 1 and bets on the next share being above `mean`. Were the
    mean at most that, this would reach 1 / risk with at most `risk` (Ville's inequality). Stakes depend on the shares
    before only."""
    count = len(shares)
    before = np.arange(count)
    running_mean = (0.5 + np.cumsum(shares)) / (before + 2)
    running_variance = (0.25 + np.cumsum((shares - running_mean) ** 2)) / (before + 2)
    variance = np.concatenate([[0.25], running_variance[:-1]])
    # For a risk of 5 %: other risks are served a little worse, never wrongly.
    stakes = np.sqrt(2 * math.log(20.0) / (variance * count))
    stakes = np.minimum(stakes, _MOST_OF_A_STAKE / max(mean, 1e-9))
    return float(np.exp(np.cumsum(np.log1p(stakes * (shares - mean)))).max())
