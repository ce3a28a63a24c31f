"""The worker's shell and the simulator's give their stage managers the same events: their instructions are equal."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.instance import InstanceDescription, InstanceState, LoadReport
from controlplane.model.migration_order import MigrationOrder
from controlplane.model.running_request import RunningRequest
from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.agent import BoundaryMoved, StageParameters
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.manager import TICK_MS, MoveRequest, StageChanged, StageManager
from controlplane.policies.stages.placement import Stages
from controlplane.policies.stages.record import StageRecord, layout_key
from controlplane.policies.stages.refinement import RefinementParameters
from controlplane.protocols.bid_ask.sender import Closed
from controlplane.protocols.migration.source_events import Ending, MigrationOutcome
from engine_worker.coordinator.stages import wire
from engine_worker.coordinator.stages.coordinator import StageCoordinator
from mesh.leadership_state import Fence
from mesh.membership import ChangeKind, Member, MemberChange
from simulator.cluster.control import Ended, Joined, Lost, MigrationEnd
from simulator.cluster.stages import StageController

MODEL = QoeModel(8.0, 0.05, 1e-4, 1e-8, 2e-4)
LAYOUT = StageLayout("m", 1, (("a", "d"), ("b", "c")), (200,))
PARAMETERS = StageParameters(RefinementParameters(interval_s=1.0, fewest_requests=2), retry_s=0.3, settle_s=0.5)
DELAY_MS = 0.5
MOVE_MS = 30.0
END_MS = 4000.0


@dataclass
class World:
    """Requests that grow by a token every 10 ms, and what is to happen when; the same for both shells."""

    now_ms: float = 0.0
    alive: list[str] = field(default_factory=lambda: ["a", "b", "c", "d"])
    requests: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Where each is, and its tokens when all began."""
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    def at(self, ms: float, act: Callable[[], None]) -> None:
        heappush(self._heap, (ms, next(self._numbers), act))

    async def run(self) -> None:
        while self._heap and self._heap[0][0] <= END_MS:
            self.now_ms, _, act = heappop(self._heap)
            act()
            for _ in range(10):  # what tasks do about it takes no time
                await asyncio.sleep(0)

    def here(self, instance_id: str) -> list[tuple[str, int]]:
        grown = int(self.now_ms / 10)
        return [(name, tokens + grown) for name, (where, tokens) in self.requests.items() if where == instance_id]

    def running(self, instance_id: str) -> list[RunningRequest]:
        return [RunningRequest(name, tokens, tokens - 20) for name, tokens in self.here(instance_id)]

    def load(self, instance_id: str) -> LoadReport:
        tokens = sum(tokens for _, tokens in self.here(instance_id))
        return LoadReport(running_tokens=tokens, kv_blocks_used=-(-tokens // 16))

    def moved(self, request_id: str, target: str) -> bool:
        there = request_id in self.requests and target in self.alive
        if there:
            self.requests[request_id] = (target, self.requests[request_id][1])
        return there


def description(instance_id: str) -> InstanceDescription:
    return InstanceDescription(instance_id, f"{instance_id}.1", "", "m", "", "simulated", 16, 1000, 4096, 64, 512)


STORY: Sequence[tuple[float, str, str, int]] = (
    (10, "add", "a", 120),
    (20, "add", "a", 190),
    (30, "add", "a", 195),
    (40, "add", "a", 60),
    (45, "add", "b", 900),
    (60, "add", "d", 90),
    (700, "add", "a", 150),
    (760, "end", "a", 0),
    (1500, "lose", "c", 0),
    (1600, "add", "a", 900),
    (2200, "add", "d", 130),
    (2500, "end", "b", 0),
)


def play(world: World, ended: Callable[[str, str], None], lost: Callable[[str], None]) -> None:
    """Have the story happen; the shells are told of ends and losses."""

    def happen(number: int, what: str, instance_id: str, tokens: int) -> None:
        if what == "add":
            world.requests[f"r{number}"] = (instance_id, tokens)
        elif what == "end":
            first = next(name for name, _ in world.here(instance_id))
            del world.requests[first]
            ended(first, instance_id)
        else:
            world.alive.remove(instance_id)
            world.requests = {name: at for name, at in world.requests.items() if at[0] != instance_id}
            lost(instance_id)

    for number, (ms, what, instance_id, tokens) in enumerate(STORY):
        world.at(ms, lambda n=number, w=what, i=instance_id, t=tokens: happen(n, w, i, t))  # type: ignore[misc]


def every_tick(world: World, tick: Callable[[], None]) -> None:
    def again() -> None:
        tick()
        world.at(world.now_ms + TICK_MS, again)

    world.at(TICK_MS, again)


class SimulatedCluster:
    """A `Cluster` over the world."""

    model, message_delay_ms = "m", DELAY_MS

    def __init__(self, world: World, controller: StageController) -> None:
        self._world, self._controller = world, controller
        self.load, self.running, self.description = world.load, world.running, description

    @property
    def now_ms(self) -> float:
        return self._world.now_ms

    def instance_ids(self) -> tuple[str, ...]:
        return tuple(self._world.alive)

    def after(self, delay_ms: float, act: Callable[[float], None]) -> None:
        self._world.at(self.now_ms + delay_ms, lambda: act(self.now_ms))

    def order(self, order: MigrationOrder) -> None:
        began_ms = self.now_ms

        def end() -> None:
            moved = self._world.moved(order.request_id, order.target_instance_id)
            reason = "" if moved else "it is gone"
            self._controller.on_event(MigrationEnd(order, moved, reason, began_ms, self.now_ms), self.now_ms)

        self._world.at(began_ms + MOVE_MS, end)


async def simulated() -> None:
    world = World()
    controller = StageController(LAYOUT, MODEL, Stages(), PARAMETERS)
    cluster: Any = SimulatedCluster(world, controller)
    play(
        world,
        lambda request_id, instance_id: controller.on_event(Ended(request_id, instance_id), world.now_ms),
        lambda instance_id: controller.on_event(Lost(instance_id), world.now_ms),
    )
    controller.attached(cluster)
    assert controller.interval_ms == TICK_MS
    every_tick(world, lambda: [*controller.act(cluster, world.now_ms)].clear())
    await world.run()
    controller.on_event(Joined("c"), world.now_ms)


class Shell:
    """A worker's `StageCoordinator` with fakes at its seams: engine, members, store, streams and clock."""

    def __init__(self, world: World, instance_id: str, shells: dict[str, "Shell"]) -> None:
        self._world, self._id, self._shells = world, instance_id, shells
        self._follow: Callable[[MemberChange], None] = lambda change: None
        instance: Any = SimpleNamespace(
            description=description(instance_id),
            on_handoff=[],
            load=lambda: world.load(instance_id),
            state=InstanceState.READY,
            hung=False,
            transfer_obstacle="",
            frontends=frozenset({""}),
            table=self,
        )
        clock = SimpleNamespace(now_s=lambda: world.now_ms / 1000, unix_s=lambda: world.now_ms / 1000)
        context: Any = SimpleNamespace(
            registry=CollectorRegistry(),
            runtime=SimpleNamespace(clock=clock, transport=None),
            store=None,
            directory=None,
            server=SimpleNamespace(add=lambda *_: None),
        )
        mover: Any = self
        self.coordinator = StageCoordinator(instance, mover, context, Fence(), open_links=lambda *_: self)  # type: ignore[arg-type,return-value]

    # the request table

    def find(self, request_id: str) -> Any:
        return next((each for each in self if each.request.request_id == request_id), None)

    def __iter__(self) -> Any:
        for name, tokens in self._world.here(self._id):
            yield SimpleNamespace(
                request=SimpleNamespace(request_id=name, prompt_token_ids=range(20)),
                emitted_token_ids=range(tokens - 20),
                remaining_tokens=None,
                band_tokens=None,
                frontend_id="",
                state="running",
            )

    # the mover

    @property
    def peers(self) -> Any:
        return self

    async def known(self) -> None:
        pass

    def present(self) -> tuple[Member, ...]:
        return tuple(member(each) for each in self._world.alive if each != self._id)

    async def migrate(self, request_id: str, target: str) -> MigrationOutcome:
        outcome = asyncio.get_running_loop().create_future()

        def end() -> None:
            moved = self._world.moved(request_id, target)
            outcome.set_result(
                MigrationOutcome(Ending.MOVED) if moved else MigrationOutcome(Ending.FAILED, "it is gone")
            )

        self._world.at(self._world.now_ms + MOVE_MS, end)
        ended: MigrationOutcome = await outcome
        return ended

    # the links

    def send(self, peer: str, message: Any) -> None:
        listener = self._shells.get(peer)

        def arrive() -> None:
            if listener is not None and peer in self._world.alive:
                listener.coordinator._heard(self._id, wire.to_message(message))

        self._world.at(self._world.now_ms + DELAY_MS, arrive)


def member(instance_id: str) -> Member:
    return Member("worker", instance_id, f"{instance_id}.1", "", {})


async def live() -> None:
    world = World()
    shells: dict[str, Shell] = {}
    for each in world.alive:
        shells[each] = Shell(world, each, shells)

    def lost(instance_id: str) -> None:
        shells.pop(instance_id)
        for shell in shells.values():
            shell.coordinator._member_changed(MemberChange(ChangeKind.LEFT, member(instance_id)))

    play(world, lambda request_id, instance_id: None, lost)
    record = StageRecord(LAYOUT, MODEL, "a test", 0.0, 0, 0.0, 0, parameters=PARAMETERS)
    assert msgspec.json.decode(msgspec.json.encode(record), type=StageRecord) == record
    for shell in shells.values():
        shell.coordinator._plan_changed(layout_key("m"), record)
    every_tick(world, lambda: [shell.coordinator.tick() for shell in list(shells.values())].clear())
    await world.run()


async def test_instruction_logs_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, float, tuple[Any, ...]]] = []
    handle = StageManager.handle

    def recorded(self: StageManager, event: Any, now_ms: float) -> tuple[Any, ...]:
        instructions = handle(self, event, now_ms)
        self.validate()
        if instructions:
            log.append((self._instance_id, round(now_ms, 3), instructions))
        return instructions

    monkeypatch.setattr(StageManager, "handle", recorded)
    await live()
    of_live, log = log, []
    await simulated()
    joined = next(at for at, entry in enumerate(log) if entry[0] == "c" and entry[1] > 1500)
    assert log[:joined] == of_live
    kinds = [type(each) for _, _, instructions in of_live for each in instructions]
    assert kinds.count(MoveRequest) >= 3
    assert kinds.count(StageChanged) == 4
    assert kinds.count(BoundaryMoved) > 4
    closed = [each for _, _, instructions in of_live for each in instructions if isinstance(each, Closed)]
    assert {each.moved for each in closed} == {True, False}
