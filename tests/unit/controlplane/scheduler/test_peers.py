"""Two schedulers over one monitor: what one has placed counts in the other before any worker reports it."""

from collections import Counter

import pytest

from penstock.v1 import scheduler_pb2
from tests.in_time import still
from tests.unit.controlplane.local_mesh import local_mesh, place_request, scheduler_stub, snapshot_until

pytestmark = pytest.mark.live


def unreported(snapshot: scheduler_pb2.GetSnapshotResponse) -> int:
    return sum(instance.unreported_requests for instance in snapshot.instances)


async def test_two_schedulers_do_not_fill_the_same_instance() -> None:
    async with local_mesh() as mesh:
        monitor = await mesh.monitor()
        for name in "abcd":
            await (await mesh.worker(monitor, name)).load()
        first = await mesh.scheduler("scheduler-0")
        second = await mesh.scheduler("scheduler-1")
        async with scheduler_stub(first) as one, scheduler_stub(second) as two:
            for stub in (one, two):
                await snapshot_until(stub, lambda s: len(s.instances) == 4 and len(s.peers) == 1)
            placed: Counter[str] = Counter()
            for number in range(8):
                stub, other = (one, two) if number % 2 else (two, one)
                answer = await stub.Place(place_request(f"r{number}"))
                placed[answer.instance_id] += 1
                await snapshot_until(other, lambda s, n=number: unreported(s) == n + 1)
            assert set(placed.values()) == {2}, "each instance got as many as the others"
            assert (first.metric("penstock_scheduler_shared_events_total", way="sent") or 0) >= 4
            unseen_s = first.metric("penstock_scheduler_unseen_placement_seconds_total") or 0
            assert 0 < unseen_s < 4 * 60, "the other's four, each seen after some milliseconds"


@pytest.mark.slow
async def test_a_scheduler_that_has_just_come_is_told_of_what_is_open() -> None:
    async with local_mesh() as mesh:
        monitor = await mesh.monitor()
        worker = await mesh.worker(monitor, "a")
        await worker.load()
        first = await mesh.scheduler("scheduler-0")
        async with scheduler_stub(first) as one:
            await snapshot_until(one, lambda s: len(s.instances) == 1)
            await one.Place(place_request("r"))
            second = await mesh.scheduler("scheduler-1")
            async with scheduler_stub(second) as two:
                await snapshot_until(two, lambda s: unreported(s) == 1)
                await worker.load(admitted=["r"])
                for stub in (one, two):
                    await snapshot_until(stub, lambda s: unreported(s) == 0)


@pytest.mark.slow
async def test_placements_survive_a_change_of_the_monitor() -> None:
    async with local_mesh() as mesh:
        monitors = [await mesh.monitor(), await mesh.monitor("monitor-1")]
        workers = [await mesh.worker(monitor, "a") for monitor in monitors]
        for worker in workers:
            await worker.load()
        scheduler = await mesh.scheduler("scheduler-0")
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, lambda s: s.synced)
            for name in ("admitted", "open"):
                await stub.Place(place_request(name))
            for worker in workers:
                await worker.load(admitted=["admitted"])
                await worker.load()
            await snapshot_until(stub, lambda s: unreported(s) == 1)
            await mesh.kill(monitors[0])
            await snapshot_until(stub, lambda s: s.synced and scheduler.metric("penstock_scheduler_watches_total") == 2)
            await snapshot_until(stub, lambda s: unreported(s) == 1)


@pytest.mark.slow
async def test_a_monitor_that_falls_silent_is_left_for_another_before_placements_fall_back() -> None:
    async with local_mesh() as mesh:
        silent = await mesh.monitor(heartbeat_ms=1e6, stale_s=1e6)
        other = await mesh.monitor("monitor-1", stale_s=1e6)
        for monitor in (silent, other):
            await (await mesh.worker(monitor, "a")).load()
        scheduler = await mesh.scheduler("scheduler-0", monitor_silence_s=4.0)
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, lambda s: s.synced and len(s.instances) == 1)
            still(scheduler.metric("penstock_scheduler_watches_total") == 1, "it watches the one that will fall silent")
            await snapshot_until(stub, lambda s: s.synced and scheduler.metric("penstock_scheduler_watches_total") == 2)
            assert scheduler.metric("penstock_scheduler_fallbacks_total") == 0
