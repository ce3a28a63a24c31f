"""The roofline cost model of one instance."""

import numpy as np
from numpy.typing import NDArray

from simulator.cost.fitted.unevenness import Unevenness
from simulator.cost.model import BatchShape, CostModel
from simulator.cost.roofline.attention import decode_attention, prefill_attention
from simulator.cost.roofline.efficiency import Efficiency
from simulator.cost.roofline.lengths import DecodeLengths
from simulator.cost.roofline.matrices import Matrices
from simulator.cost.spec.device import DeviceSpec
from simulator.cost.spec.model import ModelSpec

_REMEMBERED_STEPS = 1 << 16


class RooflineCost(CostModel):
    """A step is what its matrices, its attention and the host take, one after the other."""

    def __init__(
        self,
        model: ModelSpec,
        device: DeviceSpec,
        tensor_parallel: int,
        weight_dtype: str,
        *,
        kv_element_bytes: float = 2.0,
        heterogeneity: bool = True,
        unevenness: Unevenness | None = None,
        efficiency: Efficiency | None = None,
    ) -> None:
        """`unevenness`: of decode attention, as measured; None: by its tile model, unless `heterogeneity` is off."""
        self.efficiency = efficiency = efficiency or Efficiency()
        self._layers = model.layers
        self._matrices = Matrices(model, device, tensor_parallel, weight_dtype, efficiency)
        self._matrices_ms: dict[tuple[int, int], float] = {}
        self._decode = decode_attention(
            model,
            device,
            tensor_parallel,
            element_bytes=kv_element_bytes,
            heterogeneity=heterogeneity and unevenness is None,
            efficiency=efficiency,
        )
        self._unevenness = unevenness if heterogeneity else None
        self._prefill = prefill_attention(model, device, tensor_parallel, efficiency)

    def step_ms(self, batch: BatchShape) -> float:
        """Duration of one step; O(requests), two passes over the decode contexts."""
        new_tokens = 0
        prefill_ms = 0.0
        for chunk in batch.prefill:
            new_tokens += chunk.new_tokens
            prefill_ms += self._prefill.layer_ms(chunk)
        decodes = batch.decode_requests
        rest_ms = self._rest_ms(new_tokens + decodes, len(batch.prefill) + decodes)
        if not decodes:
            return rest_ms + self._layers * prefill_ms
        lengths = DecodeLengths.of_step(batch.decode_context_tokens, batch.decode_context_tokens_sum)
        decode_ms = self._decode.layer_ms(lengths)
        if self._unevenness is not None:
            if batch.prefill:
                decode_ms += self._unevenness.beside_prompt_ms(lengths, decode_ms)
            else:
                decode_ms *= self._unevenness.stretch(lengths)
        return float(rest_ms + self._layers * (prefill_ms + decode_ms))

    def decode_run_ms(self, batch: BatchShape, steps: int) -> NDArray[np.float64]:
        """Durations of consecutive decode steps; O(requests + steps)."""
        rest_ms = self._rest_ms(batch.decode_requests, batch.decode_requests)
        lengths = DecodeLengths.of_step(batch.decode_context_tokens, batch.decode_context_tokens_sum).run(steps)
        decode_ms = self._decode.layer_ms(lengths)
        if self._unevenness is not None:
            decode_ms = decode_ms * self._unevenness.stretch(lengths)
        run_ms: NDArray[np.float64] = rest_ms + self._layers * (0.0 + decode_ms)
        return run_ms

    def _rest_ms(self, tokens: int, sequences: int) -> float:
        found = self._matrices_ms.get((tokens, sequences))
        if found is None:
            rest_ms = self.efficiency.host_step_ms + self.efficiency.sampler_request_ms * sequences
            found = rest_ms + self._matrices.step_ms(tokens, sequences)
            if len(self._matrices_ms) < _REMEMBERED_STEPS:
                self._matrices_ms[tokens, sequences] = found
        return found
