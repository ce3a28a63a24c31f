"""A store of KV blocks in a host's memory, as one process uses it: the index, and the blocks' bytes in place."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import KvTier
from engine_worker.host_tier.block_store import BlockStore, IndexMemory, checksum


class StoreMemory(IndexMemory, Protocol):
    """What a host's store lies in."""

    store_id: str
    """Of this store, as long as it is there: who reports the same has the same blocks at hand."""

    def block(self, slot: int) -> NDArray[np.uint8]:
        """A slot's bytes, in place."""


class HostStore(BlockStore[StoreMemory]):
    """Of what it has besides a `BlockStore`, `view`, `unpin` and `abandon` never raise. For one thread, those of a
    `BlockStore` apart that say otherwise."""

    tier: ClassVar[KvTier] = KvTier.HOST

    @property
    def store_id(self) -> str:
        return self._memory.store_id

    def pin(self, names: Sequence[bytes], *, is_use: bool = True) -> list[int]:
        """Slots of a chain's leading blocks. They stay as they are until `unpin`, or the process's end. `is_use`: see
        `HostIndex.pin`."""
        with self._changing():
            return self._index.pin(names, is_use=is_use)

    def unpin(self, slots: Sequence[int]) -> None:
        """They may go again: now, or when the store can be used again."""
        self._let_go(pinned=slots)

    def is_whole(self, slot: int) -> bool:
        """Whether a pinned block still holds what was written; takes the time to read it. If not, nobody is to read it
        from now on."""
        if checksum(self.view(slot), self._index.name(slot)) == self._index.checksum(slot):
            return True
        with self._changing():
            self._index.discard(slot)
        return False

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a slot that is pinned, or reserved for writing."""
        return self._memory.block(slot)

    def reserve(self, names: Sequence[bytes], first: int, most: int) -> list[tuple[int, int]]:
        """See `HostIndex.reserve`. Each slot is to be committed or abandoned."""
        with self._changing():
            return self._reserve(names, first, most)

    def commit(self, written: Sequence[tuple[int, int]]) -> int:
        """(slot, hash in the mesh) of blocks whose bytes are written. Returns how many can be read from now on."""
        sums = [checksum(self.view(slot), self._index.name(slot)) for slot, _ in written]
        with self._changing():
            return sum(
                self._index.commit(slot, mesh_hash, summed)
                for (slot, mesh_hash), summed in zip(written, sums, strict=True)
            )

    def abandon(self, slots: Sequence[int]) -> None:
        """Nothing will be written there."""
        self._let_go(written=slots)
