"""The cost model of an instance that was profiled."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.instance_profile import InstanceSizes, StepCoefficients
from simulator.cost.model import BatchShape, CostModel
from simulator.instance.config import InstanceConfig

SHORTEST_STEP_MS = 1e-6
"""A fit may leave nothing for a step; time goes on all the same."""


@dataclass(frozen=True, slots=True)
class FittedStepCost(CostModel):
    """A step is the sum of its parts, as `penstock profile` has fitted them."""

    coefficients: StepCoefficients

    def step_ms(self, batch: BatchShape) -> float:
        """Duration of one step; O(requests) for the longest context."""
        c = self.coefficients
        new_tokens, pairs = 0, 0.0
        for chunk in batch.prefill:
            new_tokens += chunk.new_tokens
            pairs += chunk.new_tokens * (chunk.context_tokens + (chunk.new_tokens + 1) / 2)
        prefill_ms = c.prefill_step_ms + c.prefill_token_ms * new_tokens + c.attended_pair_ms * pairs if pairs else 0.0
        longest = int(batch.decode_context_tokens.max()) if batch.decode_requests else 0
        return self._decode_ms(batch.decode_requests, batch.decode_context_tokens_sum, longest) + prefill_ms

    def decode_run_ms(self, batch: BatchShape, steps: int) -> NDArray[np.float64]:
        """Durations of consecutive decode steps, by the same operations."""
        grown = np.arange(steps, dtype=np.int64)
        totals = batch.decode_context_tokens_sum + batch.decode_requests * grown
        longest = int(batch.decode_context_tokens.max()) + grown
        c = self.coefficients
        fixed_ms = max(c.fixed_ms, SHORTEST_STEP_MS) + c.decode_request_ms * batch.decode_requests
        run_ms: NDArray[np.float64] = fixed_ms + c.context_token_ms * totals + c.longest_token_ms * longest + 0.0
        return run_ms

    def _decode_ms(self, requests: int, total: int, longest: int) -> float:
        c = self.coefficients
        fixed_ms = max(c.fixed_ms, SHORTEST_STEP_MS) + c.decode_request_ms * requests
        return fixed_ms + c.context_token_ms * total + c.longest_token_ms * longest


def profiled_instance(sizes: InstanceSizes) -> InstanceConfig:
    """An instance of the sizes that were profiled."""
    return InstanceConfig(
        block_tokens=sizes.block_tokens,
        kv_blocks=sizes.kv_blocks,
        max_model_len_tokens=sizes.max_model_len_tokens,
        max_batch_requests=sizes.max_batch_requests,
        max_step_tokens=sizes.max_step_tokens,
        block_bytes=sizes.block_tokens,
    )
