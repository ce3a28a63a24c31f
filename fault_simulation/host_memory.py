"""The memory of a simulated host in which a store of KV blocks lies: an `engine_worker.host_tier.store.StoreMemory`."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine_worker.host_tier.index import COUNTERS, ENTRY, MAX_CLIENTS, READY, WRITING
from mesh.errors import HostTierUnavailable

_JOURNAL_SLOTS = 64
"""So few that processes lag behind in simulations, too."""


class SimulatedHostMemory:
    """One store. It belongs to a host, so it outlives the processes there."""

    def __init__(self, store_id: str, slots: int, block_bytes: int) -> None:
        self.store_id = store_id
        self.counters: NDArray[np.uint64] = np.zeros(COUNTERS, np.uint64)
        self.entries: NDArray[Any] = np.zeros(slots, ENTRY)
        self.journal: NDArray[np.uint32] = np.zeros(_JOURNAL_SLOTS, np.uint32)
        self.blocks: NDArray[np.uint8] = np.zeros((slots, block_bytes), np.uint8)
        self.owners: dict[int, Callable[[], bool]] = {}
        """By number of a process: whether it lives."""
        self.is_locked = False
        """By a process that was stopped."""

    def change_blocks(self, share: float, rng: random.Random) -> None:
        """A byte changes in this share of the blocks that can be read."""
        for slot in np.flatnonzero(self.entries["state"] == READY).tolist():
            if rng.random() < share:
                self.blocks[slot, rng.randrange(self.blocks.shape[1])] ^= 1 + rng.randrange(255)

    def held(self) -> list[str]:
        """What is read or written now by processes that live."""
        found = []
        for slot, entry in enumerate(self.entries):
            readers = [client for client, lives in self.owners.items() if int(entry["pins"]) >> client & 1 and lives()]
            writer = self.owners.get(int(entry["writer"])) if entry["state"] == WRITING else None
            if readers or (writer is not None and writer()):
                found.append(f"slot {slot} is read by {readers} or written to")
        return found


@runtime_checkable
class HostMemories(Protocol):
    """Who has the stores of all hosts."""

    host_memories: dict[str, SimulatedHostMemory]


class SimulatedStoreMemory:
    """That of one process. It has the lock for as long as a call takes, within which simulated time does not pass."""

    def __init__(self, memory: SimulatedHostMemory, is_alive: Callable[[], bool]) -> None:
        self.store_id = memory.store_id
        self.counters, self.entries, self.journal = memory.counters, memory.entries, memory.journal
        self._memory = memory
        self._is_alive = is_alive
        self._client: int | None = None

    def block(self, slot: int) -> NDArray[np.uint8]:
        """See `StoreMemory.block`."""
        content: NDArray[np.uint8] = self._memory.blocks[slot]
        return content

    @contextmanager
    def lock(self) -> Iterator[None]:
        """See `StoreMemory.lock`."""
        if self._memory.is_locked:
            raise HostTierUnavailable("another process has the store locked")
        yield

    def is_alive(self, client: int) -> bool:
        """See `StoreMemory.is_alive`."""
        owner = self._memory.owners.get(client)
        return owner is not None and owner()

    def claim(self) -> int:
        """See `StoreMemory.claim`."""
        for client in range(MAX_CLIENTS):
            if not self.is_alive(client):
                self._memory.owners[client] = self._is_alive
                self._client = client
                return client
        raise HostTierUnavailable(f"{MAX_CLIENTS} processes use the store already")

    def back(self, backed: int, wanted: int) -> int:
        """See `StoreMemory.back`."""
        return min(len(self.entries), max(wanted, backed + 8))

    def keep(self) -> None:
        """See `StoreMemory.keep`: no simulated store is removed."""

    def close(self) -> None:
        """See `StoreMemory.close`."""
        if self._client is not None:
            self._memory.owners.pop(self._client, None)
