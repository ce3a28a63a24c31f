"""The disk of a simulated host on which a store of KV blocks lies (`engine_worker.host_tier.disk_store.StoreDisk`)."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine_worker.host_tier.disk_store import DiskStore, doubt
from engine_worker.host_tier.index import DIRTY, HostIndex
from fault_simulation.host_memory import SimulatedHostMemory, SimulatedStoreMemory
from mesh.errors import HostTierUnavailable

WRITTEN_BACK_SHARE: Final = 0.1
"""Of the writes: all that was changed before it reaches the disk then, as the kernel does it now and then."""
OVERWRITTEN_SHARE: Final = 0.02
"""Of the index's entries, by a loss of power."""


class SimulatedHostDisk(SimulatedHostMemory):
    """The file of one store, as processes see it, in the kernel's cache; a loss of power keeps any part of that."""

    def __init__(self, store_id: str, slots: int, block_bytes: int, rng: random.Random) -> None:
        super().__init__(store_id, slots, block_bytes)
        self.is_full = False
        """Writes fail, after a part of what was to be written."""
        self.on_write: Callable[[str], None] | None = None
        """Called once, in the midst of the next write, with the name of whoever writes."""
        self.rng = rng
        self.writes = self.reads = 0
        """Blocks that were written and read whole."""
        self._write_back()

    @property
    def is_open(self) -> bool:
        """Whether a living process uses it."""
        return any(lives() for lives in self.owners.values())

    def note_write(self) -> None:
        """A block was written."""
        self.writes += 1
        if self.rng.random() < WRITTEN_BACK_SHARE:
            self._write_back()

    def lose_power(self) -> None:
        """All who had it open are dead. Of what was not written back any part is lost, each entry, number and block by
        itself, blocks in their midst too; and some entries are overwritten with anything."""
        rng = self.rng
        for now, lasting in (
            (self.counters, self._counters),
            (self.entries, self._entries),
            (self.blocks, self._blocks),
        ):
            for place in range(len(now)):
                if rng.random() < 0.5:
                    now[place] = lasting[place]
        for slot in range(len(self.blocks)):
            if rng.random() < 0.2:
                torn_at = rng.randrange(self.blocks.shape[1])
                self.blocks[slot, torn_at:] = self._blocks[slot, torn_at:]
            if rng.random() < OVERWRITTEN_SHARE:
                self.entries[slot : slot + 1].view(np.uint8)[:] = np.frombuffer(
                    rng.randbytes(self.entries.itemsize), np.uint8
                )
        self._write_back()

    def validate(self) -> None:
        """Raises `InvariantBroken`. Looks at a copy, since to follow changes is one. What the dead have left is no
        claim until it was mended."""
        if self.is_open and not self.counters[DIRTY]:
            HostIndex(self.counters.copy(), self.entries.copy(), self.journal.copy(), lambda _: True).validate()

    def _write_back(self) -> None:
        self._counters, self._entries, self._blocks = self.counters.copy(), self.entries.copy(), self.blocks.copy()


@runtime_checkable
class HostDisks(Protocol):
    """Who has the disks of all hosts."""

    host_disks: dict[str, SimulatedHostDisk]


class SimulatedStoreDisk(SimulatedStoreMemory):
    """That of one process."""

    def __init__(self, disk: SimulatedHostDisk, is_alive: Callable[[], bool], process: str) -> None:
        super().__init__(disk, is_alive)
        self._disk = disk
        self._process = process

    @contextmanager
    def lock(self) -> Iterator[None]:
        """See `StoreMemory.lock`. Of what is dead no line would run: it changes nothing any more."""
        if not self._is_alive():
            raise HostTierUnavailable("the process is dead")
        with super().lock():
            yield

    def read(self, slot: int, into: NDArray[np.uint8]) -> bool:
        """See `StoreDisk.read`."""
        into[:] = self._disk.blocks[slot]
        self._disk.reads += 1
        return True

    def write(self, slot: int, content: NDArray[np.uint8]) -> bool:
        """See `StoreDisk.write`."""
        disk = self._disk
        if disk.is_full or disk.on_write is not None:
            part = disk.rng.randrange(len(content))
            disk.blocks[slot, :part] = content[:part]
            if (strike := disk.on_write) is not None:
                disk.on_write = None
                strike(self._process)
            return False
        disk.blocks[slot] = content
        disk.note_write()
        return True

    def back(self, backed: int, wanted: int) -> int:
        return backed if self._disk.is_full else super().back(backed, wanted)


def open_simulated(disk: SimulatedHostDisk, is_alive: Callable[[], bool], process: str) -> DiskStore:
    """The store, as `open_disk_store` opens that of a machine."""
    if not disk.is_open:
        doubt(disk.counters, disk.entries)
    return DiskStore(SimulatedStoreDisk(disk, is_alive, process))
