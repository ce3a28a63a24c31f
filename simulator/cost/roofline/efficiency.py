"""How much of its datasheet a device reaches."""

from dataclasses import dataclass

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of peak rates, and what every kernel and step costs besides. docs/cost_models.md has the sources."""

    flops: float = 0.71
    """Share of the device's peak that matrix products reach."""
    memory: float = 0.82
    """Of memory bandwidth, where a kernel streams weights or KV."""
    prefill_attention_flops: float = 0.55
    """Share of the device's peak that prefill attention reaches."""
    tile_bytes_per_s: float = 21e9
    """KV that one attention tile streams when nothing else asks for memory."""
    link: float = 0.75
    """Of a link's one-way rate in large all-reduces."""
    large_kernel_ms: float = 0.006
    """What a matrix product or an attention kernel takes besides its work."""
    small_kernel_ms: float = 0.0025
    """What a norm, a rotary embedding, an activation or a cache write takes at least."""
    small_kernels_per_layer: float = 5.0
    sampler_request_ms: float = 0.0005
    """Time of the sampler per request."""
    all_reduce_ms: float = 0.010
    """Latency of a small all-reduce within a node."""
    host_step_ms: float = 0.0
    """Of a step outside of the device that the device waits for; 0: schedulers run a step ahead, as vLLM's does."""

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "prefill_attention_flops", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} is a share of a peak rate, above 0 and up to 1")
        if self.tile_bytes_per_s <= 0:
            raise ConfigurationError("tile_bytes_per_s must be positive")
        for name in (
            "large_kernel_ms",
            "small_kernel_ms",
            "small_kernels_per_layer",
            "sampler_request_ms",
            "all_reduce_ms",
            "host_step_ms",
        ):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} must not be negative")
