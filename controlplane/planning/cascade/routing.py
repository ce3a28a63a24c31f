"""Thresholds, and what they do to a sample (Cascadia, section 3.3, figure 4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.model.cascade_record import MAX_SCORE
from controlplane.planning.cascade.sample import CascadeSample
from mesh.errors import ConfigurationError

ESCALATE_ALL = float(np.nextafter(MAX_SCORE, np.inf))
"""A threshold that no score meets."""


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """A sample routed by thresholds: who answers which request, and how good the answers are."""

    reached: NDArray[np.bool_]
    """Shape (n, C): which requests each tier is given. None reaches a tier that accepts none; they go on to the
    next."""
    is_judged: tuple[bool, ...]
    """Of each tier: whether its answers need a judge. Not where any score would do: at a threshold of 0, and on the
    last tier."""
    output_tokens: NDArray[np.int64]
    """Shape (n, C): what each tier generates for the requests that reach it; less than whole answers where the sample
    has score bounds (`CascadeSample.tokens`)."""
    answered_by: NDArray[np.int64]
    """Shape (n,): the tier whose answer is accepted."""
    quality: float
    """Q: mean quality of the accepted answers, 0 to 100."""

    @property
    def shares(self) -> tuple[float, ...]:
        """p_i: the part of all requests that each tier serves (table 2)."""
        return tuple(self.reached.mean(axis=0).tolist())


def check_thresholds(thresholds: Sequence[float], tiers: int) -> None:
    """Raises `ConfigurationError` unless there is one fewer than tiers, each of 0 up to just above 100."""
    if len(thresholds) != tiers - 1:
        raise ConfigurationError(f"{tiers} tiers need {tiers - 1} thresholds, got {len(thresholds)}")
    if not all(0 <= threshold <= ESCALATE_ALL for threshold in thresholds):
        raise ConfigurationError(f"thresholds go from 0 (accept all) to above 100 (accept none), got {thresholds}")


def route(sample: CascadeSample, thresholds: Sequence[float]) -> Routed:
    """Send every request up the tiers until its answer scores at least the tier's threshold; the last accepts all.

    Only tiers that accept some score are asked, as by requests in the live mesh
    (`controlplane.protocols.cascade.state_machine`): every model by itself is a routing too.
    """
    check_thresholds(thresholds, sample.tiers)
    accepted = np.ones(sample.scores.shape, np.bool_)
    accepted[:, :-1] = sample.scores[:, :-1] >= np.asarray(thresholds, np.float64)
    answered_by: NDArray[np.int64] = accepted.argmax(axis=1)
    reached: NDArray[np.bool_] = np.arange(sample.tiers) <= answered_by[:, None]
    reached[:, list(skipped_tiers(thresholds))] = False
    quality = float(sample.true_quality[np.arange(sample.requests), answered_by].mean())
    return Routed(reached, judged_tiers(thresholds), _generated(sample, thresholds), answered_by, quality)


def skipped_tiers(thresholds: Sequence[float]) -> tuple[int, ...]:
    """Those that no request reaches because they would accept none of its answers."""
    return tuple(tier for tier, threshold in enumerate(thresholds) if threshold > MAX_SCORE)


def judged_tiers(thresholds: Sequence[float]) -> tuple[bool, ...]:
    """Of each tier, whether its answers need a judge (`Routed.is_judged`). One more than thresholds: the last tier is
    never judged."""
    return (*(0 < threshold <= MAX_SCORE for threshold in thresholds), False)


def _generated(sample: CascadeSample, thresholds: Sequence[float]) -> NDArray[np.int64]:
    if sample.score_bounds is None:
        return sample.output_tokens
    return np.column_stack([sample.tokens(tier, threshold) for tier, threshold in enumerate((*thresholds, 0.0))])


def proportional_thresholds(sample: CascadeSample) -> tuple[float, ...]:
    """theta_0: the i-th tier receives 1/i of the requests, as nearly as the scores allow (section 3.3)."""
    thresholds: list[float] = []
    reaching = np.ones(sample.requests, np.bool_)
    for tier in range(sample.tiers - 1):
        wanted = round(sample.requests / (tier + 2))
        scores = np.sort(sample.scores[reaching, tier])
        # Escalated are the scores below the threshold: the `wanted` lowest, or all but those of 100, because a tier
        # that accepts none would be skipped.
        threshold = float(scores[wanted]) if wanted < len(scores) else MAX_SCORE
        thresholds.append(threshold)
        reaching &= sample.scores[:, tier] < threshold
    return tuple(thresholds)


def candidate_thresholds(sample: CascadeSample, most: int) -> tuple[tuple[float, ...], ...]:
    """For each threshold at most `most` values that differ in what they do: quantiles of the tier's scores, and the
    two ends (accept all, accept none)."""
    candidates: list[tuple[float, ...]] = []
    for tier in range(sample.tiers - 1):
        distinct = np.unique(sample.scores[:, tier])
        if len(distinct) > most - 2:
            distinct = np.unique(np.quantile(sample.scores[:, tier], np.linspace(0, 1, most - 2), method="higher"))
        candidates.append(tuple(sorted({0.0, *distinct.tolist(), ESCALATE_ALL})))
    return tuple(candidates)
