"""A sample of a cascade's workload as arrays: what routing and deployment are planned for."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.model.cascade_record import MAX_SCORE
from controlplane.planning.cascade.calibration import TierCalibration, calibrate, kept
from controlplane.planning.cascade.early_exit import ScoreBounds, TierScoreBounds, contradiction
from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True, eq=False)
class CascadeSample:
    """The same n requests, answered and judged on each of the C tiers, smallest first (Cascadia, section 3.3,
    footnote 2)."""

    scores: NDArray[np.float64]
    """Shape (n, C), 0 to 100. What the routing sees: it decides by them whether an answer is accepted."""
    input_tokens: NDArray[np.int64]
    """Shape (n,)."""
    output_tokens: NDArray[np.int64]
    """Shape (n, C): of whole answers."""
    rate_per_s: float
    """Arrivals of the workload that the n requests stand for."""
    quality: NDArray[np.float64] | None = None
    """Shape (n, C), 0 to 100: how good the answers are by their labels, or where those lack by what answers of the same
    score are worth. None: as good as their scores."""
    labelled: NDArray[np.bool_] | None = None
    """Shape (n, C): whether an answer's quality is a label. None: all of them are, or none where `quality` is None."""
    score_bounds: tuple[tuple[ScoreBounds, ...], ...] | None = None
    """Shape n x C: upper bounds of each answer's score while it was generated. None: the judge scores whole answers
    only, and none is given up."""
    _tier_score_bounds: tuple[TierScoreBounds, ...] = field(init=False, repr=False, default=())
    """Of every tier but the last; empty without score bounds."""

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or not self.scores.size:
            raise ConfigurationError("a sample needs the scores of at least one request on at least one tier")
        requests = len(self.scores)
        for name, values, shape in (
            ("input_tokens", self.input_tokens, (requests,)),
            ("output_tokens", self.output_tokens, self.scores.shape),
            ("quality", self.true_quality, self.scores.shape),
            ("labelled", self.is_labelled, self.scores.shape),
        ):
            if values.shape != shape:
                raise ConfigurationError(f"{name} of a sample has shape {values.shape}; its scores ask for {shape}")
        for name, values in (("scores", self.scores), ("quality", self.true_quality)):
            if not ((values >= 0) & (values <= MAX_SCORE)).all():
                raise ConfigurationError(f"{name} of a sample go from 0 to {MAX_SCORE:g}; rescale the judge's scale")
        if self.rate_per_s <= 0:
            raise ConfigurationError(f"a workload has a rate above 0 requests/s, got {self.rate_per_s}")
        if (self.input_tokens < 1).any() or (self.output_tokens < 1).any():
            raise ConfigurationError("every request of a sample has at least one input and one output token")
        if self.score_bounds is not None:
            self._check_score_bounds(self.score_bounds)
            by_tier = tuple(
                TierScoreBounds.of([answers[tier] for answers in self.score_bounds]) for tier in range(self.tiers - 1)
            )
            object.__setattr__(self, "_tier_score_bounds", by_tier)

    def _check_score_bounds(self, score_bounds: tuple[tuple[ScoreBounds, ...], ...]) -> None:
        if len(score_bounds) != self.requests or any(len(answers) != self.tiers for answers in score_bounds):
            raise ConfigurationError(
                f"a sample has the score_bounds of {self.requests} requests on {self.tiers} tiers, or none"
            )
        for row, (answers, tokens, scores) in enumerate(
            zip(score_bounds, self.output_tokens.tolist(), self.scores.tolist(), strict=True)
        ):
            for tier, of_answer in enumerate(answers):
                fault = contradiction(of_answer, tokens[tier], scores[tier], tier == self.tiers - 1)
                if fault:
                    raise ConfigurationError(f"request {row} of a sample on tier {tier}: {fault}")

    @property
    def requests(self) -> int:
        """Number of sampled requests, n."""
        return len(self.scores)

    @property
    def tiers(self) -> int:
        """Number of tiers, C."""
        return int(self.scores.shape[1])

    @property
    def true_quality(self) -> NDArray[np.float64]:
        """Shape (n, C): what an answer counts for, once accepted."""
        return self.scores if self.quality is None else self.quality

    @property
    def is_labelled(self) -> NDArray[np.bool_]:
        """Shape (n, C): whose `true_quality` was told by somebody, and is no estimate. Where scores stand for quality,
        all."""
        return np.ones(self.scores.shape, np.bool_) if self.labelled is None else self.labelled

    def calibrations(self) -> tuple[TierCalibration | None, ...]:
        """What a score of each tier is worth; None of a tier without labels, or where scores stand for quality."""
        if self.quality is None:
            return (None,) * self.tiers
        fitted: list[TierCalibration | None] = []
        for tier, known in enumerate(self.is_labelled.T):
            some = known.any()
            fitted.append(kept(calibrate(self.scores[known, tier], self.quality[known, tier])) if some else None)
        return tuple(fitted)

    def only(self, rows: NDArray[np.intp]) -> "CascadeSample":
        """These requests (indices) alone, in their order, at the rate of all."""
        return CascadeSample(
            scores=self.scores[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            rate_per_s=self.rate_per_s,
            quality=None if self.quality is None else self.quality[rows],
            labelled=None if self.labelled is None else self.labelled[rows],
            score_bounds=None if self.score_bounds is None else tuple(self.score_bounds[row] for row in rows.tolist()),
        )

    def tokens(self, tier: int, threshold: float) -> NDArray[np.int64]:
        """Tokens that the tier generates for each request, if it accepts answers from `threshold` on; shape (n,).

        With score bounds, answers that cannot reach the threshold are given up early. The last tier accepts all."""
        output_tokens: NDArray[np.int64] = self.output_tokens[:, tier]
        if tier >= len(self._tier_score_bounds):
            return output_tokens
        return self._tier_score_bounds[tier].generated_tokens(output_tokens, self.scores[:, tier], threshold)
