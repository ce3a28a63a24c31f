"""Bounds of one migration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """How long and how often; all times in milliseconds."""

    offer_ms: float = 1_000.0
    """Without an answer to the offer by then, nothing happens."""
    round_ms: float = 10_000.0
    """For one round of pre-copy; prefill chunks that are still to come do not count."""
    hand_over_ms: float = 500.0
    """How long the request may stay paused before the source tries to take it back."""
    take_back_ms: float = 1_000.0
    """How long the source then waits for the target's word before it gives the request up."""
    resend_ms: float = 100.0
    """An unanswered message is sent again after this."""
    max_rounds: int = 8
    """After so many rounds of a request that decodes it is paused however much is left."""
    last_round_blocks: int = 2
    """The request is paused once no more than this many blocks are left to copy."""
    idle_ms: float = 30_000.0
    """A target that hears nothing for this long while it waits for the source drops the request."""

    @property
    def verdict_ms(self) -> float:
        """How long the source stays paused at most."""
        return self.hand_over_ms + self.take_back_ms
