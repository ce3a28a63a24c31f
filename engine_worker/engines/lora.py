"""Engines that serve LoRA adapters beside their model."""

from typing import Protocol, TypeGuard

from controlplane.model.adapter import Adapter
from engine_worker.adapters import AdapterCache
from engine_worker.engines.interface import Engine


class LoraEngine(Engine, Protocol):
    """An engine that may serve LoRA adapters. It loads the one of a request by itself where it is not loaded, and ends
    the request with an error that `may_go_elsewhere` where it cannot."""

    adapters: AdapterCache
    """What is loaded; without any slot the engine, as it was started, serves none."""

    @property
    def lora_modules(self) -> tuple[Adapter, ...]:
        """The adapters that its settings name, without their digests."""

    async def load_adapter(self, adapter: Adapter, *, may_evict: bool = True) -> Adapter:
        """Load an adapter, or do nothing if it is loaded; returns it with its digest. Without `may_evict` nothing is
        dropped for it. Raises AdapterUnavailable (AdapterNotFound)."""

    async def unload_adapter(self, digest: str) -> None:
        """Drop an adapter, unless a request uses it; one that is not loaded is ignored."""


def serves_adapters(engine: Engine) -> TypeGuard[LoraEngine]:
    """Whether this engine, started, serves LoRA adapters."""
    adapters = getattr(engine, "adapters", None)
    return isinstance(adapters, AdapterCache) and adapters.slots > 0
