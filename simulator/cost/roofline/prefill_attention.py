"""Prefill attention of one chunk: arithmetic, or the longest tile where a short chunk makes few of them."""

from dataclasses import dataclass

from simulator.cost.model import PrefillChunk

_TILE_QUERIES = 128


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """One layer on one device."""

    heads: int
    """Query heads on the device."""
    flops_per_pair: float
    """Per query head and pair of tokens: scores and weighted values."""
    multiprocessors: int
    flops_per_ms: float
    """Of the device, as reached."""
    lone_token_ms: float
    """A tile's time for one token of KV when it is bound by streaming it."""
    kernel_ms: float

    def layer_ms(self, chunk: PrefillChunk) -> float:
        """Duration of the chunk's attention to its context and, causally, to itself."""
        pairs = chunk.new_tokens * (chunk.context_tokens + (chunk.new_tokens + 1) / 2)
        arithmetic_ms = pairs * (self.heads * self.flops_per_pair / self.flops_per_ms)
        rows = min(chunk.new_tokens, _TILE_QUERIES)
        token_ms = max(self.lone_token_ms, rows * self.flops_per_pair * self.multiprocessors / self.flops_per_ms)
        return self.kernel_ms + max(arithmetic_ms, (chunk.context_tokens + chunk.new_tokens) * token_ms)
