"""What an interval leaves behind when instances, requests or the configuration are not what they were; no network."""

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from controlplane.decode_message import decode_message
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.frontend_links import FrontendLinks
from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import decode_load
from controlplane.policies.rescheduling.manager import ReschedulingManager
from controlplane.policies.rescheduling.migrations import OrderedMigration
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.stages.layout import StageLayout
from controlplane.scheduler.feed import ClusterFeed
from controlplane.scheduler.rescheduling.metrics import ReschedulerMetrics
from controlplane.scheduler.rescheduling.service import ReschedulingService
from mesh.runtime import SystemThreads
from penstock.v1 import monitor_pb2, worker_pb2
from tests.still_clock import StillClock
from tests.unit.mesh.leading import Leading


class Bench:
    """A service whose intervals are called by hand; workers say that what they were told has moved."""

    def __init__(self, stages: StageLayout | None = None, **parameters: Any) -> None:
        self.feed = ClusterFeed(ClusterLimits(max_indexed_blocks=100))
        self.registry = CollectorRegistry()
        self.given: list[str] = []
        self.epochs: list[int] = []
        self.lead = Leading()
        self.answer = worker_pb2.MigrateResponse(moved=True)
        self.service = ReschedulingService(
            self.feed,
            ReschedulingManager(ReschedulerMode.CURRENT, 8, 100),
            self,
            ReschedulerMetrics(self.registry),
            self.lead,
            StillClock(10.0),
            SystemThreads(),
            lambda: {} if stages is None else {"m": stages},
        )
        self.service.configure(ReschedulerMode.CURRENT, ReschedulerParameters(**parameters))
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

    def decodes(self, instance_id: str, frontend_id: str = "", **context_tokens: int) -> None:
        """An instance that decodes these, for a frontend."""
        self.tell(
            instance_id,
            joined=worker_pb2.InstanceDescription(
                instance_id=instance_id, incarnation_id="1", model="m", block_tokens=16, kv_blocks=1000, address="h:1"
            ),
        )
        self.tell(instance_id, load=worker_pb2.LoadReport(state=worker_pb2.INSTANCE_STATE_READY))
        running = [RunningRequest(name, tokens, 1, None, frontend_id) for name, tokens in context_tokens.items()]
        self.tell(instance_id, decode=decode_message(decode_load(running, ReschedulerParameters().horizon)))

    def links(self, frontend_id: str, *instance_ids: str) -> None:
        """A frontend that is connected to these."""
        links = FrontendLinks()
        self.feed.linked(links)
        links.report([(each, "1") for each in instance_ids], frontend_id)

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"penstock_rescheduler_{name}", {"model": "m"})


async def test_a_request_that_two_instances_tell_of_is_ordered_to_move_once() -> None:
    bench = Bench(migrations=2)
    bench.decodes("a", r=300, s=300)
    bench.decodes("b", r=300, t=300)
    bench.decodes("c")
    bench.decodes("d")
    await bench.service.reschedule()
    await asyncio.sleep(0)
    assert bench.given == ["r"], "while it is handed off both tell of it"


async def test_a_request_does_not_leave_its_stage() -> None:
    bench = Bench(StageLayout("m", 1, (("a", "b"), ("c",)), (1000,)), theta=0.0)
    bench.decodes("a", r=300, s=300)
    bench.decodes("b", t=100)
    bench.decodes("c")
    await bench.service.reschedule()
    (order,) = bench.service.manager.migrations.moving()
    assert (order.source_instance_id, order.target_instance_id) == ("a", "b"), "c is empty, and of another stage"


async def test_loads_that_cannot_be_compared_any_more_are_not_shown() -> None:
    bench = Bench()
    bench.decodes("a", r=300)
    bench.decodes("b")
    await bench.service.reschedule()
    assert bench.metric("mean_tokens") == 150
    for name in ("a", "b"):
        bench.tell(name, lost=monitor_pb2.InstanceLost(reason="died"))
    await bench.service.reschedule()
    assert bench.metric("mean_tokens") is None
    assert bench.metric("variance") is None
    await bench.service.stop()


async def test_what_was_decided_by_a_former_configuration_is_void(monkeypatch: Any) -> None:
    bench = Bench()
    bench.decodes("a", r=300, s=300)
    bench.decodes("b")
    service = bench.service

    async def switched_off_meanwhile(decide: Any, *arguments: Any) -> Any:
        service.configure(ReschedulerMode.OFF, service.manager.switch.parameters)
        return decide(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", switched_off_meanwhile)
    await service.reschedule()
    await service.reschedule()
    assert (service.manager.views, service.manager.balances, bench.given) == ({}, {}, [])
    assert bench.metric("mean_tokens") is None, "nothing would ever change it again"


async def test_orders_bear_the_epoch_and_a_refusal_is_told_to_the_leadership() -> None:
    bench = Bench()
    bench.lead.epoch = 7
    bench.answer = worker_pb2.MigrateResponse(moved=False, reason="stale", highest_epoch=9)
    bench.decodes("a", r1=300, r2=200)
    bench.decodes("b", r3=10)
    await bench.service.reschedule()
    while not bench.lead.refusals:  # noqa: ASYNC110 - the order is carried out in the background
        await asyncio.sleep(0)
    assert (bench.epochs[0], bench.lead.refusals[0]) == (7, 9)
    await bench.service.stop()


async def test_who_does_not_lead_orders_nothing() -> None:
    bench = Bench()
    bench.lead.is_leading = False
    bench.decodes("a", r1=300, r2=200)
    bench.decodes("b", r3=10)
    await bench.service.reschedule()
    assert (bench.given, len(bench.service.manager.balances)) == ([], 1)


async def test_no_request_is_moved_to_where_its_frontend_has_no_stream() -> None:
    bench = Bench()
    bench.decodes("a", "f", r1=300, r2=200)
    bench.decodes("b")
    bench.decodes("c", "f", r3=10)
    bench.links("f", "a", "c")
    bench.links("g", "a", "b", "c")
    await bench.service.reschedule()
    await asyncio.sleep(0)
    bench.service.manager.validate()
    (ordered,) = bench.service.manager.migrations.latest(9)
    assert ordered.order.target_instance_id == "c", "although b is empty"
    await bench.service.stop()


async def test_a_request_that_can_go_nowhere_stays_and_another_goes() -> None:
    bench = Bench()
    bench.decodes("a", "f", r1=300, r2=200)
    bench.decodes("b")
    bench.links("f", "a")
    await bench.service.reschedule()
    assert bench.given == []
    bench.links("f", "a", "b")  # a second stream of the same frontend, as for a moment after it lost one
    await bench.service.reschedule()
    await asyncio.sleep(0)
    assert len(bench.given) == 1
