"""What was seen of a workload, as the planner needs it."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.model.cascade_record import MAX_SCORE
from controlplane.planning.cascade.falls import AnswerFalls, TierFalls, fault_of, tier_falls
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
    """Shape (n, C), 0 to 100: how good the answers are by a better judge, where there is one (ground truth). None: as
    good as their scores."""
    falls: tuple[tuple[AnswerFalls, ...], ...] | None = None
    """n times C: how each answer's score fell while it was being written. None: the judge scores whole answers only,
    and none is given up."""
    _tier_falls: tuple[TierFalls, ...] = field(init=False, repr=False, default=())
    """Of every tier but the last; empty without falls."""

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or not self.scores.size:
            raise ConfigurationError("a sample needs the scores of at least one request on at least one tier")
        requests = len(self.scores)
        for name, values, shape in (
            ("input_tokens", self.input_tokens, (requests,)),
            ("output_tokens", self.output_tokens, self.scores.shape),
            ("quality", self.true_quality, self.scores.shape),
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
        if self.falls is not None:
            self._check_falls(self.falls)
            by_tier = tuple(tier_falls([answers[tier] for answers in self.falls]) for tier in range(self.tiers - 1))
            object.__setattr__(self, "_tier_falls", by_tier)

    def _check_falls(self, falls: tuple[tuple[AnswerFalls, ...], ...]) -> None:
        if len(falls) != self.requests or any(len(answers) != self.tiers for answers in falls):
            raise ConfigurationError(
                f"a sample has the falls of {self.requests} requests on {self.tiers} tiers, or none"
            )
        for row, (answers, tokens, scores) in enumerate(
            zip(falls, self.output_tokens.tolist(), self.scores.tolist(), strict=True)
        ):
            for tier, of_answer in enumerate(answers):
                fault = fault_of(of_answer, tokens[tier], scores[tier], tier == self.tiers - 1)
                if fault:
                    raise ConfigurationError(f"request {row} of a sample on tier {tier}: {fault}")

    @property
    def requests(self) -> int:
        """n."""
        return len(self.scores)

    @property
    def tiers(self) -> int:
        """C."""
        return int(self.scores.shape[1])

    @property
    def true_quality(self) -> NDArray[np.float64]:
        """Shape (n, C): what an answer counts for, once accepted."""
        return self.scores if self.quality is None else self.quality

    def tokens(self, tier: int, threshold: float) -> NDArray[np.int64]:
        """What the tier generates for each request that reaches it, if it accepts answers from this threshold on and
        gives up those that cannot reach it any more; shape (n,). The last tier accepts all."""
        whole: NDArray[np.int64] = self.output_tokens[:, tier]
        if tier >= len(self._tier_falls):
            return whole
        return self._tier_falls[tier].written(whole, self.scores[:, tier], threshold)
