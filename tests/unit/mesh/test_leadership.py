"""Leadership over a real store: gained, handed on, lost."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from mesh.leadership import LEADERS_PREFIX, Leadership, LeadershipMetrics, leaders
from mesh.leadership_state import LeaderRecord
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from tests.in_time import within

pytestmark = pytest.mark.live

WAIT_S = 10.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - a leadership tells one listener only
            await asyncio.sleep(0.001)


@pytest.fixture
async def host() -> AsyncIterator[StoreHost]:
    host = StoreHost(SystemClock(), SystemEntropy())
    yield host
    host.close()


@asynccontextmanager
async def candidate(host: StoreHost, name: str, duty: str = "tests") -> AsyncIterator[Leadership]:
    registry = CollectorRegistry()
    me = LeaderRecord(duty, name, f"incarnation of {name}", f"{name}:1")
    leadership = Leadership(EmbeddedStore(host), me, SystemClock(), LeadershipMetrics(registry))
    running = asyncio.create_task(leadership.run())
    try:
        yield leadership
    finally:
        running.cancel()
        await leadership.resign()


async def test_one_of_two_leads_and_the_other_follows_at_once_when_it_resigns(host: StoreHost) -> None:
    async with candidate(host, "a") as a, candidate(host, "b") as b:
        await until(lambda: a.is_leading or b.is_leading)
        first, second = (a, b) if a.is_leading else (b, a)
        await until(lambda: second.leader is not None)
        assert second.leader is not None
        assert (second.leader.address, second.leader.epoch) == (f"{second.leader.member_id}:1", first.epoch)
        assert not second.is_leading
        started_s = asyncio.get_running_loop().time()
        await first.resign()
        assert not first.is_leading
        await until(lambda: second.is_leading)
        within(asyncio.get_running_loop().time() - started_s, 1.0, "nobody waits for a lease that was revoked")
        assert second.epoch > first.epoch


async def test_duties_whose_names_begin_alike_are_apart(host: StoreHost) -> None:
    async with candidate(host, "a", "pool") as a, candidate(host, "b", "pools") as b:
        await until(lambda: a.is_leading and b.is_leading)
        found = await leaders(EmbeddedStore(host))
        assert {duty: record.member_id for duty, record in found.items()} == {"pool": "a", "pools": "b"}


async def test_a_store_that_lost_its_keys_gets_a_leader_of_a_higher_epoch(host: StoreHost) -> None:
    async with candidate(host, "a") as a:
        await until(lambda: a.is_leading)
        before = a.epoch
        host.delete_prefix("/penstock/")
        await until(lambda: a.is_leading and a.epoch > before)


async def test_a_leader_whose_order_was_refused_steps_down_and_goes_beyond(
    host: StoreHost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with candidate(host, "a") as a:
        await until(lambda: a.is_leading)
        a.refused(a.epoch + 1000)
        assert not a.is_leading
        before = a.epoch
        await until(lambda: a.is_leading)
        assert a.epoch > before + 1000
    assert caplog.text.count("leading no more") == 2


async def test_a_leader_that_was_overruled_in_the_store_stops(host: StoreHost) -> None:
    async with candidate(host, "a") as a:
        await until(lambda: a.is_leading)
        other = b'{"duty":"tests","member_id":"b","incarnation_id":"b","epoch":9999999999999}'
        host.put(LEADERS_PREFIX + "tests", other)
        await until(lambda: not a.is_leading)
        await until(lambda: a.leader is not None and a.leader.member_id == "b")


async def test_a_restarted_leader_takes_over_from_its_former_life_at_once(host: StoreHost) -> None:
    former = LeaderRecord("tests", "a", "former life", epoch=5)
    lease = await EmbeddedStore(host).grant_lease(3600.0)
    host.put(LEADERS_PREFIX + "tests", msgspec.json.encode(former), lease.incarnation_id)
    async with candidate(host, "a") as a, candidate(host, "b") as b:
        await until(lambda: a.is_leading)
        assert not b.is_leading
        assert a.epoch > former.epoch
    lease.abandon()
