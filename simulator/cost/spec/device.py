"""What of a device's datasheet the cost of a step follows from."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from mesh.errors import ConfigurationError


class SplitRule(Enum):
    """Who decides into how many tiles decode attention cuts the KV of a sequence."""

    EQUAL = "equal"
    """One number for the whole batch, from its size and its longest sequence (FlashAttention-2)."""
    BALANCED = "balanced"
    """For each sequence by its own length, so that no tile exceeds a share (FlashAttention-3, FlashInfer)."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator, by its datasheet: dense rates (no sparsity), decimal units."""

    name: str
    flops_per_s: Mapping[str, float]
    """Peak of the tensor cores by number format (bf16, fp8, fp4), accumulating in fp32."""
    memory_bytes: float
    memory_bytes_per_s: float
    multiprocessors: int
    link_bytes_per_s: float
    """To its peers within a node, one direction: NVLink's, or of a PCIe device its slot's."""
    nvlink: bool
    attention_tiles: int
    """Tiles of an attention kernel (80 KB of K and V in flight) that a multiprocessor's shared memory holds."""
    split_rule: SplitRule
    """Of the decode attention kernel that vLLM runs on it."""

    def compute_dtype(self, weight_dtype: str) -> str:
        """The format that weights of `weight_dtype` are multiplied in: what the device lacks is widened."""
        for dtype in _WIDER[weight_dtype]:
            if dtype in self.flops_per_s:
                return dtype
        raise ConfigurationError(f"{self.name} has no rate for {weight_dtype} or wider")


_WIDER = {"fp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16"), "bf16": ("bf16",)}
