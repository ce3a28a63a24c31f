"""How much of its datasheet a device reaches."""

from dataclasses import dataclass

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of peak rates, and what every kernel and step costs besides. docs/cost_models.md has the sources."""

    flops: float = 0.72
    """Of large matrix products."""
    memory: float = 0.86
    """Of memory bandwidth, where a kernel streams weights or KV."""
    prefill_attention_flops: float = 0.55
    """Of prefill attention."""
    tile_bytes_per_s: float = 21e9
    """KV that one attention tile streams when it has a multiprocessor's other resources to itself."""
    link: float = 0.75
    """Of a link's one-way rate in large all-reduces."""
    kernel_ms: float = 0.003
    """Every kernel takes this long besides its work."""
    small_kernels_per_layer: float = 5.0
    """Norms, rotary embedding, activation, cache write."""
    all_reduce_ms: float = 0.010
    """Latency of a small all-reduce within a node."""
    step_ms: float = 0.5
    """Of a step outside of the device: scheduling and launch that the device waits for."""
    request_ms: float = 0.005
    """The same per request in the batch: its inputs, sampling and output."""

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "prefill_attention_flops", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} is a share of a peak rate, above 0 and up to 1")
        if self.tile_bytes_per_s <= 0:
            raise ConfigurationError("tile_bytes_per_s must be positive")
        for name in ("kernel_ms", "small_kernels_per_layer", "all_reduce_ms", "step_ms", "request_ms"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} must not be negative")
