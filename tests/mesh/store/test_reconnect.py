"""What becomes of calls, watches and leases when the store dies, is cut off, or comes back without its memory."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from mesh.errors import StoreUnavailable
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store import StateStore, WatchEvent
from mesh.store.host import StoreHost
from tests.in_time import within
from tests.mesh.store.backends import EtcdBackend, RemoteBackend
from tests.mesh.store.proxy import Proxy

pytestmark = pytest.mark.live

Mortal = RemoteBackend | EtcdBackend


async def take(watch: AsyncGenerator[WatchEvent], count: int) -> list[WatchEvent]:
    async with asyncio.timeout(20):
        return [await anext(watch) for _ in range(count)]


def outline(events: list[WatchEvent]) -> list[str]:
    return [f"+{event.key}={event.value.decode()}" if event.kind == "put" else f"-{event.key}" for event in events]


@asynccontextmanager
async def running_watch(store: StateStore, prefix: str) -> AsyncIterator[AsyncGenerator[WatchEvent]]:
    """A watch that has reported its first event, a put of `prefix`first."""
    revision = await store.put(prefix + "first", b"")
    async with aclosing(store.watch(prefix, revision)) as watch:
        assert outline(await take(watch, 1)) == [f"+{prefix}first="]
        yield watch


async def revive(backend: Mortal) -> None:
    await backend.start()
    await backend.store().get("ready", timeout_s=20)


async def test_what_was_written_while_cut_off_arrives_once(mortal: Mortal, proxy: Proxy) -> None:
    writer = mortal.store()
    async with running_watch(mortal.store([proxy.endpoint]), "a/") as watch:
        for number in range(3):
            await proxy.cut()
            await writer.put("a/x", str(number).encode())
            await writer.put("a/y", b"")
            await writer.delete_prefix("a/")
            await proxy.restore()
            events = outline(await take(watch, 4 if number else 5))
            assert sorted(events[:2]) == [f"+a/x={number}", "+a/y="]
            assert sorted(events[2:]) == (["-a/x", "-a/y"] if number else ["-a/first", "-a/x", "-a/y"])
        await writer.put("a/last", b"")
        assert outline(await take(watch, 1)) == ["+a/last="]


async def test_a_watch_outlives_the_death_of_its_store(mortal: Mortal, proxy: Proxy) -> None:
    """Writes go on around the kill; the watcher is cut off longer than the store is down."""
    writer = mortal.store()
    revision = await writer.put("w/begin", b"")
    async with running_watch(mortal.store([proxy.endpoint]), "w/") as watch:
        received: list[WatchEvent] = []
        for life in range(2):
            for number in range(20):
                await writer.put(f"w/{number % 3}", f"{life}.{number}".encode())
            received += await take(watch, 20)
            await proxy.cut()
            await mortal.kill()
            await revive(mortal)
            for number in range(20, 40):
                await writer.put(f"w/{number % 3}", f"{life}.{number}".encode())
            await writer.delete_prefix("w/")
            await proxy.restore()
            received += await take(watch, 20 + (5 if life == 0 else 3))
        await writer.put("w/end", b"")
        received += await take(watch, 1)
    async with aclosing(writer.watch("w/", revision)) as history:
        recorded = await take(history, 2 + len(received))
    assert received == recorded[2:]


async def test_a_direct_watch_survives_a_kill_amid_writes(mortal: Mortal) -> None:
    """Nobody is held back: writes fail and are tried again while the store dies and comes back."""
    store = mortal.store()
    revision = await store.put("k/0", b"")
    async with aclosing(store.watch("k/", revision)) as watch:
        stop = asyncio.Event()

        async def write() -> None:
            writer, number = mortal.store(), 1
            while not stop.is_set():
                with contextlib.suppress(StoreUnavailable):
                    await writer.put(f"k/{number}", b"", timeout_s=1.0)
                    number += 1
                await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        received = await take(watch, 50)
        await mortal.kill()
        await revive(mortal)
        received += await take(watch, 50)
        stop.set()
        await writing
    async with aclosing(mortal.store().watch("k/", revision)) as history:
        assert received == await take(history, len(received))


async def test_a_gap_in_history_is_bridged_by_the_difference(mortal: Mortal, proxy: Proxy) -> None:
    writer = mortal.store()
    await writer.put("d/unchanged", b"")
    await writer.put("d/deleted", b"")
    await writer.put("d/rewritten", b"old")
    async with running_watch(mortal.store([proxy.endpoint]), "d/") as watch:
        await proxy.cut()
        await writer.put("d/brief", b"")
        await writer.delete("d/brief")
        await writer.put("d/rewritten", b"between")
        await writer.delete("d/deleted")
        await writer.put("d/rewritten", b"new")
        await writer.put("d/new", b"")
        await mortal.compact((await writer.range("")).revision)
        await proxy.restore()
        events = await take(watch, 3)
        assert outline(events) == ["+d/rewritten=new", "+d/new=", "-d/deleted"]
        revisions = [event.mod_revision for event in events]
        assert revisions == sorted(revisions)
        await writer.put("d/after", b"")
        assert outline(await take(watch, 1)) == ["+d/after="]


async def test_a_store_that_lost_its_data_is_reported_as_it_is(mortal: Mortal) -> None:
    async with running_watch(mortal.store(), "l/") as watch:
        await mortal.kill()
        await mortal.lose_data()
        await revive(mortal)
        assert outline(await take(watch, 1)) == ["-l/first"]
        await mortal.store().put("l/new", b"")
        assert outline(await take(watch, 1)) == ["+l/new="]


async def test_calls_end_in_time_while_the_store_is_down_and_work_again_after(mortal: Mortal) -> None:
    store = mortal.store()
    revision = await store.put("a", b"1")
    await mortal.kill()
    began_s = time.monotonic()
    calls = (
        store.get("a", timeout_s=0.5),
        store.range("", timeout_s=0.5),
        store.put("a", b"2", timeout_s=0.5),
        store.compare_and_swap("a", revision, b"2", timeout_s=0.5),
        store.delete("a", timeout_s=0.5),
        store.delete_prefix("a", timeout_s=0.5),
        store.grant_lease(5.0, timeout_s=0.5),
        anext(store.watch("a", timeout_s=0.5)),
    )
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(failure) for failure in failures] == [StoreUnavailable] * len(calls)
    within(time.monotonic() - began_s, 2.0, "what is asked while the store is away")
    waiting = asyncio.create_task(store.get("a", timeout_s=20))
    await mortal.start()
    entry = await waiting
    assert entry is not None
    assert (entry.value, entry.mod_revision) == (b"1", revision)
    assert await store.put("a", b"2") == revision + 1


async def test_a_lease_is_lost_when_nobody_answered_for_its_ttl(mortal: Mortal, proxy: Proxy) -> None:
    holder, onlooker = mortal.store([proxy.endpoint]), mortal.store()
    lease = await holder.grant_lease(1.0)
    revision = await holder.put("held", b"", lease=lease)
    await proxy.cut()
    async with asyncio.timeout(5):
        assert await lease.wait_lost() == "unreachable"
    async with aclosing(onlooker.watch("held", revision + 1)) as watch:
        assert outline(await take(watch, 1)) == ["-held"]
    await proxy.restore()
    again = await holder.grant_lease(5.0)
    assert again.incarnation_id != lease.incarnation_id
    await holder.put("held", b"", lease=again)


async def test_a_lease_survives_a_short_cut(mortal: Mortal, proxy: Proxy) -> None:
    holder, onlooker = mortal.store([proxy.endpoint]), mortal.store()
    lease = await holder.grant_lease(2.0)
    revision = await holder.put("held", b"", lease=lease)
    await proxy.cut()
    await proxy.restore()
    shorter = await onlooker.grant_lease(3.0)
    await onlooker.put("heldless", b"", lease=shorter)
    shorter.abandon()
    async with aclosing(onlooker.watch("held", revision + 1)) as watch:
        assert outline(await take(watch, 2)) == ["+heldless=", "-heldless"]
    assert lease.loss is None
    assert await onlooker.get("held") is not None


async def test_a_restarted_host_keeps_what_its_file_keeps(tmp_path: Path) -> None:
    path = tmp_path / "state.journal"
    backend = RemoteBackend(StoreHost(SystemClock(), SystemEntropy(), path))
    await backend.start()
    store = backend.store()
    async with running_watch(store, "f/") as watch:
        lease = await store.grant_lease(60.0)
        await store.put("f/leased", b"", lease=lease)
        await take(watch, 1)
        await backend.kill()
        backend.host.close()
        backend.host = StoreHost(SystemClock(), SystemEntropy(), path)
        await backend.start()
        assert outline(await take(watch, 1)) == ["-f/leased"]
        revision = await store.put("f/second", b"")
        events = await take(watch, 1)
        assert outline(events) == ["+f/second="]
        assert events[0].mod_revision == revision
    assert [entry.key for entry in (await store.range("f/")).entries] == ["f/first", "f/second"]
    await backend.close()


@pytest.mark.etcd
async def test_another_endpoint_takes_over(own_etcd: EtcdBackend) -> None:
    one, other = Proxy(own_etcd.port), Proxy(own_etcd.port)
    await one.restore()
    await other.restore()
    store = own_etcd.store([one.endpoint, other.endpoint])
    async with running_watch(store, "e/") as watch:
        for broken in (one, other):
            await broken.cut()
            revision = await own_etcd.store().put("e/x", b"")
            assert (await store.range("e/")).revision == revision
            assert outline(await take(watch, 1)) == ["+e/x="]
            assert await store.put("e/y", b"") > revision
            assert outline(await take(watch, 1)) == ["+e/y="]
            await broken.restore()
    await one.cut()
    await other.cut()


@pytest.mark.etcd
async def test_an_endpoint_that_accepts_but_never_answers_is_left(own_etcd: EtcdBackend) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        store = own_etcd.store([f"127.0.0.1:{mute.getsockname()[1]}", own_etcd.process.endpoint])
        assert await store.put("a", b"") > 0


@pytest.mark.etcd
async def test_a_frozen_etcd_answers_neither_late_nor_never(own_etcd: EtcdBackend) -> None:
    store = own_etcd.store()
    revision = await store.put("a", b"1")
    own_etcd.process.freeze()
    began_s = time.monotonic()
    try:
        with pytest.raises(StoreUnavailable):
            await store.get("a", timeout_s=0.3)
        with pytest.raises(StoreUnavailable, match="may or may not"):
            await store.compare_and_swap("a", revision, b"2", timeout_s=0.3)
        within(time.monotonic() - began_s, 2.0, "what is asked while the store is away")
    finally:
        own_etcd.process.thaw()
    entry = await store.get("a", timeout_s=20)
    assert entry is not None
    assert entry.value in (b"1", b"2")
