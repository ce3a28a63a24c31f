"""KV blocks on a disk behind a host's memory: a store in a file, which outlives the machine's memory too.

It has the index, the bounds and the locks of a host's store. What differs: blocks are read and written by system calls
on a thread rather than mapped, so that a disk that is slow holds up nobody and one that fails is an error rather than a
signal; and what a crash has left of the file is not believed.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import KvTier
from engine_worker.host_tier.block_store import BlockStore, IndexMemory, checksum
from engine_worker.host_tier.index import COUNTERS, DIRTY, EPOCH, JOURNAL_END, TICK, USABLE_SLOTS
from engine_worker.host_tier.shared_memory import LOCK_S, SharedMemory
from mesh.errors import HostTierUnavailable

log = logging.getLogger(__name__)

_LARGEST_COUNT: Final = 1 << 60
"""Counters beyond it were not counted."""


class DiskMemory(SharedMemory):
    """The file of such a store; only its index is mapped."""

    def read(self, slot: int, into: NDArray[np.uint8]) -> bool:
        """Whether all of a slot's bytes could be read."""
        try:
            return os.preadv(self._file, [into.data], self._place(slot)) == self._block_bytes
        except OSError as error:
            log.warning(
                "a block cannot be read from the disk tier", extra={"error": str(error), "file": str(self._path)}
            )
            return False

    def write(self, slot: int, content: NDArray[np.uint8]) -> bool:
        """Whether all of a slot's bytes could be written."""
        try:
            return os.pwritev(self._file, [content.data], self._place(slot)) == self._block_bytes
        except OSError as error:
            log.warning(
                "a block cannot be written to the disk tier", extra={"error": str(error), "file": str(self._path)}
            )
            return False

    def _place(self, slot: int) -> int:
        return self._blocks_at + slot * self._stride

    def _mapped_bytes(self, slots: int) -> int:
        return self._blocks_at

    def _map(self, slots: int, block_bytes: int) -> None:
        super()._map(slots, block_bytes)
        if os.fstat(self._file).st_size < self._blocks_at + slots * self._stride:
            # Mapped pages that a file does not have are a SIGBUS to whoever touches them.
            log.warning("a store on disk was cut off, and is made anew", extra={"file": str(self._path)})
            self._create(slots, block_bytes)
            super()._map(slots, block_bytes)
        elif self._is_alone and not doubt(self.counters, self.entries):
            log.warning("a store on disk makes no sense, and is emptied", extra={"file": str(self._path)})


def doubt(counters: NDArray[np.uint64], entries: NDArray[Any]) -> bool:
    """To be called of an index that nobody else has open. Whoever had it last may have gone with the machine: then
    pages of different times are beside each other. False: it makes no sense, and is empty now."""
    known = [int(counters[which]) for which in (EPOCH, TICK, JOURNAL_END)]
    if max(known) > _LARGEST_COUNT or int(counters[USABLE_SLOTS]) > len(entries):
        entries[:] = np.zeros(1, entries.dtype)
        counters[:COUNTERS] = 0
        return False
    entries["used"][entries["used"] > counters[TICK]] = 0
    entries["pins"] = 0
    counters[DIRTY] = 1  # entries have to vouch for themselves before anybody believes them
    return True


class StoreDisk(IndexMemory, Protocol):
    """What a store on disk lies in. `DiskMemory` is that of a machine."""

    def read(self, slot: int, into: NDArray[np.uint8]) -> bool:
        """Whether all of a slot's bytes could be read. May wait for the disk."""

    def write(self, slot: int, content: NDArray[np.uint8]) -> bool:
        """Whether all of a slot's bytes could be written; otherwise some may be. May wait for the disk."""


class DiskStore(BlockStore[StoreDisk]):
    """`read` and `write` may be used from any thread, too: they wait for the disk and for each other's turn at the
    index."""

    tier: ClassVar[KvTier] = KvTier.DISK

    def write(self, names: Sequence[bytes], index: int, content: NDArray[np.uint8], mesh_hash: int) -> bool:
        """Whether block `index` of a chain was stored."""
        with self._changing():
            found = self._reserve(names[: index + 1], index, 1)
        if not found:
            return False
        ((_, slot),) = found
        is_stored = False
        try:
            summed = checksum(content, names[index])
            if self._memory.write(slot, content):
                with self._changing():
                    is_stored = self._index.commit(slot, mesh_hash, summed)
        finally:
            if not is_stored:
                self._let_go(written=(slot,))
        return is_stored

    def read(self, names: Sequence[bytes], into: Sequence[NDArray[np.uint8]]) -> list[int]:
        """Hashes in the mesh of a chain's leading blocks, as many as are there and whole, whose bytes are in `into`
        now."""
        hashes = list[int]()
        with self._changing():
            slots = self._index.pin(names)
        try:
            for slot, name, block in zip(slots, names, into, strict=False):
                if not self._memory.read(slot, block) or checksum(block, name) != self._index.checksum(slot):
                    log.error("a block of the disk tier is not what was written; it is computed anew")
                    with self._changing():
                        self._index.discard(slot)
                    break
                hashes.append(self._index.mesh_hash(slot))
        finally:
            self._let_go(pinned=slots)
        return hashes


def open_disk_store(
    directory: Path, name: str, block_bytes: int, nbytes: int, *, only_looks: bool = False, lock_s: float = LOCK_S
) -> DiskStore:
    """Opens the store of this name, or makes it. Raises `HostTierUnavailable`."""
    try:
        return DiskStore(DiskMemory(directory, name, block_bytes, nbytes, lock_s=lock_s), only_looks=only_looks)
    except (ValueError, OverflowError) as error:  # what its index says is no index
        raise HostTierUnavailable(f"the store of KV blocks in {directory} cannot be understood: {error}") from error
