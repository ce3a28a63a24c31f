"""What every store promises, asked of each of them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from mesh.errors import LeaseLost, StoreCompacted, StoreError, StoreUnavailable
from mesh.store import Listing, StateStore, WatchEvent
from tests.mesh.store.backends import Backend

pytestmark = pytest.mark.live


async def take(watch: AsyncGenerator[WatchEvent], count: int) -> list[WatchEvent]:
    async with asyncio.timeout(15):
        return [await anext(watch) for _ in range(count)]


def outline(events: list[WatchEvent], root: str) -> list[str]:
    """Events in short: "+a=value" or "-a"."""
    return [
        f"+{event.key.removeprefix(root)}={event.value.decode()}"
        if event.kind == "put"
        else f"-{event.key.removeprefix(root)}"
        for event in events
    ]


def keys(listing: Listing, root: str) -> list[str]:
    return [entry.key.removeprefix(root) for entry in listing.entries]


async def test_every_write_gets_the_next_revision(store: StateStore, root: str) -> None:
    start = (await store.range(root)).revision
    assert await store.put(root + "a", b"1") == start + 1
    assert await store.put(root + "b", b"1") == start + 2
    assert await store.put(root + "a", b"2") == start + 3
    assert await store.delete(root + "b")
    listing = await store.range(root)
    assert listing.revision == start + 4
    assert [(entry.key, entry.value, entry.mod_revision) for entry in listing.entries] == [
        (root + "a", b"2", start + 3)
    ]


async def test_get_returns_the_last_write_or_none(store: StateStore, root: str) -> None:
    assert await store.get(root + "a") is None
    revision = await store.put(root + "a", b"\x00\xff")
    entry = await store.get(root + "a")
    assert entry is not None
    assert (entry.key, entry.value, entry.mod_revision, entry.incarnation_id) == (root + "a", b"\x00\xff", revision, "")


async def test_deleting_nothing_makes_no_revision(store: StateStore, root: str) -> None:
    before = (await store.range(root)).revision
    assert not await store.delete(root + "none")
    assert await store.delete_prefix(root + "none") == 0
    assert (await store.range(root)).revision == before


async def test_a_prefix_ends_where_it_should(store: StateStore, root: str) -> None:
    for name in ("a", "a/1", "a/\U0010ffff", "a/é", "a0", "b"):
        await store.put(root + name, b"")
    assert keys(await store.range(root + "a/"), root) == ["a/1", "a/é", "a/\U0010ffff"]
    assert keys(await store.range(root + "a"), root) == ["a", "a/1", "a/é", "a/\U0010ffff", "a0"]
    assert {root + "a", root + "b"} <= {entry.key for entry in (await store.range("")).entries}
    assert await store.delete_prefix(root + "a/") == 3
    assert keys(await store.range(root), root) == ["a", "a0", "b"]


async def test_a_prefix_is_deleted_at_one_revision(store: StateStore, root: str) -> None:
    start = (await store.range(root)).revision
    for name in "abc":
        await store.put(root + name, b"")
    assert await store.delete_prefix(root) == 3
    async with aclosing(store.watch(root, start + 1)) as watch:
        events = await take(watch, 6)
    assert [event.mod_revision - start for event in events] == [1, 2, 3, 4, 4, 4]
    assert outline(events, root) == ["+a=", "+b=", "+c=", "-a", "-b", "-c"]


async def test_swap_creates_only_what_is_absent(store: StateStore, root: str) -> None:
    first = await store.compare_and_swap(root + "a", 0, b"1")
    assert first is not None
    assert await store.compare_and_swap(root + "a", 0, b"2") is None
    second = await store.compare_and_swap(root + "a", first, b"2")
    assert second == first + 1
    assert await store.compare_and_swap(root + "a", first, b"3") is None
    await store.delete(root + "a")
    assert await store.compare_and_swap(root + "a", second, b"4") is None
    assert await store.compare_and_swap(root + "a", 0, b"4") is not None


@pytest.mark.slow
async def test_racing_swaps_lose_no_increment(backend: Backend, root: str) -> None:
    key = root + "counter"

    async def increment(store: StateStore, times: int) -> int:
        lost = 0
        while times:
            entry = await store.get(key)
            value = int(entry.value) if entry else 0
            swapped = await store.compare_and_swap(key, entry.mod_revision if entry else 0, str(value + 1).encode())
            times, lost = (times, lost + 1) if swapped is None else (times - 1, lost)
        return lost

    await asyncio.gather(*(increment(backend.store(), 10) for _ in range(6)))
    entry = await backend.store().get(key)
    assert entry is not None
    assert entry.value == b"60"


@pytest.mark.parametrize("key", ["", "x" * 2000, "\ud800"], ids=["empty", "too long", "not Unicode"])
async def test_bad_keys_are_refused(store: StateStore, key: str) -> None:
    for call in (store.get(key), store.put(key, b""), store.delete(key), store.compare_and_swap(key, 0, b"")):
        with pytest.raises(StoreError) as refused:
            await call
        assert not isinstance(refused.value, StoreUnavailable)


@pytest.mark.slow
async def test_values_of_one_mebibyte_fit_and_no_larger_ones(store: StateStore, root: str) -> None:
    revision = await store.put(root + "large", bytes(1 << 20))
    with pytest.raises(StoreError, match="at most"):
        await store.put(root + "large", bytes((1 << 20) + 1))
    for number in range(6):
        await store.put(f"{root}large{number}", bytes(1 << 20))
    listing = await store.range(root)
    assert [len(entry.value) for entry in listing.entries] == [1 << 20] * 7
    async with aclosing(store.watch(root, revision)) as watch:
        assert sum(len(event.value) for event in await take(watch, 7)) == 7 << 20
    await store.delete_prefix(root)


async def test_a_dead_holders_keys_go_with_its_lease(backend: Backend, store: StateStore, root: str) -> None:
    lease = await store.grant_lease(1.0)
    await store.put(root + "stays", b"")
    await store.put(root + "a", b"", lease=lease)
    revision = await store.put(root + "b", b"", lease=lease)
    entry = await store.get(root + "a")
    assert entry is not None
    assert entry.incarnation_id == lease.incarnation_id
    lease.abandon()
    await backend.let_expire(lease.ttl_s)
    async with aclosing(store.watch(root, revision + 1)) as watch:
        events = await take(watch, 2)
    assert outline(events, root) == ["-a", "-b"]
    assert events[0].mod_revision == events[1].mod_revision
    assert keys(await store.range(root), root) == ["stays"]
    assert await lease.wait_lost() == "abandoned"


async def test_a_living_holder_keeps_its_lease(backend: Backend, store: StateStore, root: str) -> None:
    kept = await store.grant_lease(1.0)
    revision = await store.put(root + "kept", b"", lease=kept)
    async with aclosing(store.watch(root, revision + 1)) as watch:
        for _ in range(2):
            abandoned = await store.grant_lease(1.0)
            await store.put(root + "abandoned", b"", lease=abandoned)
            abandoned.abandon()
            await backend.let_expire(abandoned.ttl_s)
            assert outline(await take(watch, 2), root) == ["+abandoned=", "-abandoned"]
    assert kept.loss is None
    assert keys(await store.range(root), root) == ["kept"]


async def test_a_revoked_lease_is_gone_at_once(store: StateStore, root: str) -> None:
    lease = await store.grant_lease(60.0)
    await store.put(root + "a", b"", lease=lease)
    await lease.revoke()
    assert await store.get(root + "a") is None
    assert await lease.wait_lost() == "revoked"
    with pytest.raises(LeaseLost):
        await store.put(root + "a", b"", lease=lease)
    await lease.revoke()


async def test_the_holder_is_told_that_its_lease_is_gone(backend: Backend, store: StateStore, root: str) -> None:
    lease = await store.grant_lease(2.0)
    await store.put(root + "a", b"", lease=lease)
    await backend.end_lease(lease.incarnation_id)
    async with asyncio.timeout(10):
        assert await lease.wait_lost() == "expired"
    with pytest.raises(LeaseLost):
        await store.compare_and_swap(root + "a", 0, b"", lease=lease)


async def test_writing_under_a_lease_that_the_store_forgot(backend: Backend, store: StateStore, root: str) -> None:
    lease = await store.grant_lease(3600.0)
    await backend.end_lease(lease.incarnation_id)
    with pytest.raises(LeaseLost):
        await store.put(root + "a", b"", lease=lease)
    assert await store.get(root + "a") is None


async def test_a_restarted_holder_is_another_incarnation(backend: Backend, store: StateStore, root: str) -> None:
    before = await store.grant_lease(1.0)
    await store.put(root + "worker", b"old", lease=before)
    await store.put(root + "other", b"old", lease=before)
    before.abandon()
    after = await store.grant_lease(60.0)
    assert after.incarnation_id != before.incarnation_id
    revision = await store.put(root + "worker", b"new", lease=after)
    await backend.let_expire(before.ttl_s)
    async with aclosing(store.watch(root, revision)) as watch:
        events = await take(watch, 2)
    assert outline(events, root) == ["+worker=new", "-other"]
    assert events[0].incarnation_id == after.incarnation_id
    await after.revoke()


async def test_a_write_without_lease_detaches_the_key(store: StateStore, root: str) -> None:
    lease = await store.grant_lease(60.0)
    await store.put(root + "a", b"", lease=lease)
    await store.put(root + "a", b"")
    await lease.revoke()
    entry = await store.get(root + "a")
    assert entry is not None
    assert entry.incarnation_id == ""


async def test_a_watch_reports_the_past_and_then_the_present(backend: Backend, store: StateStore, root: str) -> None:
    start = (await store.range(root)).revision
    await store.put(root + "a", b"1")
    await store.put("elsewhere/" + root, b"")
    async with aclosing(store.watch(root, start + 1)) as watch:
        assert outline(await take(watch, 1), root) == ["+a=1"]
        writer = backend.store()
        await writer.put(root + "a", b"2")
        await writer.delete(root + "a")
        await writer.put(root + "a", b"3")
        events = await take(watch, 3)
    assert outline(events, root) == ["+a=2", "-a", "+a=3"]
    assert [event.mod_revision - start for event in events] == [3, 4, 5]


async def test_a_watch_without_a_revision_begins_now(store: StateStore, root: str) -> None:
    await store.put(root + "past", b"")
    async with aclosing(store.watch(root)) as watch:
        first = asyncio.create_task(take(watch, 1))
        number = 0
        while not first.done():
            await store.put(root + "now", str(number).encode())
            number += 1
        assert first.result()[0].key == root + "now"


async def test_a_watch_from_zero_begins_with_what_is_there(store: StateStore, root: str) -> None:
    await store.put(root + "b", b"1")
    await store.put(root + "a", b"1")
    async with aclosing(store.watch(root, 0)) as watch:
        assert outline(await take(watch, 2), root) == ["+b=1", "+a=1"]
        await store.delete(root + "b")
        assert outline(await take(watch, 1), root) == ["-b"]


@pytest.mark.slow
async def test_two_watchers_see_the_same(backend: Backend, store: StateStore, root: str) -> None:
    start = (await store.range(root)).revision
    async with aclosing(store.watch(root, start + 1)) as one, aclosing(backend.store().watch(root, start + 1)) as other:
        taken = asyncio.gather(take(one, 300), take(other, 300))
        for number in range(300):
            await store.put(f"{root}{number % 7}", str(number).encode())
        events, same = await taken
    assert events == same
    assert [event.value for event in events] == [str(number).encode() for number in range(300)]


async def test_a_watch_cannot_begin_in_forgotten_history(backend: Backend, store: StateStore, root: str) -> None:
    first = await store.put(root + "a", b"1")
    await store.put(root + "a", b"2")
    last = await store.put(root + "a", b"3")
    await backend.compact(last)
    with pytest.raises(StoreCompacted):
        await anext(store.watch(root, first))
    with pytest.raises(StoreCompacted):
        await anext(store.watch(root, last + 100))
    async with aclosing(store.watch(root, last + 1)) as watch:
        await store.put(root + "a", b"4")
        assert outline(await take(watch, 1), root) == ["+a=4"]


async def test_closing_the_store_ends_its_watches_and_leases(backend: Backend, root: str) -> None:
    store = backend.store()
    lease = await store.grant_lease(60.0)
    revision = await store.put(root + "a", b"", lease=lease)
    watch = store.watch(root, revision)
    await take(watch, 1)
    waiting = asyncio.create_task(anext(watch, None))
    await asyncio.sleep(0)
    await store.close()
    async with asyncio.timeout(5):
        assert await waiting is None
        assert await lease.wait_lost() == "abandoned"
    with pytest.raises(StoreUnavailable):
        await store.get(root + "a", timeout_s=0.5)
