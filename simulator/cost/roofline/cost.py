"""The roofline cost model of one instance."""

import numpy as np
from numpy.typing import NDArray

from simulator.cost.model import BatchShape, CostModel
from simulator.cost.roofline.decode_attention import DecodeAttention
from simulator.cost.roofline.efficiency import Efficiency
from simulator.cost.roofline.lengths import DecodeLengths
from simulator.cost.roofline.matrices import Matrices
from simulator.cost.roofline.prefill_attention import PrefillAttention
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
        efficiency: Efficiency | None = None,
    ) -> None:
        self.efficiency = efficiency = efficiency or Efficiency()
        self._layers = model.layers
        self._matrices = Matrices(model, device, tensor_parallel, weight_dtype, efficiency)
        self._matrices_ms: dict[tuple[int, int], float] = {}
        self._decode = _decode_attention(model, device, tensor_parallel, kv_element_bytes, heterogeneity, efficiency)
        self._prefill = _prefill_attention(model, device, tensor_parallel, efficiency)

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
        return float(rest_ms + self._layers * (prefill_ms + self._decode.layer_ms(lengths)))

    def decode_run_ms(self, batch: BatchShape, steps: int) -> NDArray[np.float64]:
        """Durations of consecutive decode steps; O(requests + steps)."""
        rest_ms = self._rest_ms(batch.decode_requests, batch.decode_requests)
        lengths = DecodeLengths.of_step(batch.decode_context_tokens, batch.decode_context_tokens_sum).run(steps)
        run_ms: NDArray[np.float64] = rest_ms + self._layers * (0.0 + self._decode.layer_ms(lengths))
        return run_ms

    def _rest_ms(self, tokens: int, sequences: int) -> float:
        found = self._matrices_ms.get((tokens, sequences))
        if found is None:
            host_ms = self.efficiency.step_ms + self.efficiency.request_ms * sequences
            found = host_ms + self._matrices.step_ms(tokens, sequences)
            if len(self._matrices_ms) < _REMEMBERED_STEPS:
                self._matrices_ms[tokens, sequences] = found
        return found


def _decode_attention(
    model: ModelSpec,
    device: DeviceSpec,
    tensor_parallel: int,
    element_bytes: float,
    heterogeneity: bool,
    efficiency: Efficiency,
) -> DecodeAttention:
    query_heads = model.attention_heads // tensor_parallel
    if latent := model.latent:
        heads, token_bytes = 1, latent.cached_elements * element_bytes
        value_dim = latent.kv_rank
    else:
        heads = max(1, model.kv_heads // tensor_parallel)
        token_bytes = 2 * model.head_dim * element_bytes
        value_dim = model.head_dim
    return DecodeAttention(
        heads=heads,
        token_bytes=token_bytes,
        partial_bytes=2 * 4.0 * query_heads / heads * value_dim,  # fp32, written and read
        multiprocessors=device.multiprocessors,
        slots=device.multiprocessors * device.attention_tiles,
        bytes_per_ms=device.memory_bytes_per_s * efficiency.memory / 1000,
        lone_token_ms=token_bytes / efficiency.tile_bytes_per_s * 1000,
        kernel_ms=efficiency.kernel_ms,
        rule=device.split_rule,
        heterogeneity=heterogeneity,
    )


def _prefill_attention(
    model: ModelSpec, device: DeviceSpec, tensor_parallel: int, efficiency: Efficiency
) -> PrefillAttention:
    if latent := model.latent:
        pair_elements = latent.nope_dim + latent.rope_dim + latent.value_dim
    else:
        pair_elements = 2 * model.head_dim
    peak = device.flops_per_s["bf16"] / 1000
    return PrefillAttention(
        heads=model.attention_heads // tensor_parallel,
        flops_per_pair=2.0 * pair_elements,
        multiprocessors=device.multiprocessors,
        flops_per_ms=peak * efficiency.prefill_attention_flops,
        lone_token_ms=pair_elements * 2 / efficiency.tile_bytes_per_s * 1000,
        kernel_ms=efficiency.kernel_ms,
    )
