"""The frontend and the simulator carry out what the recovery manager says: of the same events they get the same
instructions, one by one."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from controlplane.model.incarnation import Incarnation
from controlplane.policies.registry import create_policy
from controlplane.protocols.recovery import (
    Begin,
    Chosen,
    Ended,
    Event,
    GiveUp,
    Instruction,
    Lost,
    NoneChosen,
    Pause,
    RecoveryLimits,
    RecoveryManager,
    Submitted,
    Wait,
    Woken,
)
from controlplane.protocols.relay.events import LossReason
from fault_simulation.loop import VirtualLoop
from mesh.errors import NoInstance
from penstock.v1 import request_pb2
from services.frontend.metrics import FrontendMetrics
from services.frontend.placement.client import Placement
from services.frontend.placement.placer import Placer
from services.frontend.placement.waiting_room import WaitingRoom
from services.frontend.workers.relay import Relay, RelayRegistry
from services.frontend.workers.token_mailbox import TokenMailbox
from simulator.cluster.config import ClusterConfig, Failure
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest

LIMITS = RecoveryLimits(max_losses=2, wait_s=4.0)
CONFIG = InstanceConfig(
    block_tokens=16, kv_blocks=64, max_model_len_tokens=1024, max_batch_requests=1, max_step_tokens=100
)
COST = LinearCost(fixed_ms=10.0, prefill_token_ms=1.0, decode_request_ms=2.0, context_token_ms=0.0)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of an instruction log."""

    at_s: float
    event: Event
    instruction: Instruction


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """What the manager of the request r0 is told and answers, whoever drives it."""
    entries: list[Entry] = []
    handle = RecoveryManager.handle

    def noted(manager: RecoveryManager, event: Event, now_s: float) -> Instruction:
        instruction = handle(manager, event, now_s)
        if manager.request_id == "r0":
            told = instruction
            if isinstance(told, Pause | Wait):  # their clocks differ in the last bit
                told = structs.replace(told, seconds=round(told.seconds, 6))
            entries.append(Entry(round(now_s, 6), event, told))
        return instruction

    monkeypatch.setattr(RecoveryManager, "handle", noted)
    return entries


@dataclass
class RecordedMesh:
    """Pool, scheduler and workers as the frontend's placer sees them: each does next what the log says that it did."""

    loop: VirtualLoop
    answers: deque[Entry]
    placer: Placer = field(init=False)
    relay: Relay = field(init=False)
    relays: RelayRegistry = field(init=False)
    news: int = 0

    def __post_init__(self) -> None:
        metrics = FrontendMetrics(CollectorRegistry())
        here: Any = self
        self.relays = RelayRegistry(metrics, {}, self.loop.time)
        self.placer = Placer(
            here, here, CONFIG.block_tokens, 1.0, LIMITS, WaitingRoom(9, metrics), metrics, self.loop.time
        )
        self.relay = Relay(
            request_id="r0",
            index=0,
            model="simulated",
            prompt_token_ids=[1] * 50,
            sampling=request_pb2.SamplingParams(max_tokens=40),
            priority=0,
            started_s=0.0,
            deadline_s=600.0,
            mailbox=TokenMailbox(1000, lambda: None),
            on_lost=self.placer.recover,
        )

    def _next(self, *kinds: type[Event]) -> Entry:
        entry = self.answers.popleft()
        assert isinstance(entry.event, kinds), f"the simulator had {entry.event} when the frontend wanted {kinds}"
        return entry

    async def place(self, request: Any) -> Placement:
        answer = self._next(Chosen, NoneChosen).event
        if isinstance(answer, NoneChosen):
            raise NoInstance(answer.reason)
        assert isinstance(answer, Chosen)
        return Placement(answer.instance_id, "recorded")

    def ended(self, request_id: str, ok: bool, reason: str) -> None:
        """The scheduler hears of it; nothing here depends on that."""

    def link(self, instance_id: str) -> Any:
        return SimpleNamespace(is_connected=True)

    def is_overruled(self, model: str) -> bool:
        return False  # the simulator's scheduler knows of all instances

    def connected(self, model: str) -> tuple[()]:
        return ()

    async def wait_connected(self, instance_id: str, timeout_s: float) -> Any:
        self._next(Submitted)
        owner = Incarnation(instance_id, "0")
        return SimpleNamespace(submit=lambda relay, *_, **__: self.relays.submitted(relay, owner))

    async def wait_for_news(self, seen: int, timeout_s: float) -> bool:
        entry = self._next(Woken)
        assert isinstance(entry.event, Woken)
        has_news = entry.event.has_news
        await asyncio.sleep(entry.at_s - self.loop.time() if has_news else timeout_s)
        return has_news

    async def play(self) -> None:
        """What comes from outside: the request, the losses of its instances, and its end."""
        begun = self._next(Begin)
        assert isinstance(begun.event, Begin)
        await asyncio.sleep(begun.at_s)
        placing = asyncio.ensure_future(self.placer.put_new([self.relay], begun.event.wait_s))
        while self.answers:
            await asyncio.sleep(0.001)
            if not self.answers or not isinstance(self.answers[0].event, Lost | Ended):
                continue
            entry = self.answers.popleft()
            await asyncio.sleep(entry.at_s - self.loop.time())
            if isinstance(entry.event, Ended):
                self.placer.close(True, "finished")
            else:
                assert isinstance(entry.event, Lost)
                self._lose(entry.event, entry.instruction)
        await placing

    def _lose(self, lost: Lost, instruction: Instruction) -> None:
        if isinstance(instruction, Pause):
            paused = self.answers.popleft()
            assert isinstance(paused.event, Woken), "the driver's own timer"
        self.relay.request.stream.token_ids = [7] * lost.emitted_tokens
        owner = self.relay.request.stream.owner
        assert owner is not None
        assert owner.instance_id == lost.instance_id
        self.relays.worker_lost(owner, LossReason.WORKER_LOST, "gone")


COURSES = {
    "both die, one comes back": (Failure(0, 0.1, 2.0), Failure(1, 0.2)),
    "both die again and again": (
        Failure(0, 0.1, 0.3),
        Failure(1, 0.15, 0.1),
        Failure(0, 0.5, 0.1),
        Failure(1, 0.62, 0.7),
    ),
    "all are gone for too long": (Failure(0, 0.1), Failure(1, 0.2)),
}


@pytest.mark.parametrize("failures", COURSES.values(), ids=COURSES)
def test_of_the_same_events_both_get_the_same_instructions(log: list[Entry], failures: tuple[Failure, ...]) -> None:
    config = ClusterConfig(2, CONFIG, failures=failures, recovery=LIMITS)
    simulation = ClusterSimulation([TraceRequest(0.0, 50, 40)], config, COST, create_policy("lmetric"))
    simulation.run()
    simulation.placements.validate()
    simulated = list(log)
    log.clear()
    assert any(isinstance(entry.event, Lost) for entry in simulated)
    assert any(isinstance(entry.instruction, Wait | GiveUp) for entry in simulated)

    loop = VirtualLoop()
    loop.run(RecordedMesh(loop, deque(simulated)).play())
    assert log == simulated
