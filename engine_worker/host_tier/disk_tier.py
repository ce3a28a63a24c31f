"""What a host's store evicts stays on disk: blocks are copied there when they are saved, and back when they are asked
for. Copies run on a thread, beside everything else."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from engine_worker.host_tier.disk_store import DiskStore
from engine_worker.host_tier.store import HostStore
from mesh.errors import HostTierUnavailable
from mesh.runtime import Clock, Threads

log = logging.getLogger(__name__)

MOST_UNSAVED: Final = 4096
"""Blocks that wait to be written; of more the oldest are not written."""
_TURN_BLOCKS: Final = 16
"""Read from the disk before others have their turn."""
_NEWS_SHARE: Final = 0.2


class DiskTier:
    """Of one instance. For one event loop, which is the one that uses the host's store."""

    def __init__(self, host: HostStore, disk: DiskStore, clock: Clock, threads: Threads) -> None:
        self.store = disk
        self.load_block_ms = 0.0
        """What a block took from the disk into the host's memory, over the last ones; 0: none came."""
        self._host = host
        self._clock = clock
        self._threads = threads
        self._unsaved: deque[tuple[tuple[bytes, ...], int, int]] = deque(maxlen=MOST_UNSAVED)
        """A chain, the place in it of a block that the host's store has, and its hash in the mesh."""
        self._wake = asyncio.Event()
        self._loading = asyncio.Lock()
        self._is_broken = False

    def leading(self, names: Sequence[bytes]) -> int:
        """How many of a chain's leading blocks the host or the disk has, as far as is known."""
        count = 0
        while more := max(self._host.leading(names[count:]), self.store.leading(names[count:])):
            count += more
        return count

    def saved(self, names: Sequence[bytes], index: int, mesh_hash: int) -> None:
        """The host's store has block `index` of a chain from now on."""
        if self.store.lacks(names[index]):
            self._unsaved.append((tuple(names[: index + 1]), index, mesh_hash))
            self._wake.set()

    async def save(self) -> None:
        """Write to the disk what was saved, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unsaved:
                names, index, mesh_hash = self._unsaved.popleft()
                try:
                    await self._save(names, index, mesh_hash)
                    self._is_broken = False
                except HostTierUnavailable as error:
                    self._note_broken(error)

    async def load(self, names: Sequence[bytes]) -> int:
        """Copy into the host's store what it lacks of a chain's leading blocks and the disk has; how many those are."""
        loaded, began_s = 0, self._clock.now_s()
        async with self._loading:  # whoever waits here for the same blocks finds them
            try:
                count = self._host.leading(names)
                while (there := self.store.leading(names[count : count + _TURN_BLOCKS])) > 0:
                    came = await self._load(names, count, there)
                    loaded += came
                    if came < there:
                        break
                    count += came
                    count += self._host.leading(names[count:])
                self._is_broken = False
            except HostTierUnavailable as error:
                self._note_broken(error)
        if loaded:
            block_ms = 1000 * (self._clock.now_s() - began_s) / loaded
            self.load_block_ms += (block_ms - self.load_block_ms) * (_NEWS_SHARE if self.load_block_ms else 1.0)
        return loaded

    async def follow(self) -> None:
        """Take in what other instances have written and what has gone; its lock is not waited for on this loop."""
        try:
            await self._threads.run(self.store.changes)
        except HostTierUnavailable as error:
            self._note_broken(error)

    async def _save(self, names: tuple[bytes, ...], index: int, mesh_hash: int) -> None:
        slots = self._host.pin(names[index : index + 1], is_use=False)
        try:
            for slot in slots:
                await self._threads.run(self.store.write, names, index, self._host.view(slot), mesh_hash)
        finally:
            self._host.unpin(slots)

    async def _load(self, names: Sequence[bytes], first: int, count: int) -> int:
        reserved = self._host.reserve(names[: first + count], first, count)
        slots = [slot for _, slot in reserved]
        try:
            # Others may be writing some of them into the host's store: up to there.
            run = next((at for at, (which, _) in enumerate(reserved) if which != first + at), len(reserved))
            views = [self._host.view(slot) for slot in slots[:run]]
            hashes = await self._threads.run(self.store.read, names[first : first + run], views)
            committed = len(hashes)
            self._host.commit(list(zip(slots, hashes, strict=False)))
            slots = slots[committed:]
            return committed
        finally:
            self._host.abandon(slots)

    def _note_broken(self, error: HostTierUnavailable) -> None:
        if not self._is_broken:
            log.error("the disk tier of KV blocks cannot be used", extra={"error": str(error)})
        self._is_broken = True
