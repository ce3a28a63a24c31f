"""What a step costs that passes through the stages of a pipeline."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.cost.model import BatchShape, CostModel


@dataclass(frozen=True, slots=True)
class PipelineCost(CostModel):
    """A batch passes all layers one after the other, as without a pipeline, and hops between the stages.

    While one batch is in one stage, others are in the other stages: a pipeline of pp stages serves pp batches at
    once, each at this pace. Where those batches differ (a long prefill behind short decodes), real pipelines wait
    for the slowest; that is left out here, which flatters pipelines under mixed load.
    """

    layers: CostModel
    """Of all layers together, on the devices of one stage."""
    hops: int
    hop_ms: float
    hop_ms_per_token: float

    def step_ms(self, batch: BatchShape) -> float:
        tokens = batch.decode_requests + sum(chunk.new_tokens for chunk in batch.prefill)
        return self.layers.step_ms(batch) + self._hops_ms(tokens)

    def decode_run_ms(self, batch: BatchShape, steps: int) -> NDArray[np.float64]:
        return self.layers.decode_run_ms(batch, steps) + self._hops_ms(batch.decode_requests)

    def _hops_ms(self, tokens: int) -> float:
        return self.hops * (self.hop_ms + self.hop_ms_per_token * tokens)
