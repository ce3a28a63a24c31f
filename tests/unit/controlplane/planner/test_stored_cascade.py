"""A plan comes into force in the state store: wholly, or not at all."""

import asyncio
from typing import Any

import msgspec
import pytest

from controlplane.model.cascade_goal import PLANS_PREFIX
from controlplane.model.cascade_record import CascadeRecord
from controlplane.planner.cascade.stored import ATTEMPTS, CascadeStore
from controlplane.planning.cascade.plan import decode_plan
from mesh.errors import PlanInfeasible, StoreConflict, StoreUnavailable
from mesh.runtime import system_runtime
from mesh.store import StateStore, open_store
from mesh.tasks import TaskSet
from tests.unit.controlplane.planner.cascade_windows import RECORD, plan_with
from tests.unit.controlplane.planner.manager_at_work import Maker, ManagerAtWork

PLAN_KEY = PLANS_PREFIX + "both"


class FlakyStore:
    """Somebody else may write before each swap of the record, and the plan's key may be out of reach."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self.changes: list[CascadeRecord] = []
        self.plans_fail = False
        self.writes_although_failed = False
        self.order: list[str] = []
        self.may_write_plans = asyncio.Event()
        self.may_write_plans.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def compare_and_swap(self, key: str, revision: int, value: bytes) -> int | None:
        if self.changes:
            await self._store.put(key, msgspec.json.encode(self.changes.pop(0)))
        self.order.append(key)
        return await self._store.compare_and_swap(key, revision, value)

    async def put(self, key: str, value: bytes) -> int:
        self.order.append(key)
        if key == PLAN_KEY:
            await self.may_write_plans.wait()
        if self.plans_fail and key == PLAN_KEY:
            if self.writes_although_failed:
                await self._store.put(key, value)
            raise StoreUnavailable("no answer within 3 s")
        return await self._store.put(key, value)


@pytest.fixture
async def flaky() -> Any:
    store = open_store("embedded:", system_runtime())
    await store.put(RECORD.key, msgspec.json.encode(RECORD))
    yield FlakyStore(store)
    await store.close()


async def record_in(flaky: Any) -> CascadeRecord:
    entry = await flaky.get(RECORD.key)
    return msgspec.json.decode(entry.value, type=CascadeRecord)


async def test_thresholds_come_first_and_the_record_says_of_which_plan_they_are(flaky: Any) -> None:
    revision = await CascadeStore(flaky).apply(plan_with(70.0))
    assert flaky.order == [RECORD.key, PLAN_KEY, RECORD.key]
    assert await record_in(flaky) == msgspec.structs.replace(RECORD, thresholds=(70.0,), plan_revision=revision)
    stored = await CascadeStore(flaky).cascade("both")
    assert (stored.plan, stored.plan_revision) == (plan_with(70.0), revision)


async def test_what_an_operator_sets_at_the_same_time_is_kept(flaky: Any) -> None:
    flaky.changes = [msgspec.structs.replace(RECORD, without_judge="accept", expected_s=(1.0, 2.0))]
    await CascadeStore(flaky).apply(plan_with(70.0, judge="exact"))
    record = await record_in(flaky)
    assert (record.without_judge, record.expected_s, record.thresholds) == ("accept", (1.0, 2.0), (70.0,))


async def test_an_operator_who_sets_another_judge_meanwhile_has_the_plan_refused(flaky: Any) -> None:
    by_other = msgspec.structs.replace(RECORD, judges=("model:b",))
    flaky.changes = [by_other]
    with pytest.raises(PlanInfeasible, match="scores of exact, the cascade is judged by model:b"):
        await CascadeStore(flaky).apply(plan_with(70.0, judge="exact"))
    assert await record_in(flaky) == by_other
    assert await flaky.get(PLAN_KEY) is None


async def test_a_record_that_never_holds_still_is_given_up(flaky: Any) -> None:
    flaky.changes = [msgspec.structs.replace(RECORD, thresholds=(float(n),)) for n in range(ATTEMPTS)]
    with pytest.raises(StoreConflict, match="apply the plan again"):
        await CascadeStore(flaky).apply(plan_with(70.0))
    assert await flaky.get(PLAN_KEY) is None


async def test_where_the_plan_cannot_be_written_the_thresholds_are_as_before(flaky: Any) -> None:
    flaky.plans_fail = True
    with pytest.raises(StoreUnavailable):
        await CascadeStore(flaky).apply(plan_with(70.0))
    assert await record_in(flaky) == RECORD
    assert await flaky.get(PLAN_KEY) is None


async def test_a_plan_that_was_written_although_nobody_said_so_is_in_force(flaky: Any) -> None:
    flaky.plans_fail = flaky.writes_although_failed = True
    revision = await CascadeStore(flaky).apply(plan_with(70.0))
    entry = await flaky.get(PLAN_KEY)
    assert (entry.mod_revision, decode_plan(entry.value).thresholds) == (revision, (70.0,))
    assert (await record_in(flaky)).plan_revision == revision


@pytest.mark.live
async def test_a_plan_whose_caller_goes_meanwhile_comes_into_force_all_the_same(flaky: Any) -> None:
    flaky.may_write_plans.clear()
    at = ManagerAtWork.of(flaky, Maker(), TaskSet("test"))
    applying = asyncio.create_task(at.manager.apply(plan_with(70.0)))
    await at.until(lambda: PLAN_KEY in flaky.order)
    applying.cancel()
    await asyncio.wait((applying,))
    flaky.may_write_plans.set()
    await at.until(lambda: at.plans("applied") == 1)
    assert (await at.manager.plan_of("both"))[0] == (await record_in(flaky)).plan_revision > 0


async def test_what_cannot_be_read_counts_as_absent(flaky: Any) -> None:
    await flaky.put(PLAN_KEY, b'{"format": 0}')
    await flaky.put("/penstock/goals/cascade/both", b"[]")
    stored = await CascadeStore(flaky).cascade("both")
    assert (stored.record, stored.goal, stored.plan) == (RECORD, None, None)
