"""A watch over a source that fails at every possible place."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.backoff import Backoff
from mesh.errors import StoreError, StoreUnavailable
from mesh.store.interface import Listing, WatchEvent
from mesh.store.keyspace import KeySpace
from mesh.store.watching import WatchCursor, watch_resuming
from tests.examples import examples

NO_PAUSES = Backoff(0.0, 0.0)


class FlakySource:
    """Writes, cuts messages in the middle of a revision, loses connections and compacts, as its script says."""

    def __init__(self, script: Sequence[str], rng: random.Random) -> None:
        self.space = KeySpace()
        self.compacted = False
        self._script = iter(script)
        self._rng = rng
        self.closed = False

    def step(self) -> None:
        """The next thing that happens to the store. Raises StoreUnavailable if the connection is lost."""
        match next(self._script, "end"):
            case "put":
                self.space.put(self._rng.choice("xyz"), str(self.space.revision).encode())
            case "delete":
                self.space.delete(self._rng.choice("xyz"))
            case "clear":
                self.space.delete_prefix("")
            case "compact":
                self.compacted = True
                self.space.compact(self.space.revision)
            case "lose":
                raise StoreUnavailable("connection lost")

    async def head(self, timeout_s: float) -> int:
        self.step()
        return self.space.revision

    async def list(self, prefix: str, at_revision: int, keys_only: bool, timeout_s: float) -> Listing:
        listing = self.space.range(prefix, at_revision)
        if not keys_only:
            self.step()
        return listing

    async def stream(self, prefix: str, from_revision: int) -> AsyncGenerator[Sequence[WatchEvent]]:
        revision = from_revision
        while True:
            self.step()
            events, revision = self.space.events(prefix, revision)
            for event in events:
                yield [event]
                self.step()
            yield []
            await asyncio.sleep(0)


STEPS = st.sampled_from(["put", "put", "put", "delete", "clear", "compact", "lose", "lose"])


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(STEPS, max_size=60), st.randoms(use_true_random=False))
def test_nothing_is_lost_or_repeated(script: list[str], rng: random.Random) -> None:
    source = FlakySource(script, rng)
    source.space.put("x", b"before")
    start = source.space.revision + 1

    async def follow() -> list[WatchEvent]:
        received: list[WatchEvent] = []
        watch = watch_resuming(source, "", start, NO_PAUSES, 1.0)
        pending = asyncio.create_task(anext(watch))
        quiet = 0
        while quiet < 20:
            await asyncio.sleep(0)
            quiet += 1
            if pending.done():
                received.append(pending.result())
                pending, quiet = asyncio.create_task(anext(watch)), 0
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        return received

    received = asyncio.run(follow())
    held = {"x": b"before"}
    for event in received:
        if event.kind == "put":
            held[event.key] = event.value
        else:
            assert event.key in held
            del held[event.key]
    assert held == {entry.key: entry.value for entry in source.space.range("").entries}
    assert [event.mod_revision for event in received] == sorted(event.mod_revision for event in received)
    assert len({(event.mod_revision, event.key, event.kind) for event in received}) == len(received)
    if not source.compacted:
        assert tuple(received) == source.space.events("", start)[0]


def test_a_cursor_drops_what_it_has_reported_of_a_split_revision() -> None:
    cursor = WatchCursor(5, {"a": 1, "b": 2, "c": 3})
    deletes = [WatchEvent("delete", key, b"", 6) for key in "abc"]
    assert [cursor.accept(event) for event in deletes[:2]] == [True, True]
    assert cursor.revision == 6
    assert [cursor.accept(event) for event in deletes] == [False, False, True]
    assert not cursor.accept(WatchEvent("put", "a", b"", 5))


def test_a_store_older_than_the_cursor_has_lost_data() -> None:
    cursor = WatchCursor(5, {})
    assert not cursor.is_ahead_of(4)
    assert cursor.is_ahead_of(3)
    cursor.accept(WatchEvent("put", "a", b"", 5))
    assert cursor.is_ahead_of(4)


class RefusingSource(FlakySource):
    def stream(self, prefix: str, from_revision: int) -> AsyncGenerator[Sequence[WatchEvent]]:
        raise StoreError("too many watches")


async def test_a_refusal_ends_the_watch_with_its_reason() -> None:
    source = RefusingSource([], random.Random(0))
    with pytest.raises(StoreError, match="too many watches"):
        await anext(watch_resuming(source, "", None, NO_PAUSES, 1.0))
