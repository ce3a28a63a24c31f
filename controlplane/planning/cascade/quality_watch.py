"""Whether the quality that a plan promises is what comes out: labels of live samples against the promise (pure)."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from controlplane.planning.cascade.bounds import upper_bound
from controlplane.planning.cascade.workload import WorkloadRequest

MIN_LABELLED = 20
"""Fewer say nothing."""
MAX_LABELLED = 1000
"""So many of the last ones count: a promise that is broken today must not be outweighed by last month."""
BROKEN_PROBABILITY = 0.99
"""Every window is looked at, so a promise that is kept must look broken in few of them."""


class PromiseState(StrEnum):
    """How a promise stands."""

    UNKNOWN = "unknown"
    """Too few labelled answers yet."""
    KEPT = "kept"
    BELOW = "below"
    """The mean is below the promise, which may be chance."""
    BROKEN = "broken"
    """It is below by more than chance explains."""


@dataclass(frozen=True, slots=True)
class AchievedQuality:
    """What accepted answers are worth, beside the promise."""

    promised: float
    probability: float
    """In per cent; 0: the plan just reached the quality on its sample."""
    achieved: float | None
    """Mean over the labelled answers; None while there are none."""
    labelled: int
    state: PromiseState

    def says(self) -> str:
        """In words."""
        at_least = f"at least {self.promised:g}" + (f" with {self.probability:g} %" if self.probability else "")
        if self.achieved is None:
            return f"promised {at_least}; no answer is labelled yet"
        state = {
            PromiseState.UNKNOWN: "too few to tell",
            PromiseState.KEPT: "kept",
            PromiseState.BELOW: "below, which may be chance",
            PromiseState.BROKEN: "broken",
        }[self.state]
        return f"promised {at_least}, achieved {self.achieved:.1f} on {self.labelled} labelled answers: {state}"


class QualityWatch:
    """Adds up the labels of the answers that a plan's thresholds accept."""

    def __init__(self, thresholds: Sequence[float], promised: float, probability: float) -> None:
        self._thresholds = tuple(thresholds)
        self._promised = promised
        self._probability = probability
        self._quality: deque[float] = deque(maxlen=MAX_LABELLED)

    def observe(self, requests: Iterable[WorkloadRequest]) -> None:
        """Take in sampled requests. One that stops at a tier whose answer is not labelled, or at one that was not
        there, counts for nothing."""
        for request in requests:
            label = accepted_label(request, self._thresholds)
            if label is not None:
                self._quality.append(label)

    def achieved(self) -> AchievedQuality:
        """As it stands."""
        quality = np.array(self._quality)
        mean = float(quality.mean()) if len(quality) else None
        if mean is None or len(quality) < MIN_LABELLED:
            state = PromiseState.UNKNOWN
        elif mean >= self._promised:
            state = PromiseState.KEPT
        else:
            is_chance = upper_bound(quality, BROKEN_PROBABILITY) >= self._promised
            state = PromiseState.BELOW if is_chance else PromiseState.BROKEN
        return AchievedQuality(self._promised, self._probability, mean, len(quality), state)


def accepted_label(request: WorkloadRequest, thresholds: Sequence[float]) -> float | None:
    """The label of the answer that these thresholds accept; None where it has none, or a tier on the way is missing."""
    if request.quality is None:
        return None
    for score, label, threshold in zip(request.scores, request.quality, (*thresholds, 0.0), strict=True):
        if score is None:
            return None
        if score >= threshold:
            return label
    return None
