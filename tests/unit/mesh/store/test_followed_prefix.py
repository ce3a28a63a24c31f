"""Records under a prefix: what stands there at first, what comes, what goes, what cannot be read."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.followed_prefix import FollowedPrefix
from mesh.store.host import StoreHost

pytestmark = pytest.mark.live


class Fact(msgspec.Struct, frozen=True):
    number: int


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_records_are_followed() -> None:
    host = StoreHost(SystemClock(), SystemEntropy())
    store = EmbeddedStore(host)
    heard: list[tuple[str, Fact | None]] = []
    followed = FollowedPrefix(store, "/facts/", Fact, lambda key, fact: heard.append((key, fact)))
    await store.put("/facts/a", b'{"number": 1}')
    await store.put("/other/a", b'{"number": 9}')
    following = asyncio.create_task(followed.follow())
    try:
        await until(lambda: len(heard) == 1)
        await store.put("/facts/b", b'{"number": 2}')
        await until(lambda: followed.records == {"/facts/a": Fact(1), "/facts/b": Fact(2)})
        await store.put("/facts/a", b'{"number": 1}')
        await store.put("/facts/b", b"what is that")
        await until(lambda: followed.records == {"/facts/a": Fact(1)})
        await store.delete("/facts/a")
        await until(lambda: followed.records == {})
        assert heard == [("/facts/a", Fact(1)), ("/facts/b", Fact(2)), ("/facts/b", None), ("/facts/a", None)]
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        host.close()
