"""How long a prompt takes to compute, from its length (Arrow, section 5.3: the TTFT predictor)."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from controlplane.prediction.least_squares import non_negative_least_squares
from mesh.errors import ConfigurationError

MIN_POINTS = 3
"""A quadratic curve has three coefficients."""

Coefficient = Annotated[float, msgspec.Meta(ge=0)]


class TtftPoint(msgspec.Struct, frozen=True):
    """One measurement of a profile: the time to first token of a prompt that an idle instance computes alone."""

    prompt_tokens: int
    ttft_ms: float


class TtftCurve(msgspec.Struct, frozen=True):
    """prefill_ms = fixed_ms + token_ms x tokens + token_squared_ms x tokens^2, for a prompt without cached tokens.

    No coefficient is negative: more tokens never take less time.
    """

    fixed_ms: Coefficient
    token_ms: Coefficient
    token_squared_ms: Coefficient

    def scaled(self, factor: float) -> "TtftCurve":
        """Of an instance that takes `factor` times as long for every prompt."""
        return TtftCurve(self.fixed_ms * factor, self.token_ms * factor, self.token_squared_ms * factor)

    def prefill_ms(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Time to compute `new_tokens` after `cached_tokens` that need not be computed but are attended to."""
        return self.fixed_ms + self.part_ms(new_tokens, cached_tokens)

    def part_ms(self, new_tokens: int, context_tokens: int) -> float:
        """The same without what a prompt costs but once: the share of some tokens in the midst of a prompt.

        It is the curve's rise from the context to context and new tokens together.
        """
        end_tokens = context_tokens + new_tokens
        return self.token_ms * new_tokens + self.token_squared_ms * (end_tokens**2 - context_tokens**2)


def fit_ttft(points: Sequence[TtftPoint]) -> TtftCurve:
    """The curve of least squared relative errors through a profile.

    Relative, because absolute errors would let the longest prompts, hundreds of times as long as the shortest,
    decide alone. Raises `ConfigurationError` for fewer than three different lengths and for points that are no times.
    """
    lengths = {point.prompt_tokens for point in points}
    if len(lengths) < MIN_POINTS:
        raise ConfigurationError(
            f"a TTFT curve needs prompts of at least {MIN_POINTS} different lengths, the profile has {len(lengths)}"
        )
    for point in points:
        if not (point.prompt_tokens >= 1 and 0 < point.ttft_ms < float("inf")):
            raise ConfigurationError(f"a TTFT profile has prompts of at least one token and times above 0, got {point}")
    tokens = np.array([point.prompt_tokens for point in points], np.float64)
    weights = 1 / np.array([point.ttft_ms for point in points], np.float64)
    features = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1) * weights[:, None]
    return TtftCurve(*non_negative_least_squares(features, np.ones_like(weights)).tolist())
