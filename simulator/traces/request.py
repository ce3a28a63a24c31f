"""One request of a trace: when it arrives, how long it is, and what it shares with others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TOKENS = 1 << 24
"""Bound of a length, far above any context: more is a mistake in the trace."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What a replay needs to know; the text itself is never part of a published trace.

    Raises ValueError where a value could not be replayed.
    """

    arrival_s: float
    """Since the start of the trace."""
    input_tokens: int
    output_tokens: int
    prefix_block_ids: Sequence[int] = ()
    """Names of the prompt's blocks in order. Equal ids mean equal tokens, so equal leading ids mean a shared
    prefix. The last block may be partial; tokens behind the last block belong to this request alone."""
    block_tokens: int = 0
    """Tokens of one such block; 0 where the trace has none."""
    session_id: str = ""
    """Conversation to which this turn belongs; empty where the trace does not say."""
    think_s: float | None = None
    """Closed loop: the request comes so long after the end of the one before it in its session, which `arrival_s`
    only estimates. None: it comes at `arrival_s`."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ValueError(f"arrival must be a time of at least 0 s, got {self.arrival_s}")
        if self.think_s is not None and not (math.isfinite(self.think_s) and self.think_s >= 0):
            raise ValueError(f"think_s must be a time of at least 0 s, got {self.think_s}")
        if self.input_tokens < 1:
            raise ValueError(f"a prompt has at least one token, got {self.input_tokens}")
        if self.output_tokens < 1:
            raise ValueError(f"an answer has at least one token, got {self.output_tokens}")
        if self.total_tokens > MAX_TOKENS:
            raise ValueError(f"{self.total_tokens} tokens are beyond any context (limit {MAX_TOKENS})")
        if self.prefix_block_ids and self.block_tokens < 1:
            raise ValueError("prefix blocks need a block_tokens of at least 1")

    @property
    def total_tokens(self) -> int:
        """Prompt and answer together: what the model's context must hold."""
        return self.input_tokens + self.output_tokens
