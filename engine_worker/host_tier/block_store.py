"""What the stores of KV blocks have in common, in a host's memory and on its disk: an index in memory that processes
share, and a lock around each change of it."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from controlplane.model.instance import KvBlocks, KvTier
from engine_worker.host_tier.index import HostIndex
from mesh.errors import HostTierUnavailable


class IndexMemory(Protocol):
    """What the index of a store lies in. `SharedMemory` is that of a machine."""

    counters: NDArray[np.uint64]
    entries: NDArray[Any]
    journal: NDArray[np.uint32]

    def lock(self) -> AbstractContextManager[None]:
        """The store's lock, which ends with the process that holds it. Raises `HostTierUnavailable` if it is not to be
        had in time."""

    def is_alive(self, client: int) -> bool:
        """Whether a process has this number. With the lock held."""

    def claim(self) -> int:
        """A number that no living process has, for as long as this one lives. With the lock held. Raises
        `HostTierUnavailable` if there is none left."""

    def back(self, backed: int, wanted: int) -> int:
        """Have memory behind the first `wanted` slots or more, `backed` of which have it; returns how many have it
        then. With the lock held."""

    def keep(self) -> None:
        """The store is in use: note that it is not to be removed for a while."""

    def close(self) -> None:
        """Give the number back."""


Memory = TypeVar("Memory", bound=IndexMemory)


class BlockStore(Generic[Memory]):
    """Every method may raise `HostTierUnavailable`, but for `leading`, `lacks`, `close` and the counts. Those and
    `changes` may be used from any thread."""

    tier: ClassVar[KvTier]

    def __init__(self, memory: Memory, *, only_looks: bool = False) -> None:
        """`only_looks`: neither reads nor writes blocks."""
        self._memory = memory
        self._index = HostIndex(memory.counters, memory.entries, memory.journal, memory.is_alive)
        self._unpinned: deque[int] = deque()
        self._abandoned: deque[int] = deque()
        """What could not be let go when the lock was not to be had."""
        with self._changing():
            if not only_looks:
                self._index.claim(memory.claim())

    def __len__(self) -> int:
        """Blocks that can be read."""
        return len(self._index)

    @property
    def slots(self) -> int:
        """Blocks that it has room for."""
        return self._index.slots

    @property
    def evictions_total(self) -> int:
        """Blocks that went to make room, by whomever."""
        return self._index.evictions_total

    @property
    def corrupt_total(self) -> int:
        """Blocks that did not hold what was written, by whomever they were found."""
        return self._index.corrupt_total

    def leading(self, names: Sequence[bytes]) -> int:
        """How many of a chain's leading blocks can be read, as of the last call of another method."""
        return self._index.leading(names)

    def lacks(self, name: bytes) -> bool:
        """Whether the block is neither there nor being written, as of then."""
        return self._index.lacks(name)

    def changes(self) -> KvBlocks | None:
        """What has changed since the last call, by whomever; None if nothing has."""
        if self._index.is_followed and not self._index.has_changes:
            return None
        with self._changing():
            is_cleared, stored, removed = self._index.changes()
        if not (is_cleared or stored or removed):
            return None
        return KvBlocks(tuple(stored), tuple(removed), cleared=is_cleared, tier=self.tier)

    def keep(self) -> None:
        """To be called every few minutes: a store that nobody uses is removed in the end."""
        self._memory.keep()

    def validate(self) -> None:
        """Raises `InvariantBroken`."""
        with self._changing():
            self._index.validate()

    def close(self) -> None:
        """The process uses it no more."""
        self._memory.close()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._memory.lock(), self._index.begin():
            while self._unpinned:
                self._index.unpin((self._unpinned.popleft(),))
            while self._abandoned:
                self._index.abandon(self._abandoned.popleft())
            yield

    def _let_go(self, *, pinned: Sequence[int] = (), written: Sequence[int] = ()) -> None:
        """Of slots that this process reads and writes to no more: now, or when the store can be used again."""
        self._unpinned.extend(pinned)
        self._abandoned.extend(written)
        if pinned or written:
            with suppress(HostTierUnavailable), self._changing():
                pass

    def _reserve(self, names: Sequence[bytes], first: int, most: int) -> list[tuple[int, int]]:
        """`HostIndex.reserve`, with memory behind more slots where that is needed. With the lock held."""
        index = self._index
        missing = min(sum(map(index.lacks, names[first:])), most) - index.free_slots
        usable = index.usable_slots
        if missing > 0 and usable < index.slots:
            index.grow(self._memory.back(usable, min(index.slots, usable + missing)))
        return index.reserve(names, first, most)


def checksum(content: NDArray[np.uint8], name: bytes) -> int:
    """Another one for the same bytes under another name."""
    return xxh3_64_intdigest(content.data, int.from_bytes(name[:8], "little"))
