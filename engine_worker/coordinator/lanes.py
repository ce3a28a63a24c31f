"""Which of the ordered migrations may begin. On one event loop, without I/O."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from engine_worker.request_table import TrackedRequest


class Lane(StrEnum):
    """What a migration that has begun holds a place in until its end."""

    DECODING = "decoding"
    PREFILLING = "prefilling"
    """It follows the prefill, however long that takes, and keeps nobody waiting who decodes already."""


@dataclass(slots=True, eq=False)
class _Waiting:
    tracked: TrackedRequest
    granted: "asyncio.Future[Lane | None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Lanes:
    """First come, first served within each lane; call `look` whenever requests may have begun to decode or ended."""

    def __init__(self, places: int, is_here: Callable[[TrackedRequest], bool]) -> None:
        """`places` in each lane; `is_here` says whether the request still runs on this instance."""
        self._is_here = is_here
        self._free = {Lane.DECODING: places, Lane.PREFILLING: places}
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def enter(self, tracked: TrackedRequest) -> AsyncIterator[bool]:
        """Wait for a place, and hold it. False: the request ended meanwhile."""
        waiting = _Waiting(tracked)
        self._waiting.append(waiting)
        try:
            self.look()
            lane = await waiting.granted
            yield lane is not None
        finally:
            self._leave(waiting)

    def look(self) -> None:
        """Let begin who may."""
        if not self._waiting:
            return
        still_waiting = []
        for waiting in self._waiting:
            if waiting.granted.done():
                continue
            if not self._is_here(waiting.tracked):
                waiting.granted.set_result(None)
                continue
            lane = lane_of(waiting.tracked)
            if self._free[lane]:
                self._free[lane] -= 1
                waiting.granted.set_result(lane)
            else:
                still_waiting.append(waiting)
        self._waiting = still_waiting

    def _leave(self, waiting: _Waiting) -> None:
        if not waiting.granted.done():
            self._waiting.remove(waiting)
        elif not waiting.granted.cancelled() and (lane := waiting.granted.result()) is not None:
            self._free[lane] += 1
            self.look()


def lane_of(tracked: TrackedRequest) -> Lane:
    """By whether its prompt is computed."""
    return Lane.DECODING if tracked.started or tracked.taken_over else Lane.PREFILLING
