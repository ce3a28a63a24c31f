"""A clock whose hands the test turns."""

import asyncio
import heapq
import itertools


class ManualClock:
    """Sleepers wake in the order of their time, each at its own time."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return 1.7e9 + self._now_s

    async def sleep(self, duration_s: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + duration_s, next(self._order), woken))
        await woken

    async def advance(self, duration_s: float) -> None:
        """Let time pass; everybody acts when it is time."""
        end_s = self._now_s + duration_s
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            due_s, _, woken = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, due_s)
            if not woken.done():
                woken.set_result(None)
            await _settle()
        self._now_s = end_s

    def stall(self, duration_s: float) -> None:
        """Let time pass while nobody gets to act, as if the process had been stopped."""
        self._now_s += duration_s


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
