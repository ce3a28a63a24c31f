"""Requests and prefixes that move to and from an engine core of our own, and why they cannot."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeAlias

from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.vllm.adapters import VllmAdapters
from engine_worker.engines.vllm.carriers import UnreadRequests
from engine_worker.engines.vllm.checkpoint import has_recurrent_layers
from engine_worker.engines.vllm.connector.messages import HostLoaded, Notice
from engine_worker.engines.vllm.connector_moves import ConnectorMoves
from engine_worker.engines.vllm.environment import Device
from engine_worker.engines.vllm.host_tier import VllmHostTier
from engine_worker.engines.vllm.running import EngineRequestState
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.host_tier.disk_store import DiskStore
from engine_worker.host_tier.store import HostStore
from engine_worker.kv.ucx_environment import UCX_PACKAGE

HostStores: TypeAlias = tuple[HostStore | None, DiskStore | None]
NO_STORES: Final[HostStores] = (None, None)


class Migrations(ConnectorMoves):
    """Those of an engine core that this process starts."""

    def __init__(
        self,
        endpoint: str,
        host: str,
        requests: Mapping[str, EngineRequestState],
        go_on: Callable[[EngineRequestState], None],
        host_tier: VllmHostTier,
    ) -> None:
        """Before the engine core is started. `host_tier` is told of loads."""
        super().__init__(endpoint, host, requests, go_on)
        self._host_tier = host_tier

    async def start(self, core: UnreadRequests, limits: EngineLimits, adapters: VllmAdapters) -> HostStores:
        """Ask the agent in the engine core for its layout. Call once the engine core runs. Returns its host's store of
        such blocks, and that on disk, if it has them. Raises `ConfigurationError` where its blocks are none that could
        move."""
        about = await self.agent.describe()
        self._begin(core, limits, adapters, about)
        store = self._host_tier.open(about.layout)
        self.prefixes.loads_from_host = store is not None
        return store, self._host_tier.open_disk(about.layout)

    def _notice(self, notice: Notice) -> None:
        if isinstance(notice, HostLoaded):
            if not self.prefixes.host_loaded(notice):
                self._host_tier.loaded(notice)
        else:
            super()._notice(notice)


CHANGE_KV: Final = frozenset("decode_context_parallel_size prefill_context_parallel_size speculative_config".split())
"""Arguments of vLLM that spread KV over processes, or have steps compute KV of tokens that are taken back."""


def migration_obstacle(settings: VllmSettings, device: Device) -> str | None:
    """Why requests cannot migrate to and from this engine; None if they can."""
    if not settings.movable:
        return "the settings say so"
    if settings.runner == "pooling":
        return "a pooling model's prompts are asked again elsewhere"
    if find_spec("ucxx") is None:
        return f"UCX is not installed: pip install {UCX_PACKAGE}"
    if has_recurrent_layers(Path(settings.model_path)):
        return "some of its layers keep a state instead of KV blocks, with which vLLM starts no KV connector"
    given = {argument.partition("=")[0].partition(".")[0] for argument in settings.others}
    if unknown := sorted(name for name in given if name in CHANGE_KV or name.startswith("data_parallel")):
        return f"it has not been tried with {' and '.join(unknown)}"
    return None
