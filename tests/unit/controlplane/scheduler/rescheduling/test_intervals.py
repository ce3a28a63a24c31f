"""What an interval leaves behind when instances, requests or the configuration are not what they were; no network."""

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from controlplane.decode_message import decode_message
from controlplane.model.cluster import ClusterLimits
from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import decode_load
from controlplane.policies.rescheduling.migrations import Migrations, OrderedMigration
from controlplane.policies.rescheduling.mode import ReschedulerMode
from controlplane.policies.rescheduling.parameters import ReschedulerParameters
from controlplane.scheduler.feed import ClusterFeed
from controlplane.scheduler.rescheduling.metrics import ReschedulerMetrics
from controlplane.scheduler.rescheduling.runner import ReschedulingRunner
from controlplane.scheduler.rescheduling.switch import ReschedulerSwitch
from mesh.runtime import SystemThreads
from penstock.v1 import monitor_pb2, worker_pb2
from tests.still_clock import StillClock
from tests.unit.mesh.leading import Leading


class Bench:
    """A runner whose intervals are called by hand; workers say that what they were told has moved."""

    def __init__(self, **parameters: Any) -> None:
        self.feed = ClusterFeed(ClusterLimits(max_indexed_blocks=100))
        self.registry = CollectorRegistry()
        self.given: list[str] = []
        self.epochs: list[int] = []
        self.lead = Leading()
        self.answer = worker_pb2.MigrateResponse(moved=True)
        switch = ReschedulerSwitch(ReschedulerMode.CURRENT)
        switch.configure(ReschedulerMode.CURRENT, ReschedulerParameters(**parameters))
        self.runner = ReschedulingRunner(
            self.feed,
            switch,
            Migrations(8, 100),
            self,
            ReschedulerMetrics(self.registry),
            self.lead,
            StillClock(10.0),
            SystemThreads(),
        )
        self._sequence = 0
        self.feed.begin()

    async def migrate(self, ordered: OrderedMigration, address: str, epoch: int) -> worker_pb2.MigrateResponse:
        self.given.append(ordered.order.request_id)
        self.epochs.append(epoch)
        return self.answer

    def tell(self, instance_id: str, **change: Any) -> None:
        self._sequence += 1
        update = monitor_pb2.InstanceUpdate(instance_id=instance_id, incarnation_id="1", **change)
        self.feed.apply(monitor_pb2.ClusterUpdate(sequence=self._sequence, instances=[update], synced=True), now_s=10.0)

    def decodes(self, instance_id: str, **context_tokens: int) -> None:
        """An instance that decodes these."""
        self.tell(
            instance_id,
            joined=worker_pb2.InstanceDescription(
                instance_id=instance_id, incarnation_id="1", model="m", block_tokens=16, kv_blocks=1000, address="h:1"
            ),
        )
        self.tell(instance_id, load=worker_pb2.LoadReport(state=worker_pb2.INSTANCE_STATE_READY))
        running = [RunningRequest(name, tokens, 1, None) for name, tokens in context_tokens.items()]
        self.tell(instance_id, decode=decode_message(decode_load(running, ReschedulerParameters().horizon)))

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"penstock_rescheduler_{name}", {"model": "m"})


async def test_a_request_that_two_instances_tell_of_is_ordered_to_move_once() -> None:
    bench = Bench(migrations=2)
    bench.decodes("a", r=300, s=300)
    bench.decodes("b", r=300, t=300)
    bench.decodes("c")
    bench.decodes("d")
    await bench.runner.reschedule()
    await asyncio.sleep(0)
    assert bench.given == ["r"], "while it is handed over both tell of it"


async def test_loads_that_cannot_be_compared_any_more_are_not_shown() -> None:
    bench = Bench()
    bench.decodes("a", r=300)
    bench.decodes("b")
    await bench.runner.reschedule()
    assert bench.metric("mean_tokens") == 150
    for name in ("a", "b"):
        bench.tell(name, lost=monitor_pb2.InstanceLost(reason="died"))
    await bench.runner.reschedule()
    assert bench.metric("mean_tokens") is None
    assert bench.metric("variance") is None
    await bench.runner.stop()


async def test_what_was_decided_by_a_former_configuration_is_void(monkeypatch: Any) -> None:
    bench = Bench()
    bench.decodes("a", r=300, s=300)
    bench.decodes("b")
    runner = bench.runner

    async def switched_off_meanwhile(decide: Any, *arguments: Any) -> Any:
        runner.switch.configure(ReschedulerMode.OFF, runner.switch.parameters)
        runner.note_change()
        return decide(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", switched_off_meanwhile)
    await runner.reschedule()
    await runner.reschedule()
    assert (runner.views, runner.balances, bench.given) == ({}, {}, [])
    assert bench.metric("mean_tokens") is None, "nothing would ever change it again"


async def test_orders_bear_the_epoch_and_a_refusal_is_told_to_the_leadership() -> None:
    bench = Bench()
    bench.lead.epoch = 7
    bench.answer = worker_pb2.MigrateResponse(moved=False, reason="stale", highest_epoch=9)
    bench.decodes("a", r1=300, r2=200)
    bench.decodes("b", r3=10)
    await bench.runner.reschedule()
    while not bench.lead.refusals:  # noqa: ASYNC110 - the order is carried out in the background
        await asyncio.sleep(0)
    assert (bench.epochs[0], bench.lead.refusals[0]) == (7, 9)
    await bench.runner.stop()


async def test_who_does_not_lead_orders_nothing() -> None:
    bench = Bench()
    bench.lead.is_leading = False
    bench.decodes("a", r1=300, r2=200)
    bench.decodes("b", r3=10)
    await bench.runner.reschedule()
    assert (bench.given, len(bench.runner.balances)) == ([], 1)
