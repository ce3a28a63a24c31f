"""Plans are followed on as many GPUs as there are, whatever joins, fails, hangs or is drained meanwhile."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from controlplane.deployment.deployment_status import DEPLOYMENTS_PREFIX, DeploymentStatus
from controlplane.deployment.failed_starts import FIRST_BACKOFF_S, MAX_BACKOFF_S
from controlplane.deployment.manager import LINGER_S
from controlplane.model.cascade_goal import PLANS_PREFIX
from controlplane.model.cascade_record import CascadeRecord
from controlplane.planning.cascade.plan import CascadePlan, encode_plan
from mesh.store.embedded import EmbeddedStore
from mesh.store.interface import DEFAULT_TIMEOUT_S
from mesh.store.lease import Lease
from services.cli.supervisor.supervisor import KILL_AFTER_S
from tests.unit.services.cli.machine import DRAIN_S, ONE, READY_S, TWO, Machine, planned

WAIT_S = 20.0


def why(record: DeploymentStatus) -> dict[str, str]:
    return {missing.model: missing.why for missing in record.missing}


async def test_a_gpu_goes_from_a_tier_that_shrinks_to_one_that_grows(store: EmbeddedStore) -> None:
    machine = Machine(4, store, small=[ONE], large=[ONE, ONE, ONE])
    machine.plan(planned("both", small={ONE: 2}, large={ONE: 2}))
    record = await machine.turn()
    assert why(record) == {"small": "it waits for GPUs: 1 needed, 0 free"}
    assert record.leaving == ("large-2",)
    assert machine.kill_after_s == {"large-2": DRAIN_S + KILL_AFTER_S}, "its worker gives its requests as long"
    await machine.ends("large-2")
    assert why(await machine.turn()) == {"small": "starting"}
    machine.joins("small-1")
    assert (await machine.turn()).is_reached
    assert machine.events[-1] == "all instances run as planned"


async def test_the_old_instance_serves_until_its_substitute_has_joined(store: EmbeddedStore) -> None:
    machine = Machine(4, store, large=[ONE, ONE])
    machine.plan(planned("both", large={TWO: 1}))
    await machine.turn()
    assert machine.starting == {"large-2"}
    record = await machine.turn(after_s=READY_S)
    assert why(record) == {"large": "large-2 was not in the mesh for 300 s; see its log; it is tried again"}
    assert machine.serving == {("large", ONE): 2}
    assert machine.kill_after_s == {"large-2": KILL_AFTER_S}, "nothing runs on it"
    await machine.ends("large-2")
    await machine.turn()
    assert not machine.starting
    await machine.turn(after_s=FIRST_BACKOFF_S)
    assert machine.starting == {"large-2"}, "it is tried again"
    machine.joins("large-2")
    await machine.turn()
    assert set(machine.kill_after_s) == {"large-0", "large-1"}


async def test_a_substitute_that_never_starts_leaves_the_tier_with_an_instance(store: EmbeddedStore) -> None:
    """Two GPUs, both in use: old and new do not fit together."""
    machine = Machine(2, store, large=[TWO])
    machine.plan(planned("both", large={ONE: 2}))
    exchanges = 0
    for _ in range(40):
        record = await machine.turn(after_s=61.0)
        for name in list(machine.kill_after_s):
            exchanges += machine.kill_after_s[name] > KILL_AFTER_S
            await machine.ends(name)
        for each in machine.manager.replicas:
            if each.name in machine.starting:
                if each.shape == TWO:
                    machine.joins(each.name)
                else:
                    machine.keeps_ending(each.name)
    assert machine.serving == {("large", TWO): 1}
    assert exchanges == 3, "it is not tried at that price for ever"
    assert not record.is_reached
    assert "nothing makes room for it once more: apply another plan, or this one again" in why(record)["large"]
    assert any(
        event.startswith("NOT as planned: large lacks 2 (TP=1): large-0 was given up") for event in machine.events
    )
    machine.plan(planned("both", large={ONE: 2}))
    await machine.settle()
    assert machine.serving == {("large", ONE): 2}


@pytest.mark.slow
async def test_pauses_between_tries_double_up_to_a_bound(store: EmbeddedStore) -> None:
    machine = Machine(2, store, small=[ONE])
    machine.broken = {"large"}
    machine.plan(planned("both", small={ONE: 1}, large={ONE: 1}))
    tries: list[float] = []
    for _ in range(2000):
        before = len(machine.events)
        await machine.turn(after_s=1.0)
        tries += [machine.now_s for event in machine.events[before:] if event.startswith("no model large here; ")]
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses[:4] == [FIRST_BACKOFF_S * 2.0**n for n in range(4)]
    assert max(pauses) == pauses[-1] == MAX_BACKOFF_S
    machine.broken = set()
    await machine.turn(after_s=MAX_BACKOFF_S)
    assert machine.starting == {"large-0"}


async def test_an_instance_that_was_given_up_is_replaced(store: EmbeddedStore) -> None:
    machine = Machine(2, store, small=[ONE, ONE])
    machine.plan(planned("both", small={ONE: 2}))
    assert (await machine.turn()).is_reached
    machine.keeps_ending("small-1")
    record = await machine.turn()
    assert why(record) == {"small": "small-1 was given up: it kept ending (status 1); it is tried again"}
    await machine.turn(after_s=FIRST_BACKOFF_S)
    assert machine.starting == {"small-1"}


async def test_a_former_incarnation_under_the_same_name_is_no_sign_of_life(store: EmbeddedStore) -> None:
    machine = Machine(2, store, small=[ONE])
    machine.joined["small-1"] = "killed, and its lease still runs"
    machine.plan(planned("both", small={ONE: 2}))
    assert why(await machine.turn()) == {"small": "starting"}
    assert why(await machine.turn()) == {"small": "starting"}
    machine.joins("small-1")
    assert (await machine.turn()).is_reached


async def test_cascades_that_share_a_model_do_not_undo_each_other(store: EmbeddedStore) -> None:
    machine = Machine(0, store, small=[ONE])
    machine.plan(planned("one", small={ONE: 2}), planned("two", small={ONE: 1}, large={ONE: 1}))
    record = await machine.settle()
    assert machine.serving == {("small", ONE): 3, ("large", ONE): 1}
    assert set(record.plans) == {"one", "two"}
    machine.plan(planned("two", small={ONE: 1}, large={ONE: 1}))
    await machine.settle()
    assert machine.serving == {("small", ONE): 1, ("large", ONE): 1}


async def test_a_tier_that_is_left_out_keeps_an_instance_for_a_while(store: EmbeddedStore) -> None:
    machine = Machine(0, store, small=[ONE], large=[ONE, ONE])
    machine.plan(planned("both", small={ONE: 1}, large={ONE: 2}))
    assert (await machine.turn()).is_reached
    machine.plan(planned("both", small={ONE: 2}, large={}))
    await machine.turn()
    assert set(machine.kill_after_s) == {"large-1"}
    await machine.turn(after_s=LINGER_S - 1)
    assert set(machine.kill_after_s) == {"large-1"}
    machine.plan(planned("both", small={ONE: 3}, large={}))
    await machine.turn(after_s=1.0)
    assert set(machine.kill_after_s) == {"large-0", "large-1"}, "it was left out before already"


async def test_a_newer_plan_supersedes_at_once(store: EmbeddedStore) -> None:
    machine = Machine(2, store, small=[ONE], large=[ONE])
    machine.plan(planned("both", small={ONE: 2}, large={}))
    await machine.turn()
    machine.plan(planned("both", small={ONE: 1}, large={ONE: 1}))
    assert (await machine.turn()).is_reached
    assert not machine.kill_after_s


async def test_an_instance_that_an_operator_drained_stays_away_until_the_next_plan(store: EmbeddedStore) -> None:
    machine = Machine(2, store, small=[ONE, ONE])
    plan = planned("both", small={ONE: 2})
    machine.plan(plan)
    await machine.turn()
    machine.drains_by_itself("small-0")
    record = await machine.turn()
    assert why(record) == {"small": "an operator has drained it; applying the plan again brings it back"}
    assert why(await machine.turn(after_s=MAX_BACKOFF_S)) == why(record)
    assert machine.gpus.free == 1
    machine.plan(plan)
    await machine.turn()
    assert machine.starting == {"small-0"}


async def test_a_plan_for_one_cascade_leaves_what_operators_did_for_another(store: EmbeddedStore) -> None:
    machine = Machine(0, store, small=[ONE, ONE], other=[ONE])
    mine = planned("mine", small={ONE: 2})
    machine.put_in_force({"mine": (0, mine), "theirs": (5, planned("theirs", other={ONE: 1}))})
    assert machine.events == ["the plan for theirs, revision 5, is followed"]
    await machine.settle()
    machine.drains_by_itself("small-1")
    await machine.turn()
    machine.put_in_force({"mine": (0, mine), "theirs": (6, planned("theirs", other={ONE: 2}))})
    await machine.turn()
    assert machine.starting == {"other-1"}, "the operator has drained the other one"
    machine.put_in_force({"mine": (7, mine)})
    assert machine.events[-2:] == [
        "the plan for mine, revision 7, is followed",
        "no plan for theirs is followed any more",
    ]
    await machine.turn()
    assert "small-1" in machine.starting


async def test_more_than_the_machine_has_is_said(store: EmbeddedStore) -> None:
    machine = Machine(2, store, small=[ONE])
    machine.plan(planned("both", small={ONE: 1}, large={TWO: 1}))
    assert why(await machine.turn()) == {"large": "the plans want 3 GPUs together, and there are 2 here for them"}
    assert machine.serving == {("small", ONE): 1}


async def test_instances_of_models_without_a_plan_are_left_alone(store: EmbeddedStore) -> None:
    machine = Machine(0, store, small=[ONE], other=[ONE, ONE])
    machine.plan(planned("both", small={ONE: 2}))
    await machine.settle()
    assert machine.serving == {("small", ONE): 2, ("other", ONE): 2}


async def put(store: EmbeddedStore, plan: CascadePlan) -> int:
    """As the planner does."""
    await put_record(store, plan, 0)
    revision = await store.put(PLANS_PREFIX + plan.name, encode_plan(plan))
    await put_record(store, plan, revision)
    return revision


async def put_record(store: EmbeddedStore, plan: CascadePlan, revision: int) -> None:
    record = CascadeRecord(plan.name, tuple(tier.model for tier in plan.tiers), plan.thresholds, plan_revision=revision)
    await store.put(record.key, msgspec.json.encode(record))


async def published(store: EmbeddedStore, is_it: Callable[[DeploymentStatus], bool]) -> DeploymentStatus:
    """What the follower says, once it is that."""
    async with asyncio.timeout(WAIT_S):
        async for event in store.watch(DEPLOYMENTS_PREFIX, 0):
            if event.kind == "put":
                record = msgspec.json.decode(event.value, type=DeploymentStatus)
                if is_it(record):
                    return record
    raise AssertionError("the store was closed")


@pytest.mark.live
async def test_plans_come_from_the_store_and_progress_is_kept_there_while_the_supervisor_lives(
    store: EmbeddedStore,
) -> None:
    machine = Machine(2, store, small=[ONE])
    following = asyncio.create_task(machine.deployer.follow())
    try:
        revision = await put(store, planned("both", small={ONE: 2}))
        told = await published(store, lambda record: record.plans == {"both": revision})
        assert (told.supervisor, why(told)) == ("here", {"small": "starting"})
        machine.joins("small-1")
        machine.deployer.wake()
        assert (await published(store, lambda record: record.is_reached)).plans == {"both": revision}
    finally:
        following.cancel()
        await asyncio.wait([following])
    assert (await store.range(DEPLOYMENTS_PREFIX)).entries == ()


@pytest.mark.live
async def test_a_plan_that_contradicts_itself_is_not_followed(store: EmbeddedStore) -> None:
    machine = Machine(0, store, small=[ONE])
    following = asyncio.create_task(machine.deployer.follow())
    try:
        await put(store, planned("both", small={ONE: 1}))
        await published(store, lambda record: record.is_reached and "both" in record.plans)
        await put(store, planned("both", small={ONE: 100}))
        await put(store, planned("more", small={ONE: 1}))
        told = await published(store, lambda record: "more" in record.plans and bool(record.missing))
        assert [missing.count for missing in told.missing] == [1], "the old one stays"
    finally:
        following.cancel()
        await asyncio.wait([following])


@pytest.mark.live
async def test_a_plan_of_a_planner_that_leads_no_more_is_not_followed(store: EmbeddedStore) -> None:
    machine = Machine(0, store, small=[ONE])
    following = asyncio.create_task(machine.deployer.follow())

    def led(count: int, epoch: int, name: str = "both") -> CascadePlan:
        leader = f"planner-{epoch}" if epoch else ""
        return msgspec.structs.replace(planned(name, small={ONE: count}), epoch=epoch, leader=leader)

    try:
        await put(store, led(1, epoch=7))
        await published(store, lambda record: record.is_reached and "both" in record.plans)
        await put(store, led(3, epoch=5))
        await put(store, led(1, epoch=5, name="more"))
        told = await published(store, lambda record: "more" in record.plans and bool(record.missing))
        assert [missing.count for missing in told.missing] == [1], "of each cascade the last leader counts"
        await put(store, led(4, epoch=0))
        told = await published(store, lambda record: sum(missing.count for missing in record.missing) == 4)
        assert set(told.plans) == {"both", "more"}, "an operator's own plan always counts"
    finally:
        following.cancel()
        await asyncio.wait([following])


@pytest.mark.live
async def test_thresholds_of_an_operator_leave_the_instances_as_planned(store: EmbeddedStore) -> None:
    machine = Machine(0, store, small=[ONE])
    following = asyncio.create_task(machine.deployer.follow())
    try:
        revision = await put(store, planned("both", small={ONE: 1}, large={}))
        await published(store, lambda record: record.is_reached and "both" in record.plans)
        own = CascadeRecord("both", ("small", "large"), (77.0,))
        await store.put(own.key, msgspec.json.encode(own))
        await put(store, planned("more", small={ONE: 1}))
        told = await published(store, lambda record: "more" in record.plans)
        assert told.plans["both"] == revision
    finally:
        following.cancel()
        await asyncio.wait([following])


@pytest.mark.live
async def test_a_former_plan_is_not_taken_for_one_that_was_not_heard_of_yet(store: EmbeddedStore) -> None:
    """Plans and cascades are followed apart: either one may be heard of first."""
    machine = Machine(0, store, small=[ONE])
    following = asyncio.create_task(machine.deployer.follow())
    try:
        first = planned("both", small={ONE: 1}, large={})
        former = await put(store, first)
        await published(store, lambda record: record.is_reached and "both" in record.plans)
        second = msgspec.structs.replace(planned("both", small={ONE: 2}, large={}), thresholds=(60.0,))
        await put_record(store, second, 1000)
        await put(store, planned("more", small={ONE: 1}))
        told = await published(store, lambda record: "more" in record.plans)
        assert told.plans["both"] == former
        await store.put(PLANS_PREFIX + "both", encode_plan(second))
        told = await published(store, lambda record: record.plans["both"] == 1000)
        assert [missing.count for missing in told.missing] == [2]
    finally:
        following.cancel()
        await asyncio.wait([following])


@pytest.mark.live
async def test_progress_is_told_again_where_the_lease_was_lost(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases: list[Lease] = []
    grant = store.grant_lease

    async def granted(ttl_s: float, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Lease:
        leases.append(await grant(ttl_s, timeout_s=timeout_s))
        return leases[-1]

    monkeypatch.setattr(store, "grant_lease", granted)
    machine = Machine(0, store, small=[ONE])
    following = asyncio.create_task(machine.deployer.follow())
    try:
        await put(store, planned("both", small={ONE: 1}))
        await published(store, lambda record: record.is_reached and "both" in record.plans)
        await leases[0].revoke()
        assert (await published(store, lambda record: True)).is_reached
        assert len(leases) == 2
    finally:
        following.cancel()
        await asyncio.wait([following])


@pytest.mark.live
async def test_the_plan_of_a_cascade_that_was_removed_counts_no_more(store: EmbeddedStore) -> None:
    machine = Machine(0, store, small=[ONE])
    following = asyncio.create_task(machine.deployer.follow())
    try:
        await put(store, planned("one", small={ONE: 2}))
        await put(store, planned("two", small={ONE: 1}))
        told = await published(store, lambda record: len(record.plans) == 2 and len(machine.processes) == 3)
        assert why(told) == {"small": "starting"}
        await store.delete(CascadeRecord("one", ("small",), ()).key)
        told = await published(store, lambda record: set(record.plans) == {"two"})
        assert (told.missing, told.leaving) == ((), ("small-1", "small-2"))
    finally:
        following.cancel()
        await asyncio.wait([following])
