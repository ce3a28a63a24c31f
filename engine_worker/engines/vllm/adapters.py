"""LoRA adapters of a vLLM engine. What vLLM has loaded is decided here, and not by its own cache of them: that one
would load an adapter that it has dropped in the middle of a step, and die with the engine where the files are gone.

vLLM knows each adapter by its checksum instead of its name: so its prefix cache, and the KV events that tell of it,
keep apart what was trained on under the same name. (By itself it goes by name and path, and warns that blocks of former
weights may be used.)
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from controlplane.model.adapter import Adapter
from engine_worker.adapters import (
    AdapterCache,
    NumberedAdapter,
    adapter_digest,
    adapter_directory,
    check_digest,
    parse_modules,
)
from mesh.errors import AdapterUnavailable, ConfigurationError, EngineFailed

if TYPE_CHECKING:
    from engine_worker.engines.vllm.core import Core

log = logging.getLogger(__name__)


class VllmAdapters:
    """Loads them one after the other."""

    def __init__(self, modules: str, clock: Callable[[], float], executor: Executor) -> None:
        """`modules`: see `VllmSettings.lora_modules`; `executor` reads files. Raises ConfigurationError."""
        self.modules = parse_modules(modules)
        self.cache = AdapterCache(0, 0)
        self._clock = clock
        self._executor = executor
        self._core: Core | None = None
        self._one_at_a_time = asyncio.Lock()

    def start(self, core: "Core") -> AdapterCache:
        """The engine runs, and says how many it takes. Raises ConfigurationError if it is to begin with some and takes
        none."""
        self._core = core
        self.cache = AdapterCache(*core.lora_limits())
        if self.modules and not self.cache.slots:
            raise ConfigurationError("lora_modules needs enable_lora=true")
        return self.cache

    def begin(self, request_id: str, adapter: Adapter | None) -> None:
        """A request uses it from now on. Raises AdapterUnavailable where it cannot be loaded."""
        self.cache.begin(request_id, adapter, self._clock())

    @asynccontextmanager
    async def reserved(self, migration_id: str, adapter: Adapter | None) -> AsyncIterator[NumberedAdapter | None]:
        """The same as `begin` and `ready` for a request that is about to arrive, unless the block raises."""
        self.begin(migration_id, adapter)
        try:
            yield await self.ready(adapter)
        except BaseException:
            self.cache.end(migration_id)
            raise

    async def ready(self, adapter: Adapter | None) -> NumberedAdapter | None:
        """As vLLM is to be asked for it, once it is loaded. Raises AdapterUnavailable."""
        if adapter is None:
            return None
        if (number := self.cache.number(adapter.digest)) is None:
            await self.load(adapter)
            number = self.cache.number(adapter.digest)
        assert number is not None, "it is in use"
        return self.cache.adapter(adapter.digest), number

    async def load(self, adapter: Adapter, *, may_evict: bool = True) -> Adapter:
        """See `LoraEngine.load_adapter`."""
        async with self._one_at_a_time:
            if self.cache.number(adapter.digest) is not None:
                return adapter
            try:
                return await self._load(adapter, may_evict=may_evict)
            except AdapterUnavailable as error:
                if adapter.digest and may_evict:
                    log.error("a LoRA adapter cannot be loaded", extra={"adapter": adapter.name, "reason": str(error)})
                    self.cache.refused(adapter.digest, str(error), self._clock())
                raise

    async def unload(self, digest: str) -> None:
        """See `LoraEngine.unload_adapter`."""
        async with self._one_at_a_time:
            if (number := self.cache.unused(digest)) is not None:
                await self._drop(number)

    async def _load(self, adapter: Adapter, *, may_evict: bool) -> Adapter:
        if self._core is None or not self.cache.slots:
            raise AdapterUnavailable("this instance serves no LoRA adapters: start it with enable_lora=true")
        loop = asyncio.get_running_loop()
        local = replace(adapter, path=await loop.run_in_executor(self._executor, adapter_directory, adapter.path))
        found = check_digest(local, await loop.run_in_executor(self._executor, adapter_digest, local.path))
        if self.cache.number(found.digest) is None:
            if not may_evict and not self.cache.has_room:
                raise AdapterUnavailable("there is no room for one more LoRA adapter")
            if (victim := self.cache.victim()) is not None:
                await self._drop(victim)
            number = self.cache.next_number()
            await self._core.add_lora((found, number))
            self.cache.loaded(found, number)
        return replace(found, path=adapter.path)

    async def _drop(self, number: int) -> None:
        if self._core is None:
            raise EngineFailed("the engine is not running")
        # First, so that no request that comes meanwhile takes it for loaded.
        self.cache.dropped(number)
        await self._core.remove_lora(number)
