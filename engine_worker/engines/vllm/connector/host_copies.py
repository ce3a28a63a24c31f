"""Copies of KV blocks between the engine and the host's store, on the bridge's loop, beside the steps."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from engine_worker.engines.vllm.connector.messages import HostLoaded
from engine_worker.host_tier.disk_tier import DiskTier
from engine_worker.host_tier.settings import HostTierSettings, open_store
from engine_worker.host_tier.store import HostStore
from engine_worker.kv.plan import RegionBlocks
from mesh.errors import HostTierUnavailable
from mesh.runtime import Clock

log = logging.getLogger(__name__)

_MOST_FROM_DISK = 1024
"""Requests that are remembered whose blocks came from the disk and were not loaded yet."""


@dataclass(frozen=True, slots=True)
class HostSave:
    """Blocks of one request that are full, pinned by the scheduler side until `Saved` comes."""

    names: tuple[bytes, ...]
    """The whole chain up to the last of them."""
    first: int
    block_ids: tuple[int, ...]
    """From `first` on."""
    mesh_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Blocks that a request waits for, from slots that are pinned."""

    internal_id: str
    request_id: str
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    is_again: bool
    """See `HostLoaded`."""


@dataclass(frozen=True, slots=True)
class Saved:
    """To the scheduler side: these blocks are saved, or will not be."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """To the scheduler side: so many leading blocks of what was asked for are pinned, and are what was written."""

    internal_id: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """To the scheduler side: a request's load is over."""

    internal_id: str
    failed_blocks: tuple[int, ...]


HostEvent: TypeAlias = Saved | Fetched | Loaded


