"""LoRA adapters of the simulated engine: it reads their files for the checksum, which its tokens depend on."""

from collections.abc import Callable, Collection

from controlplane.model.adapter import NO_ADAPTERS, Adapter, AdapterLoad
from engine_worker.adapters import AdapterCache, ReadDigest, adapter_digest, check_digest
from mesh.errors import AdapterUnavailable


class SimulatedAdapters:
    """Loads within the call, on the event loop: such an engine has small adapters or none with weights."""

    def __init__(
        self,
        slots: int,
        capacity: int,
        now_s: Callable[[], float],
        modules: tuple[Adapter, ...] = (),
        read_digest: ReadDigest = adapter_digest,
    ) -> None:
        """`slots` and `capacity`: see `AdapterCache`; `read_digest`: the checksum of the files at a path."""
        self.cache = AdapterCache(slots, capacity)
        self.modules = modules
        self._now_s = now_s
        self._read_digest = read_digest

    def use(self, request_id: str, adapter: Adapter | None, running: Collection[str]) -> None:
        """A request comes; `running`: the ids of those that are there. Raises AdapterUnavailable."""
        if adapter is None:
            return
        self.cache.keep_only(running)
        self.cache.begin(request_id, adapter, self._now_s())
        try:
            self.load(adapter)
        except AdapterUnavailable:
            self.cache.end(request_id)
            raise

    def load(self, adapter: Adapter, *, may_evict: bool = True) -> Adapter:
        """See `LoraEngine.load_adapter`."""
        if self.cache.number(adapter.digest) is not None:
            return adapter
        try:
            found = check_digest(adapter, self._read_digest(adapter.path))
            if self.cache.number(found.digest) is not None:
                return found
            if not may_evict and not self.cache.has_room:
                raise AdapterUnavailable("there is no room for one more LoRA adapter")
            if (victim := self.cache.victim()) is not None:
                self.cache.dropped(victim)
        except AdapterUnavailable as error:
            if adapter.digest and may_evict:
                self.cache.refused(adapter.digest, str(error), self._now_s())
            raise
        self.cache.loaded(found, self.cache.next_number())
        return found

    def unload(self, digest: str) -> None:
        """See `LoraEngine.unload_adapter`."""
        if (number := self.cache.unused(digest)) is not None:
            self.cache.dropped(number)

    def report(self, running: Collection[str]) -> AdapterLoad:
        """For the load report."""
        if not self.cache.slots:
            return NO_ADAPTERS
        self.cache.keep_only(running)
        return self.cache.load(self._now_s())
