"""What was seen of a workload, as the planner needs it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.model.cascade_record import MAX_SCORE
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
    """Shape (n, C)."""
    rate_per_s: float
    """Arrivals of the workload that the n requests stand for."""
    quality: NDArray[np.float64] | None = None
    """Shape (n, C), 0 to 100: how good the answers are by a better judge, where there is one (ground truth). None: as
    good as their scores."""

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
