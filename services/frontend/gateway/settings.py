"""The options of a gateway, as its command line takes them."""

from dataclasses import dataclass

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Every option of `penstock serve gateway`. Envoy's external processing is served on the role's --port."""

    max_streams: int = 4096
    """Requests that pass at once; more are answered 429."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Larger request bodies are answered 413."""
    max_held_bytes: int = 512 * 1024 * 1024
    """Of all bodies that are held until their endpoint is known; more are answered 503."""
    body_deadline_s: float = 60.0
    """A body that is not there by then is answered 408."""
    request_deadline_s: float = 600.0
    """A request that takes longer is cut off."""
    placement_deadline_s: float = 0.5
    """How long the scheduler may take before the gateway places a request itself."""
    instance_wait_s: float = 5.0
    """How long a request waits for an endpoint that can take it; then it is answered 503."""
    max_waiting_requests: int = 512
    """Requests that wait so at once; more are answered 429."""
    max_fallbacks: int = 2
    """Further endpoints that Envoy is told, in case the first one cannot be reached."""
    tokenizer_cache_bytes: int = 64 * 1024 * 1024
    """Of pieces of prompts whose tokens are remembered, with these, per model."""

    def __post_init__(self) -> None:
        """Raises ConfigurationError for settings with which no request could pass."""
        for name in ("max_streams", "max_body_bytes", "max_held_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("body_deadline_s", "request_deadline_s", "placement_deadline_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name):g}")
