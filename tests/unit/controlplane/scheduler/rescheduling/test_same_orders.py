"""The scheduler's shell and the simulator's give their rescheduling managers the same events: their instructions are
equal."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controlplane.decode_message import decode_message
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.instance import InstanceDescription, InstancePhase, LoadReport
from controlplane.model.migration_order import MigrationOrder
from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import decode_load
from controlplane.policies.rescheduling.manager import (
    BalanceChanged,
    Decide,
    FallbackChanged,
    GiveOrder,
    ReschedulingManager,
)
from controlplane.policies.rescheduling.migrations import OrderedMigration
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.scheduler.feed import ClusterFeed
from controlplane.scheduler.rescheduling.metrics import ReschedulerMetrics
from controlplane.scheduler.rescheduling.service import ReschedulingService
from mesh.runtime import SystemThreads
from penstock.v1 import monitor_pb2, worker_pb2
from simulator.cluster.config import InstanceSpec
from simulator.cluster.control import MigrationEnd
from simulator.instance.config import InstanceConfig
from simulator.rescheduling.controller import ReschedulingController
from tests.still_clock import StillClock
from tests.unit.mesh.leading import Leading

PARAMETERS = ReschedulerParameters(migrations=2, theta=0.05)
INTERVALS = 16
REFUSED = ("a4", "a5")
"""Requests that their targets do not take, the first time."""


@dataclass
class World:
    """Requests on four instances; what happens in each interval is the same for both shells."""

    alive: list[str] = field(default_factory=lambda: ["a", "b", "c", "d"])
    requests: dict[str, tuple[str, int]] = field(
        default_factory=lambda: {f"a{n}": ("a", 300 + 40 * n) for n in range(8)} | {"b0": ("b", 100), "d0": ("d", 700)}
    )
    refused: set[str] = field(default_factory=set)

    def begin(self, interval: int) -> None:
        self.requests = {name: (where, tokens + 10) for name, (where, tokens) in self.requests.items()}
        if interval == 5:
            self.requests |= {f"e{n}": ("b", 500) for n in range(5)}
        if interval == 9:
            self.alive.remove("d")
            self.requests = {name: at for name, at in self.requests.items() if at[0] != "d"}
        if interval == 12:
            self.requests.clear()

    def running(self, instance_id: str) -> list[RunningRequest]:
        here = [(name, tokens) for name, (where, tokens) in self.requests.items() if where == instance_id]
        return [RunningRequest(name, tokens, 1) for name, tokens in here]

    def carry_out(self, order: MigrationOrder) -> str:
        """Why the request stayed; empty if it moved."""
        if order.request_id in REFUSED and order.request_id not in self.refused:
            self.refused.add(order.request_id)
            return "no room"
        self.requests[order.request_id] = (order.target_instance_id, self.requests[order.request_id][1])
        return ""


class Live:
    """A `ReschedulingService` over a feed; stands for the workers, too."""

    def __init__(self, world: World) -> None:
        self.world, self.clock, self._sequence = world, StillClock(1.0), 0
        self.feed = ClusterFeed(ClusterLimits(max_indexed_blocks=100))
        self.service = ReschedulingService(
            self.feed,
            ReschedulingManager(ReschedulerMode.CURRENT, 8, 100),
            self,
            ReschedulerMetrics(CollectorRegistry()),
            Leading(),
            self.clock,
            SystemThreads(),
        )
        self.service.configure(ReschedulerMode.CURRENT, PARAMETERS)
        self.feed.begin()
        for each in world.alive:
            joined = worker_pb2.InstanceDescription(
                instance_id=each, incarnation_id="1", model="m", block_tokens=16, kv_blocks=1000, address="h:1"
            )
            self.tell(each, joined=joined)
            self.tell(each, load=worker_pb2.LoadReport(state=worker_pb2.INSTANCE_STATE_READY, step_ms=10.0))

    def tell(self, instance_id: str, **change: Any) -> None:
        self._sequence += 1
        update = monitor_pb2.InstanceUpdate(instance_id=instance_id, incarnation_id="1", **change)
        message = monitor_pb2.ClusterUpdate(sequence=self._sequence, instances=[update], synced=True)
        self.feed.apply(message, now_s=self.clock.now_s())

    async def migrate(self, ordered: OrderedMigration, address: str, epoch: int) -> worker_pb2.MigrateResponse:
        reason = self.world.carry_out(ordered.order)
        return worker_pb2.MigrateResponse(moved=not reason, reason=reason)

    async def run(self) -> None:
        for interval in range(INTERVALS):
            self.clock.at_s = 1.0 + interval
            before = tuple(self.world.alive)
            self.world.begin(interval)
            for gone in set(before) - set(self.world.alive):
                self.tell(gone, lost=monitor_pb2.InstanceLost(reason="died"))
            for each in self.world.alive:
                load = decode_load(self.world.running(each), PARAMETERS.horizon)
                self.tell(each, decode=decode_message(load))
            await self.service.reschedule()
            for _ in range(5):
                await asyncio.sleep(0)


class Simulated:
    """A `ReschedulingController`, and the `Cluster` that it looks at."""

    model = "m"

    def __init__(self, world: World) -> None:
        self.world = world
        self.running = world.running
        self.controller = ReschedulingController(ReschedulerMode.CURRENT, PARAMETERS)

    def instance_ids(self) -> tuple[str, ...]:
        return tuple(self.world.alive)

    def description(self, instance_id: str) -> InstanceDescription:
        return InstanceDescription(
            instance_id, "1", "", "m", "", "simulated", 16, 1000, 9999, 64, 512, InstancePhase.ANY
        )

    def load(self, instance_id: str) -> LoadReport:
        return LoadReport(step_ms=10.0)

    def spec(self, instance_id: str) -> InstanceSpec:
        return InstanceSpec(InstanceConfig())

    def run(self) -> None:
        cluster: Any = self
        for interval in range(INTERVALS):
            now_ms = 1000.0 * (1 + interval)
            self.world.begin(interval)
            for order in self.controller.act(cluster, now_ms):
                reason = self.world.carry_out(order)
                self.controller.on_event(MigrationEnd(order, not reason, reason, now_ms, now_ms), now_ms)


def comparable(instruction: Any) -> Any:
    """A decision's arrays do not compare; its result does, and is in the log besides."""
    match instruction:
        case Decide(number, model, _, instances, moving, held, unreachable, left):
            return number, model, [each.instance_id for each in instances], moving, held, dict(unreachable), left
        case GiveOrder(ordered):
            return ordered.order
        case _:
            return instruction


async def test_instruction_logs_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[float, Any]] = []
    handle = ReschedulingManager.handle

    def recorded(self: ReschedulingManager, event: Any, now_s: float) -> tuple[Any, ...]:
        instructions = handle(self, event, now_s)
        self.validate()
        log.extend((now_s, comparable(each)) for each in instructions)
        return instructions

    monkeypatch.setattr(ReschedulingManager, "handle", recorded)
    live = Live(World())
    await live.run()
    await live.service.stop()
    of_live, log = log, []
    Simulated(World()).run()
    assert log == of_live
    orders = [each for _, each in log if isinstance(each, MigrationOrder)]
    assert len(orders) > 6
    assert {each.request_id for each in orders} & set(REFUSED), "some were refused"
    assert any(isinstance(each, BalanceChanged) for _, each in log)
    assert not any(isinstance(each, FallbackChanged) for _, each in log)
