"""What an instance says of the prefixes that it was to pull."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PullTotals:
    """Since the instance started."""

    pulled: int = 0
    """Pulls that brought what they were to bring."""
    computed: int = 0
    """Those whose prefix was computed after all: refused, late or failed."""
    tokens: int = 0
    """Whose KV was pulled."""
    token_ms: float = 0.0
    """What a token takes to be pulled, over the last pulls; 0: none has been measured."""
    compute_token_ms: float = 0.0
    """What a token takes to be computed, over the last steps that computed prompts; 0: none has been measured."""


NO_PULLS: Final = PullTotals()
