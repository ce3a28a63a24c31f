"""The live feed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from mesh.runtime import SystemThreads
from services.frontend.console import feed as feeds
from services.frontend.console.collector import Collector, Look
from services.frontend.console.feed import LINGER_S, MAX_VIEWERS, ConsoleFeed
from services.frontend.console.update import Viewer
from services.frontend.console.view import View
from services.frontend.console.window import Objectives
from services.frontend.errors import ApiError
from tests.unit.services.frontend.console.looks import look, worker

pytestmark = pytest.mark.live


@dataclass
class SteppedClock:
    """Sleeps until the test lets a second pass."""

    seconds: float = 0.0
    sleepers: list[asyncio.Future[None]] = field(default_factory=list)

    def now_s(self) -> float:
        return self.seconds

    def unix_s(self) -> float:
        return self.seconds

    async def sleep(self, duration_s: float) -> None:
        sleeper = asyncio.get_running_loop().create_future()
        self.sleepers.append(sleeper)
        await sleeper

    async def step(self, seconds: float = 1.0) -> None:
        async with asyncio.timeout(5):
            while not self.sleepers:  # noqa: ASYNC110  who sleeps next has no event
                await asyncio.sleep(0)
        self.seconds += seconds
        sleepers, self.sleepers = self.sleepers, []
        for sleeper in sleepers:
            sleeper.set_result(None)


@dataclass
class MadeUpLooks:
    """In place of a collector."""

    looks: int = 0
    fails: bool = False

    async def look(self) -> Look:
        self.looks += 1
        if self.fails:
            raise RuntimeError("a bug")
        return look(seconds=self.looks, workers=[worker(number) for number in range(self.looks)])

    async def stop(self) -> None:
        pass


@dataclass
class Fed:
    feed: ConsoleFeed
    clock: SteppedClock
    source: MadeUpLooks


@asynccontextmanager
async def fed() -> AsyncIterator[Fed]:
    clock, source = SteppedClock(), MadeUpLooks()
    view = View(Objectives(1000, 100))
    feed = ConsoleFeed(cast(Collector, source), view, clock, SystemThreads())
    try:
        yield Fed(feed, clock, source)
    finally:
        await feed.stop()


def told(message: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(message)
    return decoded


async def test_a_viewer_gets_everything_and_then_what_changes() -> None:
    async with fed() as mesh:
        assert mesh.source.looks == 0, "nobody watches"
        updates = mesh.feed.updates(Viewer())
        first = told(await anext(updates))
        assert (first["number"], first["is_whole"], len(first["instances"])) == (1, True, 1)
        await mesh.clock.step()
        await anext(updates)  # from now on rates are known
        await mesh.clock.step()
        third = told(await anext(updates))
        assert (third["number"], third["is_whole"]) == (3, False)
        assert [row[0] for row in third["instances"]] == ["w0001", "w0002"], "w0000 is as it was"
        assert len(third["series"]) == 1


async def test_all_viewers_share_one_look() -> None:
    async with fed() as mesh:
        several = [mesh.feed.updates(Viewer()) for _ in range(3)]
        firsts = [await anext(each) for each in several]
        assert mesh.source.looks == 1
        assert len({id(each) for each in firsts}) == 1, "encoded once"


async def test_a_viewer_that_missed_one_gets_everything_anew() -> None:
    async with fed() as mesh:
        slow, quick = mesh.feed.updates(Viewer()), mesh.feed.updates(Viewer())
        await anext(slow)
        await anext(quick)
        for _ in range(2):
            await mesh.clock.step()
            await anext(quick)
        late = told(await anext(slow))
        assert (late["number"], late["is_whole"]) == (3, True)


async def test_looks_end_behind_the_last_viewer_and_begin_again() -> None:
    async with fed() as mesh:
        updates = mesh.feed.updates(Viewer())
        await anext(updates)
        await updates.aclose()
        await mesh.clock.step(LINGER_S + 1)
        async with asyncio.timeout(5):
            while len(mesh.feed._tasks):  # noqa: ASYNC110  the end of a task set has no event
                await asyncio.sleep(0)
        looks = mesh.source.looks
        assert looks == 1
        latest = told(await mesh.feed.latest(Viewer()))
        assert (latest["number"], latest["is_whole"]) == (looks + 1, True), "not the one of long ago"


async def test_a_closed_feed_ends_its_viewers_and_takes_no_more() -> None:
    async with fed() as mesh:
        updates = mesh.feed.updates(Viewer())
        await anext(updates)
        mesh.feed.close()
        assert await anext(updates, None) is None
        with pytest.raises(ApiError, match="stopped"):
            await mesh.feed.latest(Viewer())


async def test_viewers_are_bounded() -> None:
    async with fed() as mesh:
        several = [mesh.feed.updates(Viewer()) for _ in range(MAX_VIEWERS)]
        for each in several:
            await anext(each)
        with pytest.raises(ApiError, match="viewers watch this console already"):
            await anext(mesh.feed.updates(Viewer()))
        await several[0].aclose()
        assert told(await anext(mesh.feed.updates(Viewer())))["is_whole"]


async def test_a_bug_costs_a_look_and_not_the_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "WAIT_S", 0.01)
    async with fed() as mesh:
        mesh.source.fails = True
        with pytest.raises(ApiError, match="could not be looked at"):
            await mesh.feed.latest(Viewer())
        mesh.source.fails = False
        await mesh.clock.step()
        monkeypatch.setattr(feeds, "WAIT_S", 5.0)
        assert told(await mesh.feed.latest(Viewer()))["number"] == 1