class HostCopies:
    """One for each engine core. Methods without `async` are called from vLLM's engine loop."""

    def __init__(
        self,
        memory: Any,
        store: HostStore,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[HostEvent], None],
        note_loaded: Callable[[HostLoaded], None],
        clock: Clock,
        disk: DiskTier | None = None,
    ) -> None:
        """`tell` and `note_loaded` are called from the bridge's loop."""
        self._memory = memory
        self._store = store
        self._loop = loop
        self._tell = tell
        self._note_loaded = note_loaded
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._disk = disk
        self._from_disk: dict[str, tuple[int, float]] = {}
        """By vLLM's id: blocks that came from the disk for a request that has not loaded them, and what they took."""
        self._is_broken = False

    def leading(self, names: Sequence[bytes]) -> int:
        """How many of a chain's leading blocks the store has, or the disk, as far as is known."""
        return (self._store if self._disk is None else self._disk).leading(names)

    def lacks(self, name: bytes) -> bool:
        """Whether a block is worth saving, as far as is known."""
        return self._store.lacks(name)

    def save(self, order: HostSave) -> None:
        """Copy blocks into the store; `Saved` follows."""
        self._memory.mark_engine()
        self._spawn(self._save, order)

    def fetch(self, internal_id: str, names: tuple[bytes, ...]) -> None:
        """Pin leading blocks of a chain and look whether they are what was written; `Fetched` follows."""
        self._spawn(self._fetch, internal_id, names)

    def load(self, order: HostLoad) -> None:
        """Copy pinned blocks into the engine and unpin them; `Loaded` follows."""
        self._memory.mark_engine()
        self._spawn(self._load, order)

    def unpin(self, slots: Sequence[int]) -> None:
        """What was fetched is not needed."""
        if slots:
            self._loop.call_soon_threadsafe(self._store.unpin, list(slots))

    async def follow(self, interval_s: float) -> None:
        """Take in what other instances do to the store, until cancelled."""
        while True:
            self._guarded(self._store.changes)
            if self._disk is not None:
                await self._disk.follow()
            await self._clock.sleep(interval_s)

    async def stop(self) -> None:
        """Give up what is under way."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._store.close()
        if self._disk is not None:
            self._disk.store.close()

    async def _save(self, order: HostSave) -> None:
        reserved: list[tuple[int, int]] = []
        try:
            await self._memory.ready()
            most = len(order.names) - order.first
            for index, slot in self._store.reserve(order.names, order.first, most):
                reserved.append((slot, order.mesh_hashes[index - order.first]))
                await self._memory.gather(
                    self._everywhere(order.block_ids[index - order.first]), self._store.view(slot)
                )
                await asyncio.sleep(0)
            self._store.commit(reserved)
            reserved = []
            if self._disk is not None:
                for index, mesh_hash in enumerate(order.mesh_hashes, start=order.first):
                    self._disk.saved(order.names, index, mesh_hash)
        except HostTierUnavailable as error:
            self._note_broken(error)
        finally:
            self._store.abandon([slot for slot, _ in reserved])
            self._tell(Saved(order.block_ids))

    async def _fetch(self, internal_id: str, names: tuple[bytes, ...]) -> None:
        slots, whole = list[int](), 0
        try:
            if self._disk is not None:
                await self._load_from_disk(internal_id, names, self._disk)
            slots = self._store.pin(names)
            for slot in slots:
                if not self._store.is_whole(slot):
                    log.error("a block of the host's store has changed; it is computed anew", extra={"slot": slot})
                    break
                whole += 1
                await asyncio.sleep(0)
        except HostTierUnavailable as error:
            self._note_broken(error)
        finally:
            self._store.unpin(slots[whole:])
            self._tell(Fetched(internal_id, tuple(slots[:whole])))

    async def _load(self, order: HostLoad) -> None:
        failed, began_s = order.block_ids, self._clock.now_s()
        try:
            await self._memory.ready()
            for slot, block_id in zip(order.slots, order.block_ids, strict=True):
                await self._memory.scatter(self._everywhere(block_id), self._store.view(slot))
                await asyncio.sleep(0)
            failed = ()
            of_disk, disk_s = self._from_disk.get(order.internal_id, (0, 0.0))
            duration_ms = 1000 * (self._clock.now_s() - began_s + disk_s)
            blocks = len(order.block_ids)
            self._note_loaded(HostLoaded(order.request_id, blocks, duration_ms, min(of_disk, blocks), order.is_again))
        except HostTierUnavailable as error:
            self._note_broken(error)
        finally:
            self._from_disk.pop(order.internal_id, None)
            self._store.unpin(order.slots)
            self._tell(Loaded(order.internal_id, failed))

    async def _load_from_disk(self, internal_id: str, names: tuple[bytes, ...], disk: DiskTier) -> None:
        began_s = self._clock.now_s()
        if blocks := await disk.load(names):
            while len(self._from_disk) >= _MOST_FROM_DISK:
                del self._from_disk[next(iter(self._from_disk))]
            self._from_disk[internal_id] = blocks, self._clock.now_s() - began_s

    def _everywhere(self, block_id: int) -> list[RegionBlocks]:
        """The block in all regions."""
        ids = np.array([block_id])
        return [RegionBlocks(region, ids) for region in range(len(self._memory.layout.region_block_bytes))]

    def _spawn(self, work: Callable[..., Any], *arguments: Any) -> None:
        def begin() -> None:
            task = self._loop.create_task(work(*arguments))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

        self._loop.call_soon_threadsafe(begin)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a copy between the engine and the host's store failed", exc_info=error)

    def _guarded(self, work: Callable[[], Any]) -> None:
        try:
            work()
            self._is_broken = False
        except HostTierUnavailable as error:
            self._note_broken(error)

    def _note_broken(self, error: HostTierUnavailable) -> None:
        if not self._is_broken:
            log.error("the host's store of KV blocks cannot be used", extra={"error": str(error)})
        self._is_broken = True


def open_host_store(key: str, layout: object, block_bytes: int, settings: HostTierSettings) -> HostStore | None:
    """The store of engines of this key (see `host_key`) and layout, to read and write; None, and an error in the log,
    if it cannot be opened."""
    try:
        return open_store(f"{key}/{layout}", block_bytes, settings)
    except HostTierUnavailable as error:
        log.error("there is no host tier", extra={"error": str(error)})
        return None
