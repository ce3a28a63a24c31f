"""How fast this instance computes and pulls prompts, measured as it serves. Pure."""

from typing import Final

from controlplane.model.step_sample import StepSample

SHARE: Final = 0.2
"""Of a new measurement in the mean."""
LEAST_STEP_TOKENS: Final = 64
"""Steps that prefill less tell of decodes, and of what any step costs."""
UNKNOWN_MS: Final = 2_500.0
"""What computing a prefix is taken for before a prompt was computed here."""


class PromptSpeed:
    """Exponential means, in milliseconds per token."""

    def __init__(self) -> None:
        self.compute_token_ms: float | None = None
        """Of steps that computed prompts; None before the first."""
        self.pull_token_ms: float | None = None
        """Of pulls that brought something; None before the first."""

    def computed(self, step: StepSample) -> None:
        """A step is over. Decodes beside the prompt make its tokens dearer, as they will those of the next."""
        if step.prefill_tokens >= LEAST_STEP_TOKENS:
            self.compute_token_ms = _mean(self.compute_token_ms, step.duration_ms / step.prefill_tokens)

    def pulled(self, tokens: int, duration_ms: float) -> None:
        """Blocks of so many tokens were copied."""
        if tokens > 0:
            self.pull_token_ms = _mean(self.pull_token_ms, duration_ms / tokens)

    def compute_ms(self, tokens: int) -> float:
        """What it takes to compute so many tokens of a prompt."""
        return UNKNOWN_MS if self.compute_token_ms is None else self.compute_token_ms * tokens


def _mean(former: float | None, measured: float) -> float:
    return measured if former is None else former + SHARE * (measured - former)
