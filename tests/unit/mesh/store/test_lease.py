"""When a holder keeps, and when it loses, its lease; on a clock that the test turns."""

import asyncio

import pytest

from mesh.errors import LeaseLost, StoreUnavailable
from mesh.runtime import SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from mesh.store.lease import Lease
from tests.mesh.store.manual_clock import ManualClock


class Keeper:
    """The store's side of one lease: answers, says no, or does not answer."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.answers: bool | None = True
        self.refreshed_at_s: list[float] = []
        self.revoked = 0

    async def refresh(self, incarnation_id: str, timeout_s: float) -> bool:
        if self.answers is None:
            await self.clock.sleep(timeout_s)
            raise StoreUnavailable("no answer")
        self.refreshed_at_s.append(self.clock.now_s())
        return self.answers

    async def revoke(self, incarnation_id: str, timeout_s: float) -> None:
        self.revoked += 1


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def keeper(clock: ManualClock) -> Keeper:
    return Keeper(clock)


@pytest.fixture
async def lease(clock: ManualClock, keeper: Keeper) -> Lease:
    return Lease("one", 9.0, clock.now_s(), keeper.refresh, keeper.revoke, clock)


async def test_it_is_refreshed_three_times_per_ttl(clock: ManualClock, keeper: Keeper, lease: Lease) -> None:
    start_s = clock.now_s()
    await clock.advance(27.0)
    assert keeper.refreshed_at_s == [start_s + 3.0 * number for number in range(1, 10)]
    assert lease.loss is None
    lease.check_held()
    lease.abandon()


async def test_it_has_expired_when_the_store_says_so(clock: ManualClock, keeper: Keeper, lease: Lease) -> None:
    keeper.answers = False
    await clock.advance(3.0)
    assert lease.loss == "expired"
    with pytest.raises(LeaseLost, match="expired"):
        lease.check_held()


async def test_it_is_lost_after_a_ttl_without_answer(clock: ManualClock, keeper: Keeper, lease: Lease) -> None:
    await clock.advance(3.5)
    keeper.answers = None
    await clock.advance(8.0)
    assert lease.loss is None
    await clock.advance(1.5)
    assert lease.loss == "unreachable"


async def test_it_outlives_a_silence_shorter_than_its_ttl(clock: ManualClock, keeper: Keeper, lease: Lease) -> None:
    keeper.answers = None
    await clock.advance(7.0)
    keeper.answers = True
    await clock.advance(30.0)
    assert lease.loss is None
    lease.abandon()


async def test_the_first_end_is_the_one_that_counts(clock: ManualClock, keeper: Keeper, lease: Lease) -> None:
    waiting = asyncio.create_task(lease.wait_lost())
    await lease.revoke()
    lease.abandon()
    assert await waiting == "revoked"
    await clock.advance(30.0)
    assert (keeper.refreshed_at_s, keeper.revoked) == ([], 1)


async def test_cancelling_a_waiter_leaves_the_lease_alone(lease: Lease) -> None:
    waiting = asyncio.create_task(lease.wait_lost())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert lease.loss is None
    lease.abandon()


async def test_a_broken_keep_alive_ends_the_lease(clock: ManualClock) -> None:
    async def broken(incarnation_id: str, timeout_s: float) -> bool:
        raise ZeroDivisionError

    lease = Lease("one", 9.0, clock.now_s(), broken, Keeper(clock).revoke, clock)
    await clock.advance(3.0)
    assert lease.loss == "unreachable"


async def test_a_holder_that_was_stopped_for_too_long_learns_it(clock: ManualClock) -> None:
    host = StoreHost(clock, SystemEntropy())
    store = EmbeddedStore(host)
    lease = await store.grant_lease(9.0)
    await store.put("held", b"", lease=lease)
    clock.stall(9.0)
    assert await store.get("held") is None
    await clock.advance(0.0)
    assert lease.loss == "expired"
    await store.close()


async def test_leases_end_in_the_order_of_their_time(clock: ManualClock) -> None:
    host = StoreHost(clock, SystemEntropy())
    store = EmbeddedStore(host)
    for name, ttl_s in (("long", 20.0), ("short", 5.0), ("middle", 10.0)):
        lease = await store.grant_lease(ttl_s)
        await store.put(name, b"", lease=lease)
        lease.abandon()
    present = []
    for _ in range(5):
        present.append([entry.key for entry in host._keys.range("").entries])
        await clock.advance(5.0)
    assert present == [["long", "middle", "short"], ["long", "middle"], ["long"], ["long"], []]
    await store.close()
