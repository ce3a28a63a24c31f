"""What a scheduler shows of a thousand instances: shared by those who look, and in nobody's way."""

import asyncio

from prometheus_client import CollectorRegistry

from controlplane.model.instance import InstanceDescription, InstanceState, LoadReport
from controlplane.scheduler.metrics import SchedulerMetrics
from controlplane.scheduler.placement_service import PlacementService
from controlplane.scheduler.settings import SchedulerSettings
from controlplane.scheduler.shown_snapshot import SLICE, ShownSnapshot
from tests.still_clock import StillClock

INSTANCES = 20 * SLICE


def description(number: int) -> InstanceDescription:
    return InstanceDescription(
        instance_id=f"w{number:04}",
        incarnation_id="1",
        address=f"h{number}:1",
        model="m",
        model_path="",
        engine="simulated",
        block_tokens=16,
        kv_blocks=1000,
        max_model_len_tokens=32768,
        max_batch_requests=256,
        max_step_tokens=2048,
    )


def shown(instances: int) -> tuple[ShownSnapshot, PlacementService, StillClock]:
    clock = StillClock()
    placements = PlacementService(SchedulerSettings(), SchedulerMetrics(CollectorRegistry()), clock)
    for number in range(instances):
        placements.feed.table.joined(description(number))
        load(placements, number, number % 7)
    return ShownSnapshot(placements, lambda: ("other",), clock), placements, clock


def load(placements: PlacementService, number: int, running: int) -> None:
    report = LoadReport(running_requests=running)
    placements.feed.table.reported(f"w{number:04}", "1", report, InstanceState.READY)


async def test_those_who_look_at_about_the_same_time_share_an_answer() -> None:
    snapshot, placements, clock = shown(2)
    first = await snapshot.get(900)
    assert [each.load.running_requests for each in first.instances] == [0, 1]
    assert list(first.peers) == ["other"]
    load(placements, 0, 5)
    clock.at_s += 0.8
    assert await snapshot.get(900) is first
    assert (await snapshot.get(0)).instances[0].load.running_requests == 5, (
        "who does not say otherwise sees this moment"
    )
    load(placements, 0, 6)
    clock.at_s += 1.0
    assert (await snapshot.get(900)).instances[0].load.running_requests == 6


async def test_placements_have_their_turn_while_a_large_one_is_made() -> None:
    snapshot, _, _ = shown(INSTANCES)
    turns = 0
    making = asyncio.create_task(snapshot.get(0))
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(making.result().instances) == INSTANCES
    assert turns >= INSTANCES // SLICE


async def test_an_instance_that_goes_meanwhile_is_left_out() -> None:
    snapshot, placements, _ = shown(INSTANCES)
    making = asyncio.create_task(snapshot.get(0))
    await asyncio.sleep(0)
    placements.feed.table.lost(f"w{INSTANCES - 1:04}", "1")
    names = [each.instance_id for each in (await making).instances]
    assert len(names) == INSTANCES - 1
    assert f"w{INSTANCES - 1:04}" not in names
