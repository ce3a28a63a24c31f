"""What live sampling has seen of a workload: requests that may lack the answers of tiers without instances."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.planning.cascade.drift import WorkloadSummary
from controlplane.planning.cascade.early_exit import TierScoreBounds
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import WorkloadRequest


@dataclass(frozen=True, slots=True)
class ObservedWindow:
    """The requests of a cascade that came in one sampling window."""

    rate_per_s: float
    """Rate of all requests, sampled or not; 0 if none came."""
    seconds: float | None
    """Length of the window; None: not known."""
    requests: tuple[WorkloadRequest, ...]
    """The sampled requests."""

    @property
    def offered(self) -> int | None:
        """Number of all requests of the window, sampled or not; None: not known."""
        return None if self.seconds is None else round(self.rate_per_s * self.seconds)


def summary_of(window: ObservedWindow, tiers: int, threshold: float) -> WorkloadSummary:
    """What drift is measured by, of as many tiers; `threshold` is the first tier's."""
    requests = window.requests
    return WorkloadSummary(
        rate_per_s=window.rate_per_s,
        requests=len(requests),
        input_tokens=_mean([request.input_tokens for request in requests]),
        output_tokens=tuple(_mean([request.output_tokens[tier] for request in requests]) for tier in range(tiers)),
        scores=tuple(_mean([request.scores[tier] for request in requests]) for tier in range(tiers)),
        written_tokens=_written_tokens(requests, threshold),
        seconds=window.seconds,
    )


def summary_of_sample(sample: CascadeSample, thresholds: Sequence[float]) -> WorkloadSummary:
    """The summary of a complete sample under a plan's thresholds, to compare later windows with."""
    return WorkloadSummary(
        rate_per_s=sample.rate_per_s,
        requests=sample.requests,
        input_tokens=float(sample.input_tokens.mean()),
        output_tokens=tuple(sample.output_tokens.mean(axis=0).tolist()),
        scores=tuple(sample.scores.mean(axis=0).tolist()),
        written_tokens=float(sample.tokens(0, thresholds[0]).mean()) if sample.score_bounds and thresholds else None,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _written_tokens(requests: Sequence[WorkloadRequest], threshold: float) -> float | None:
    known = [
        (request.score_bounds[0], request.output_tokens[0], request.scores[0])
        for request in requests
        if request.score_bounds is not None and request.score_bounds[0] is not None
    ]
    if not known:
        return None
    score_bounds = TierScoreBounds.of([of_answer or () for of_answer, _, _ in known])
    whole, scores = np.array([tokens for _, tokens, _ in known]), np.array([score for _, _, score in known])
    return float(score_bounds.generated_tokens(whole, scores, threshold).mean())
