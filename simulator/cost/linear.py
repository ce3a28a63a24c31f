"""A cost model with one coefficient per kind of work."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.cost.model import BatchShape, CostModel


@dataclass(frozen=True, slots=True)
class LinearCost(CostModel):
    """step = fixed + per prefill token + per decode request + per context token read + per attended pair.

    The defaults are derived, not measured, for an 8B Llama (32 layers, 4096 wide, 8 KV heads of 128, bf16) on
    one A100-80GB by its datasheet (312 TFLOP/s dense bf16, of which half is taken to be reached; 2.04 TB/s, of
    which 80 %): the weights (16.1 GB) are read once a step, a prefill token costs 2 FLOP per parameter,
    a decode step reads 128 KiB of KV per context token, and attention in prefill costs 4 x 4096 x 32 FLOP per
    pair of tokens. The cost per decode request (sampling, bookkeeping) is an assumption.
    """

    fixed_ms: float = 9.9
    prefill_token_ms: float = 0.103
    decode_request_ms: float = 0.02
    context_token_ms: float = 8.0e-5
    attended_pair_ms: float = 3.4e-6

    def step_ms(self, batch: BatchShape) -> float:
        new_tokens = 0
        attended_pairs = 0.0
        for chunk in batch.prefill:
            new_tokens += chunk.new_tokens
            attended_pairs += chunk.new_tokens * (chunk.context_tokens + (chunk.new_tokens + 1) / 2)
        decode_ms = self._decode_fixed_ms(batch.decode_requests) + (
            self.context_token_ms * batch.decode_context_tokens_sum
        )
        return decode_ms + (self.prefill_token_ms * new_tokens + self.attended_pair_ms * attended_pairs)

    def decode_run_ms(self, batch: BatchShape, steps: int) -> NDArray[np.float64]:
        """Durations of consecutive decode steps, by the same operations in the same order as `step_ms`."""
        growth_tokens = batch.decode_requests * np.arange(steps, dtype=np.float64)
        context_tokens: NDArray[np.float64] = batch.decode_context_tokens_sum + growth_tokens
        return self._decode_fixed_ms(batch.decode_requests) + self.context_token_ms * context_tokens

    def _decode_fixed_ms(self, requests: int) -> float:
        return self.fixed_ms + self.decode_request_ms * requests
