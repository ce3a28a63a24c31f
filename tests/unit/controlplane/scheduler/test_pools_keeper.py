"""The pools of the scheduler that leads them stand in the state store, and the next leader goes on with them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from controlplane.policies.interface import Policy, has_pools
from controlplane.policies.registry import create_policy
from controlplane.scheduler.pools_keeper import POOLS_PREFIX, PoolsKeeper, PoolsRecord
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from tests.unit.controlplane.builders import cluster

pytestmark = pytest.mark.live


@dataclass
class Lead:
    """Who leads, as a test says."""

    is_leading: bool = False
    epoch: int = 0

    def refused(self, epoch: int) -> None:
        raise AssertionError("nothing is ordered here")


@dataclass
class Owner:
    """A scheduler's policy, over four instances."""

    configured: Policy = field(default_factory=lambda: create_policy("arrow"))
    resumed: int = 0

    def look(self) -> Mapping[str, str]:
        snapshot = cluster("a", "b", "c", "d").snapshot("m")
        assert snapshot is not None
        self.configured.observe(snapshot, 0.0)  # type: ignore[attr-defined]
        return self.model_pools()["m"]

    def model_pools(self) -> Mapping[str, Mapping[str, str]]:
        return {"m": self.configured.pools("m")} if has_pools(self.configured) else {}

    def resume_pools(self, model: str, pools: Mapping[str, str]) -> None:
        self.resumed += 1
        assert has_pools(self.configured)
        self.configured.resume(model, pools)


@asynccontextmanager
async def a_store() -> AsyncIterator[EmbeddedStore]:
    host = StoreHost(SystemClock(), SystemEntropy())
    try:
        yield EmbeddedStore(host)
    finally:
        host.close()


@asynccontextmanager
async def following(keeper: PoolsKeeper) -> AsyncIterator[None]:
    """Only the watch: what is written, and when, the test decides."""
    task = asyncio.create_task(keeper._records.follow())
    try:
        await until(lambda: keeper._records.is_heard)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def record_of(store: EmbeddedStore) -> PoolsRecord | None:
    entry = await store.get(POOLS_PREFIX + "m")
    return None if entry is None else msgspec.json.decode(entry.value, type=PoolsRecord)


async def test_a_new_leader_goes_on_with_the_pools_of_the_former_one() -> None:
    async with a_store() as store:
        first, second = Owner(), Owner()
        leads, stands_by = Lead(True, 1), Lead()
        leader, standby = (
            PoolsKeeper(store, first, leads, "s0"), PoolsKeeper(store, second, stands_by, "s1"),
        )  # fmt: skip
        async with following(leader), following(standby):
            await leader.write()
            assert await record_of(store) is None, "nothing was looked at yet"
            first.configured.resume("m", dict.fromkeys("abc", "prefill") | {"d": "decode"})  # type: ignore[attr-defined]
            before = dict(first.look())
            await leader.write()
            assert await record_of(store) == PoolsRecord("m", "arrow", before, 1, "s0")
            await standby.write()
            assert second.resumed == 0, "it does not lead"
            await until(lambda: bool(standby._records.records))
            leads.is_leading, stands_by.is_leading, stands_by.epoch = False, True, 2
            standby.resume()
            assert second.look() == before, "not half and half, as without the record"
            standby.resume()
            assert second.resumed == 1, "once in an epoch"


async def test_a_leader_that_was_paused_overwrites_nothing() -> None:
    async with a_store() as store:
        owner, lead = Owner(), Lead(True, 1)
        keeper = PoolsKeeper(store, owner, lead, "s0")
        async with following(keeper):
            owner.look()
            later = PoolsRecord("m", "arrow", {"a": "decode"}, 2, "s1")
            await keeper._put(PoolsRecord("m", "arrow", {"a": "prefill"}, 1, "s0"))
            await store.put(POOLS_PREFIX + "m", msgspec.json.encode(later))
            await keeper._put(PoolsRecord("m", "arrow", {"a": "prefill"}, 1, "s0"))
            assert await record_of(store) == later


async def test_a_leader_that_leads_again_keeps_its_own_pools() -> None:
    async with a_store() as store:
        owner, lead = Owner(), Lead(True, 1)
        keeper = PoolsKeeper(store, owner, lead, "s0")
        async with following(keeper):
            keeper.resume()
            owner.look()
            await keeper.write()
            await until(lambda: bool(keeper._records.records))
            lead.epoch = 2
            keeper.resume()
            assert owner.resumed == 0, "they are newer than what it wrote"
            owner.configured = create_policy("arrow", {"ttft_ms": 500.0})
            keeper.resume()
            assert owner.resumed == 1, "made anew by other parameters, the policy has none"


async def test_pools_are_forgotten_with_the_policy_that_keeps_them() -> None:
    async with a_store() as store:
        owner, lead = Owner(), Lead(True, 1)
        keeper = PoolsKeeper(store, owner, lead, "s0")
        async with following(keeper):
            owner.look()
            await keeper.write()
            await until(lambda: bool(keeper._records.records))
            owner.configured = create_policy("lmetric")
            await keeper.write()
            assert await record_of(store) is None
