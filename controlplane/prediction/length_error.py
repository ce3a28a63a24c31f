"""Predictions made by spoiling the truth: for simulations, where the truth is known and no model is there to ask."""

import math
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from mesh.errors import ConfigurationError

_WORD = float(1 << 64)


@dataclass(frozen=True, slots=True)
class LengthErrorModel:
    """Multiplies the true remaining length by a lognormal error of median 1, a function of request, position and seed.

    `sigma` 0 is an oracle. A share `persistence` of the error's variance belongs to the request and stays; the rest is
    drawn anew at each prediction. Since the error is a factor of what is left, predictions get better in tokens as a
    request nears its end, as a real predictor's do.
    """

    sigma: float = 0.4
    """Standard deviation of the logarithm of the error; 0.4 errs by a third on average. No measured value."""
    persistence: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sigma < 0 or not 0 <= self.persistence <= 1:
            raise ConfigurationError(
                f"an error model needs sigma >= 0 and persistence within 0..1, got {self.sigma} and {self.persistence}"
            )

    def predict(self, request_id: str, generated_tokens: int, remaining_tokens: int) -> int:
        """What is said when `remaining_tokens` are to come in truth; at least 1."""
        if self.sigma == 0 or remaining_tokens <= 1:
            return max(1, remaining_tokens)
        own = _normal(f"{self.seed}/{request_id}")
        now = _normal(f"{self.seed}/{request_id}/{generated_tokens}")
        error = math.sqrt(self.persistence) * own + math.sqrt(1 - self.persistence) * now
        return max(1, round(remaining_tokens * math.exp(self.sigma * error)))


def _normal(key: str) -> float:
    """A standard normal number; Box-Muller makes one of two uniform words."""
    word = key.encode()
    first, second = xxh3_64_intdigest(word, 1), xxh3_64_intdigest(word, 2)
    return math.sqrt(-2.0 * math.log((first + 1) / _WORD)) * math.cos(2.0 * math.pi * second / _WORD)
