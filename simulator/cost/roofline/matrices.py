"""Everything in a step that depends on how many tokens it has, not on their contexts."""

from dataclasses import dataclass

from simulator.cost.roofline.efficiency import Efficiency
from simulator.cost.spec.device import DeviceSpec
from simulator.cost.spec.model import WEIGHT_BYTES, Experts, Gemm, ModelSpec

_ACTIVATION_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class Matrices:
    """The projections, MLPs, experts, small kernels and all-reduces of one step on one device."""

    model: ModelSpec
    device: DeviceSpec
    tensor_parallel: int
    weight_dtype: str
    efficiency: Efficiency

    def step_ms(self, tokens: int, sequences: int) -> float:
        """For `tokens` new ones of `sequences` requests, each of which is given its next token's scores."""
        gemms_ms = sum(
            gemm.copies * self._gemm_ms(gemm, tokens, self.weight_dtype)
            for gemm in self.model.gemms(self.tensor_parallel)
        )
        head = Gemm(self.model.hidden_size, self.model.vocabulary_tokens // self.tensor_parallel)
        layers_ms = self.model.layers * (self._small_kernels_ms(tokens) + self._all_reduces_ms(tokens))
        return gemms_ms + self._gemm_ms(head, sequences, "bf16") + layers_ms + self._experts_ms(tokens)

    def _gemm_ms(self, gemm: Gemm, tokens: float, dtype: str) -> float:
        flops = 2.0 * tokens * gemm.inputs * gemm.outputs
        activations = _ACTIVATION_BYTES * tokens * (gemm.inputs + gemm.outputs)
        weights = gemm.inputs * gemm.outputs * WEIGHT_BYTES[dtype]
        return self.efficiency.large_kernel_ms + self._roofline_ms(flops, weights + activations, dtype)

    def _experts_ms(self, tokens: int) -> float:
        """Routed experts: the weights of those that some token is sent to, if tokens choose independently."""
        experts = self.model.experts
        if experts is None:
            return 0.0
        touched = touched_experts(experts, tokens)
        share = self.model.expert_parameters / self.tensor_parallel
        rows = tokens * experts.active
        flops = 2.0 * rows * share
        width = 2 * self.model.hidden_size + 3 * experts.intermediate_size / self.tensor_parallel
        read = touched * share * WEIGHT_BYTES[self.weight_dtype] + _ACTIVATION_BYTES * rows * width
        # Two grouped products, and one small kernel each that sorts tokens by expert and sums their results.
        kernels_ms = 2 * (self.efficiency.large_kernel_ms + self.efficiency.small_kernel_ms)
        return self.model.expert_layers * (kernels_ms + self._roofline_ms(flops, read, self.weight_dtype))

    def _small_kernels_ms(self, tokens: int) -> float:
        model, tp = self.model, self.tensor_parallel
        heads = (model.attention_heads + 2 * model.kv_heads) / tp * model.head_dim
        active = model.experts.active * model.experts.intermediate_size if model.experts else model.intermediate_size
        # Two norms with residual (read two, write two), rotary embedding in place, cache write, gate x up.
        elements = 8 * model.hidden_size + 3 * heads + 3 * active / tp
        memory_ms = _ACTIVATION_BYTES * tokens * elements / self._bytes_per_ms
        return self.efficiency.small_kernels_per_layer * self.efficiency.small_kernel_ms + memory_ms

    def _all_reduces_ms(self, tokens: int) -> float:
        """Two a layer: after attention and after the MLP (ring: each link carries 2 (n - 1) / n of the data)."""
        tp = self.tensor_parallel
        if tp == 1:
            return 0.0
        size = _ACTIVATION_BYTES * tokens * self.model.hidden_size
        link_ms = 2 * (tp - 1) / tp * size / (self.device.link_bytes_per_s * self.efficiency.link / 1000)
        return 2 * (self.efficiency.all_reduce_ms + link_ms)

    def _roofline_ms(self, flops: float, read_bytes: float, dtype: str) -> float:
        peak = self.device.flops_per_s[self.device.compute_dtype(dtype)] / 1000
        return max(flops / (peak * self.efficiency.flops), read_bytes / self._bytes_per_ms)

    @property
    def _bytes_per_ms(self) -> float:
        return self.device.memory_bytes_per_s * self.efficiency.memory / 1000


def touched_experts(experts: Experts, tokens: int) -> float:
    """How many experts get work, expected, where each token chooses `active` of them uniformly."""
    untouched: float = (1.0 - experts.active / experts.count) ** tokens
    return experts.count * (1.0 - untouched)
