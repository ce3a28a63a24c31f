"""How many transfers run at once, and how many wait."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine_worker.kv.staging import StagingRing
from mesh.errors import KvTransferRefused
from mesh.invariants import invariants


class TransferSlots:
    """First come, first served. Each slot owns its staging buffers, so that transfers cannot wait for each other's."""

    def __init__(self, parallel: int, queued: int, new_ring: Callable[[], StagingRing]) -> None:
        self._rings = [new_ring() for _ in range(parallel)]
        self._parallel = parallel
        self._max_queued = queued
        self._waiting: deque[asyncio.Future[StagingRing]] = deque()

    @property
    def running(self) -> int:
        """Slots in use now."""
        return self._parallel - len(self._rings)

    @property
    def queued(self) -> int:
        """Transfers that wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def take(self) -> AsyncIterator[StagingRing]:
        """Wait for a slot and hold it. Raises `KvTransferRefused` at once if too many wait already."""
        ring = await self._next()
        try:
            yield ring
        finally:
            self._give(ring)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert len({id(ring) for ring in self._rings}) == len(self._rings) <= self._parallel, "each slot is free once"
        assert len(self._waiting) <= self._max_queued, "those that wait are bounded"
        assert not self._rings or all(turn.done() for turn in self._waiting), "nobody waits while a slot is free"

    async def _next(self) -> StagingRing:
        if self._rings:
            return self._rings.pop()
        if len(self._waiting) >= self._max_queued:
            raise KvTransferRefused(
                f"{self.running} KV transfers run and {self.queued} wait; come back when some have ended"
            )
        turn: asyncio.Future[StagingRing] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(turn.result())
            elif turn in self._waiting:  # or passed over by `_give` since it was cancelled
                self._waiting.remove(turn)
            raise

    def _give(self, ring: StagingRing) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(ring)
                return
        self._rings.append(ring)
