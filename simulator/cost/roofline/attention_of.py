"""The attention models of a model on a device."""

from simulator.cost.roofline.decode_attention import DecodeAttention
from simulator.cost.roofline.efficiency import Efficiency
from simulator.cost.roofline.prefill_attention import PrefillAttention
from simulator.cost.spec.device import DeviceSpec
from simulator.cost.spec.model import ModelSpec


def decode_attention(
    model: ModelSpec,
    device: DeviceSpec,
    tensor_parallel: int,
    *,
    element_bytes: float = 2.0,
    heterogeneity: bool = True,
    efficiency: Efficiency | None = None,
) -> DecodeAttention:
    """Of one layer's decodes on one of `tensor_parallel` devices; `element_bytes` of KV."""
    efficiency = efficiency or Efficiency()
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
        kernel_ms=efficiency.large_kernel_ms,
        rule=device.split_rule,
        heterogeneity=heterogeneity,
    )


def prefill_attention(
    model: ModelSpec, device: DeviceSpec, tensor_parallel: int, efficiency: Efficiency
) -> PrefillAttention:
    """Of one layer's prompt chunks on one of `tensor_parallel` devices."""
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
        kernel_ms=efficiency.large_kernel_ms,
    )
