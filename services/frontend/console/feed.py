"""The live feed: one look a second for all viewers together, as long as there is one."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from mesh.runtime import Clock, Threads
from mesh.tasks import TaskSet
from services.frontend.console.collector import Collector
from services.frontend.console.state import State
from services.frontend.console.update import Viewer, change, whole
from services.frontend.console.view import View
from services.frontend.errors import stopped, unavailable

log = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
LINGER_S: Final = 10.0
"""How long looks go on behind the last viewer: a page that is loaded anew finds its charts."""
MAX_VIEWERS: Final = 64
LEAST_PAUSE_S: Final = 0.1
WAIT_S: Final = 5.0
"""For the first look."""

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class ConsoleFeed:
    """Looks at the mesh for viewers; costs nothing without any. `stop` it."""

    collector: Collector
    view: View
    clock: Clock
    threads: Threads
    number: int = 0
    """Of the latest look; 0: there is none."""
    _state: State | None = None
    _before: State | None = None
    _viewers: int = 0
    _unwatched_s: float = 0.0
    _is_closed: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: TaskSet = field(default_factory=lambda: TaskSet("console"))
    _encoded: dict[tuple[bool, Viewer], bytes] = field(default_factory=dict)
    """Of the latest look, by whether it is whole."""

    async def latest(self, viewer: Viewer) -> bytes:
        """The state as JSON, of this moment. Raises ApiError (503) if there is none soon."""
        await self._next(self._begin(), WAIT_S)
        return self._message(viewer, is_whole=True)

    async def updates(self, viewer: Viewer) -> AsyncGenerator[bytes, None]:
        """The state, and then each change, as JSON: until the feed is closed. A viewer that is slow gets fewer of them,
        and nothing piles up. Raises ApiError (503) where there are too many viewers."""
        if self._viewers >= MAX_VIEWERS:
            raise unavailable(f"{MAX_VIEWERS} viewers watch this console already; close one, or ask another frontend.")
        self._viewers += 1
        try:
            await self._next(self._begin(), WAIT_S)
            seen = 0
            while not self._is_closed:
                is_whole = seen == 0 or seen != self.number - 1
                seen = self.number
                yield self._message(viewer, is_whole=is_whole)
                await self._next(seen, None)
        finally:
            self._viewers -= 1
            self._unwatched_s = self.clock.now_s()

    def close(self) -> None:
        """End all updates: the frontend drains."""
        self._is_closed = True
        self._wake()

    async def stop(self) -> None:
        """End it all."""
        self.close()
        await self._tasks.cancel()
        await self.collector.stop()

    def _begin(self) -> int:
        """Begin to look, unless that goes on; the number of the last look that is not of this moment."""
        if self._is_closed:
            raise stopped()
        self._unwatched_s = self.clock.now_s()
        if len(self._tasks):
            return 0
        self._tasks.spawn(self._look_on(), name="look")
        return self.number

    async def _next(self, seen: int, wait_s: float | None) -> None:
        """Return once there is a later look than `seen`, or the feed is closed."""
        try:
            async with asyncio.timeout(wait_s):
                while self.number <= seen and not self._is_closed:
                    await self._news.wait()
        except TimeoutError:
            raise unavailable("The mesh could not be looked at within 5 s; see the frontend's log.") from None
        if self._is_closed and self._state is None:
            raise stopped()

    async def _look_on(self) -> None:
        while self._viewers or self.clock.now_s() - self._unwatched_s < LINGER_S:
            began_s = self.clock.now_s()
            try:
                await self._look_once()
            # A bug costs a look, not the feed: viewers see that no news comes.
            except Exception:
                log.exception("a look at the mesh failed by a bug")
            await self.clock.sleep(max(LEAST_PAUSE_S, INTERVAL_S - (self.clock.now_s() - began_s)))
        self._before = None

    async def _look_once(self) -> None:
        look = await self.collector.look()
        # On a thread: a thousand instances take tens of milliseconds, in which tokens are to go on.
        state = await self.threads.run(self.view.add, look)
        self._before, self._state = self._state, state
        self.number += 1
        self._encoded.clear()
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _message(self, viewer: Viewer, *, is_whole: bool) -> bytes:
        assert self._state is not None, "a look has come"
        is_whole = is_whole or self._before is None
        key = (is_whole, viewer)
        if key not in self._encoded:
            if is_whole or self._before is None:
                update = whole(self.number, self._state, viewer)
            else:
                update = change(self.number, self._before, self._state, viewer)
            self._encoded[key] = _encode(update)
        return self._encoded[key]
