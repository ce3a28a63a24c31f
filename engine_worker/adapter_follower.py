"""Keeps an engine's LoRA adapters at what the state store says of its model."""

import asyncio
import logging
from typing import Final

from controlplane.model.adapter import ADAPTERS_PREFIX, Adapter, AdapterRecord, StaticAdapter, check_record
from engine_worker.engines.lora import LoraEngine
from mesh.errors import AdapterUnavailable, ConfigurationError, EngineError
from mesh.store.interface import StateStore
from mesh.store.stored_folder import StoredFolder

log = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 1.0
"""After an adapter that was unloaded was still in use."""


class AdapterFollower:
    """Loads adapters before a request asks for them, as long as there is room, and drops those that are unloaded or
    replaced once no request uses them. Whatever fails here is tried again when a request comes."""

    def __init__(self, engine: LoraEngine, base_model: str, store: StateStore) -> None:
        self._engine = engine
        self._base_model = base_model
        self._folder = StoredFolder(store, ADAPTERS_PREFIX, AdapterRecord, check_record, self._changed)
        self._wanted: dict[str, Adapter] = {}
        """By name; of the store."""
        self._static: frozenset[str] = frozenset()
        """Digests of the adapters that the worker was started with."""
        self._dropped: set[str] = set()
        """Digests that are to go."""
        self._work = asyncio.Event()

    async def load_modules(self) -> tuple[StaticAdapter, ...]:
        """Load the adapters that the worker was started with. Raises ConfigurationError, as vLLM does not start."""
        loaded = []
        for module in self._engine.lora_modules:
            try:
                adapter = await self._engine.load_adapter(module)
            except AdapterUnavailable as error:
                raise ConfigurationError(f"lora_modules={module.name}={module.path}: {error}") from error
            loaded.append(StaticAdapter(adapter.name, adapter.path, adapter.digest, adapter.is_3d_lora_weight))
        self._static = frozenset(each.digest for each in loaded)
        return tuple(loaded)

    async def follow(self) -> None:
        """Take in what the store says, for ever."""
        await self._folder.follow()

    async def run(self) -> None:
        """Load and drop, for ever, one after the other."""
        while True:
            await self._work.wait()
            self._work.clear()
            for digest in sorted(self._dropped):
                if digest in self._kept:
                    self._dropped.discard(digest)
                    continue
                await self._engine.unload_adapter(digest)
                if self._engine.adapters.number(digest) is None:
                    self._dropped.discard(digest)
            for adapter in tuple(self._wanted.values()):
                await self._load(adapter)
            if self._dropped:
                await asyncio.sleep(LOOK_AGAIN_S)
                self._work.set()

    @property
    def _kept(self) -> frozenset[str]:
        return self._static | {adapter.digest for adapter in self._wanted.values()}

    async def _load(self, adapter: Adapter) -> None:
        if self._engine.adapters.number(adapter.digest) is not None or not self._engine.adapters.has_room:
            return
        try:
            await self._engine.load_adapter(adapter, may_evict=False)
        except EngineError as error:
            log.warning("a LoRA adapter is not loaded here", extra={"adapter": adapter.name, "reason": str(error)})

    def _changed(self, name: str, record: AdapterRecord | None) -> None:
        former = self._wanted.pop(name, None)
        if record is not None and record.base_model == self._base_model:
            self._wanted[name] = record.adapter(name)
        if former is not None:
            self._dropped.add(former.digest)
        self._work.set()
