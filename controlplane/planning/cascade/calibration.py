"""What a score is worth: the chance that an answer is right, given what its judge said of it.

A judge's score is not a probability, and a model's confidence less so: demo models that are right half of the time
were 91 % confident. Of labelled answers the isotonic regression (pool adjacent violators) gives the best
non-decreasing curve without an assumption on its form; a logistic curve was left out because confidences crowd at the
top, where it is worst.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.cascade_record import MAX_SCORE


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """P(right | score) of one tier under one judge, fitted to labelled answers."""

    scores: NDArray[np.float64]
    """Ascending, distinct."""
    p_right: NDArray[np.float64]
    """At each of `scores`: non-decreasing, 0 to 1. Of graded labels the mean quality, as a part of 100."""
    samples: int
    """Labelled answers that it was fitted to."""

    def at(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """For any scores: linear between those that were seen, level beyond them."""
        return np.interp(scores, self.scores, self.p_right)

    @property
    def error(self) -> float:
        """How far a score, taken as a percentage, is from the chance to be right: the mean over the distinct scores."""
        return float(np.abs(self.scores / MAX_SCORE - self.p_right).mean())


class TierCalibration(msgspec.Struct, frozen=True):
    """A calibration as it is kept with a plan."""

    samples: int
    """Labelled answers that it was fitted to."""
    curve: tuple[tuple[float, float], ...]
    """(score, P(right | score)), ascending; linear between."""

    def at(self, score: float) -> float:
        """P(right | score)."""
        scores, p_right = ([point[axis] for point in self.curve] for axis in (0, 1))
        return float(np.interp(score, scores, p_right))


def kept(calibration: Calibration) -> TierCalibration:
    """Without the points within level stretches, which say nothing."""
    p_right = calibration.p_right
    is_edge = np.ones(len(p_right), np.bool_)
    is_edge[1:-1] = (p_right[1:-1] != p_right[:-2]) | (p_right[1:-1] != p_right[2:])
    curve = zip(calibration.scores[is_edge].tolist(), p_right[is_edge].tolist(), strict=True)
    return TierCalibration(calibration.samples, tuple(curve))


def calibrate(scores: NDArray[np.float64], quality: NDArray[np.float64]) -> Calibration:
    """Fit labelled answers, one at least; both shape (n,), 0 to 100."""
    assert len(scores) == len(quality) > 0, "nothing to calibrate by"
    distinct, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    means = np.bincount(place, weights=quality / MAX_SCORE) / count
    # Blocks of neighbouring scores, as (mean, weight, distinct scores): merged while one is above the next.
    blocks: list[tuple[float, float, int]] = []
    for mean, weight in zip(means.tolist(), count.tolist(), strict=True):
        blocks.append((mean, float(weight), 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (first, of_first, wide), (second, of_second, narrow) = blocks[-2:]
            together = of_first + of_second
            blocks[-2:] = [((first * of_first + second * of_second) / together, together, wide + narrow)]
    fitted = np.concatenate([np.full(width, mean) for mean, _, width in blocks])
    return Calibration(distinct, fitted, len(scores))
