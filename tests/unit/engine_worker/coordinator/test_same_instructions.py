"""The worker's shell and the simulator's tell their migration managers the same: the instructions are equal."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.incarnation import Incarnation
from controlplane.model.instance import InstanceDescription
from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.protocols.migration import messages, source, target, target_manager
from controlplane.protocols.migration.limits import ManagerLimits
from controlplane.protocols.migration.source_events import (
    AskDecode,
    DecodeChosen,
    Do,
    Ending,
    MigrationEnded,
    MoveOrdered,
    TransferEnded,
    TransferOrdered,
    TransferResult,
    WakeAfter,
)
from controlplane.protocols.migration.source_manager import SourceManager
from controlplane.protocols.migration.target_manager import TargetManager
from engine_worker.coordinator import wire
from engine_worker.coordinator.coordinator import Coordinator
from engine_worker.engines.movable import ExportProgress, PausedRequest
from engine_worker.request_table import TrackedRequest
from mesh.leadership_state import Fence
from mesh.membership import Member
from mesh.runtime import SystemEntropy
from mesh.tracing import NO_TRACES
from penstock.v1 import migration_pb2
from simulator.cluster.migration.coordinator import SimulatedCoordinator
from simulator.instance.counted_request import CountedRequest
from simulator.instance.sequence import SequenceState
from tests.unit.engine_worker.coordinator.migration_story import (
    BLOCK_TOKENS,
    OWN,
    PROMPT,
    PULL_MS,
    TICK_MS,
    Request,
    Story,
    World,
)

pytestmark = pytest.mark.live


class StoryCoordinator(Coordinator):
    """Has no timers: they would run by the machine's clock, and end too early for the story where that is busy."""

    async def _wake(self, delay_s: float) -> None:
        """Ticks come from the story."""


class LiveStory(Story):
    """A worker's `Coordinator` with fakes at its seams: engine, request table, members, streams and clock."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.tracked: dict[str, TrackedRequest] = {}
        self.exports: dict[str, tuple[str, Callable[[ExportProgress], None]]] = {}
        self.pauses: dict[str, asyncio.Future[PausedRequest | None]] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.links: list[Link] = []
        self.on_change: list[Callable[[], None]] = []
        self.description = InstanceDescription(*OWN, "a:1", "m", "", "simulated", BLOCK_TOKENS, 1000, 4096, 64, 512)
        clock = SimpleNamespace(now_s=lambda: world.now_ms / 1000)
        context: Any = SimpleNamespace(
            bind_host="",
            directory=self,
            runtime=SimpleNamespace(transport=None, clock=clock, entropy=SystemEntropy()),
            registry=CollectorRegistry(),
            server=SimpleNamespace(add=lambda *_: None),
            shutdown=None,
            tracer=NO_TRACES,
        )
        seams: Any = self
        self.coordinator = StoryCoordinator(seams, seams, context, Fence(), open_link=self.open_link, inquirer=seams)
        hello = migration_pb2.SourceHello(instance_id="d", incarnation_id="d.1", kv_address="d:2")
        self.connection = self.coordinator.incoming.connect(hello, lambda message: None)

    # the instance and its request table

    transfer_obstacle = ""

    @property
    def table(self) -> "LiveStory":
        return self

    def find(self, request_id: str) -> TrackedRequest | None:
        return self.tracked.get(request_id)

    def hand_off(self, request_id: str, *_: str) -> None:
        del self.tracked[request_id]
        self.changed()

    def give_up(self, request_id: str, reason: str) -> None:
        del self.tracked[request_id]
        self.changed()

    def import_obstacle(self, *_: Any) -> None:
        return None

    def take_over(self, request: EngineRequest, *_: Any, **__: Any) -> None:
        pass

    def changed(self) -> None:
        for callback in self.on_change:
            callback()

    # the engine

    kv_address, kv_block_bytes = "a:2", 1

    def export(
        self, request_id: str, migration_id: str, kv_token: str, on_progress: Callable[[ExportProgress], None]
    ) -> None:
        self.exports[migration_id] = (request_id, on_progress)
        self.tell_progress(migration_id)

    def tell_progress(self, migration_id: str) -> None:
        request_id, on_progress = self.exports[migration_id]
        request = self.world.requests.get(request_id)
        if request is not None and not request.is_paused:
            on_progress(ExportProgress(tuple(range(request.full_blocks)), request.emitted_tokens))

    async def pause(self, request_id: str) -> PausedRequest | None:
        self.pauses[request_id] = asyncio.get_running_loop().create_future()
        return await self.pauses[request_id]

    def resume(self, request_id: str) -> None:
        if (pausing := self.pauses.pop(request_id, None)) is not None and not pausing.done():
            pausing.set_result(None)
        self.world.requests[request_id].is_paused = False

    def withdraw(self, request_id: str, migration_id: str) -> None:
        del self.exports[migration_id]

    def release(self, request_id: str, migration_id: str) -> None:
        del self.exports[migration_id], self.world.requests[request_id]

    async def reserve(self, migration_id: str, request: EngineRequest) -> None:
        pass

    async def pull(self, *_: Any) -> None:
        arrived = asyncio.get_running_loop().create_future()
        self.world.at(self.world.now_ms + PULL_MS, lambda: arrived.done() or arrived.set_result(None))
        await arrived

    def activate(self, *_: Any) -> None:
        pass

    def discard(self, migration_id: str) -> None:
        pass

    # the members, the streams to them, and the scheduler

    def members(self, role: str) -> tuple[Member, ...]:
        facts = {"model": "m", "engine": "simulated", "block_tokens": str(BLOCK_TOKENS)}
        return tuple(Member("worker", *peer, f"{peer.instance_id}:1", "", facts) for peer in self.world.peers.values())

    def knows(self, role: str) -> bool:
        return True

    async def follow(self, role: str) -> None:
        pass

    def open_link(self, target_: Member, *_: Any) -> Any:
        self.links.append(Link(self, target_))
        return self.links[-1]

    async def ask(self, request: EngineRequest, *_: Any) -> DecodeChosen:
        chosen = asyncio.get_running_loop().create_future()
        self.world.at(self.world.now_ms + 0.5, lambda: chosen.set_result("b"))
        return DecodeChosen(request.request_id, await chosen)

    async def close(self) -> None:
        pass

    # what happens

    def admit(self, name: str, output_tokens: int, transfer_to: str | None) -> None:
        self.world.requests[name] = Request(name, output_tokens)
        request = EngineRequest(name, PROMPT, SamplingParams(max_tokens=output_tokens))
        self.tracked[name] = TrackedRequest(request, 1, "f", 0.0, None, [])
        if transfer_to is not None:
            self.coordinator.transfer(name, transfer_to)

    def order(self, name: str, target_: str) -> None:
        self.tasks.append(asyncio.create_task(self.coordinator.migrate(name, target_)))

    def step(self) -> None:
        _, ended = self.world.step()
        for migration_id in list(self.exports):
            self.tell_progress(migration_id)
        for name, tracked in self.tracked.items():
            if name in self.world.requests:
                tokens = self.world.requests[name].emitted_tokens
                tracked.emitted_token_ids[:] = range(tokens)
                tracked.started = tokens > 0
        for name in ended:
            del self.tracked[name]
        self.changed()
        for name, pausing in list(self.pauses.items()):
            request = self.world.requests.get(name)
            del self.pauses[name]
            if request is None:
                pausing.set_result(None)
                continue
            request.is_paused = True
            blocks = tuple(range(-(-request.kv_tokens // BLOCK_TOKENS)))
            pausing.set_result(PausedRequest(tuple(range(request.emitted_tokens)), request.kv_tokens, blocks))

    def tick(self) -> None:
        self.coordinator.tick()

    def lose(self, peer: str) -> None:
        self.world.peers = {name: own for name, own in self.world.peers.items() if name != peer}
        if peer == "d":
            self.coordinator.incoming.disconnect(self.connection)
        for link in self.links:
            if link.target.member_id == peer:
                link.is_lost.set()

    def receive(self, message: messages.ToTarget) -> None:
        if isinstance(message, messages.Offer):
            sent = wire.offer_message(message, "m", 0, "token")
        elif isinstance(message, messages.Abort):
            sent = wire.source_message(message, (), ())
        else:
            assert isinstance(message, (messages.Round, messages.FinalMessage))
            sent = wire.source_message(message, range(message.block_count), ())
        self.coordinator.incoming.receive(self.connection, sent)


class Link:
    """A stream to another worker."""

    def __init__(self, story: LiveStory, target_: Member) -> None:
        self.target, self._story, self.is_lost = target_, story, asyncio.Event()

    def send(self, message: migration_pb2.SourceMessage) -> None:
        said = wire.offer_of(message.offer) if message.HasField("offer") else wire.to_target(message)
        self._story.world.hear(self.target.member_id, said, self.answer)

    def answer(self, message: messages.ToSource) -> None:
        if not self.is_lost.is_set():
            self._story.coordinator.handle(wire.to_source(wire.target_message(message)))

    async def run(self) -> str:
        await self.is_lost.wait()
        return "lost"


class SimulatedStory(Story):
    """A `SimulatedCoordinator` with fakes at its seams: the modelled instance, links, events and cluster."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.open: dict[str, Any] = {}
        self.pausing: set[str] = set()
        self.order_ids = count(1)
        self.config = SimpleNamespace(  # of the instance and of the cluster
            block_tokens=BLOCK_TOKENS, block_bytes=1, limits=ManagerLimits(), tick_ms=TICK_MS
        )
        self.description = InstanceDescription(*OWN, "", "m", "", "simulated", BLOCK_TOKENS, 1000, 4096, 64, 512)
        seams: Any = self
        self.coordinator = SimulatedCoordinator(seams, seams)

    # the worker and its instance

    planned = "a step"
    """It is never between two steps: what is to pause does so at the end of the next."""

    @property
    def instance(self) -> "SimulatedStory":
        return self

    def look(self, now_ms: float) -> None:
        pass

    touch = watch = look

    def wake(self, *_: Any) -> None:
        pass

    def release(self, request_id: str) -> None:
        self.abort(request_id)

    def unwatch(self) -> None:
        pass

    def state_of(self, request_id: str) -> SequenceState:
        request = self.world.requests.get(request_id)
        if request is None:
            return SequenceState.ENDED
        if request.is_paused:
            return SequenceState.PAUSED
        return SequenceState.DECODE if request.emitted_tokens else SequenceState.PREFILL

    def generated_tokens(self, request_id: str) -> int:
        return self.world.requests[request_id].emitted_tokens

    def export(self, request_id: str) -> Any:
        request = self.world.requests[request_id]
        blocks = range(-(-request.kv_tokens // BLOCK_TOKENS))
        return SimpleNamespace(computed_tokens=request.kv_tokens, block_ids=tuple(blocks))

    def pause(self, request_id: str) -> None:
        self.world.requests[request_id].is_paused = True

    def resume(self, request_id: str) -> None:
        self.world.requests[request_id].is_paused = False

    def abort(self, request_id: str) -> None:
        self.world.requests.pop(request_id, None)
        self.open.pop(request_id, None)

    def admit_import(self, *_: Any) -> None:
        pass

    def extend_import(self, *_: Any) -> Any:
        return SimpleNamespace(block_ids=(1,))

    def complete_import(self, *_: Any) -> None:
        pass

    # the cluster

    now_ms = property(lambda self: self.world.now_ms)

    @property
    def events(self) -> "SimulatedStory":
        return self

    @property
    def links(self) -> "SimulatedStory":
        return self

    @property
    def ledger(self) -> "SimulatedStory":
        return self

    @property
    def peers(self) -> dict[str, Incarnation]:
        return self.world.peers

    def at(self, *_: Any) -> Any:
        return SimpleNamespace(cancel=lambda: None)  # ticks come from the story

    def transfer(self, source_: str, target_: str, size: int, arrived: Callable[[float], None], failed: Any) -> Any:
        transfer = SimpleNamespace(is_cancelled=False)
        self.world.at(self.world.now_ms + PULL_MS, lambda: transfer.is_cancelled or arrived(self.world.now_ms))
        return transfer

    def cancel(self, transfer: Any) -> None:
        transfer.is_cancelled = True

    def handed_off(self, *_: Any) -> bool:
        return True

    def send(self, source_: Incarnation, target_: Incarnation, message: messages.ToTarget, offered: Any) -> None:
        def answer(said: messages.ToSource) -> None:
            if target_.instance_id in self.world.peers:
                self.coordinator.hear_target(said)

        self.world.hear(target_.instance_id, message, answer)

    def answer(self, connection: str, message: messages.ToSource) -> None:
        pass

    def ask_decode(self, coordinator: Any, request_id: str) -> None:
        self.world.at(self.world.now_ms + 0.5, lambda: self.coordinator.handle(DecodeChosen(request_id, "b")))

    def ended(self, coordinator: Any, ended: MigrationEnded) -> None:
        pass

    def transfer_ended(self, ended: TransferEnded) -> None:
        pass

    def given_up(self, source_: Incarnation, request_id: str, emitted_tokens: int) -> None:
        pass

    # what happens

    def admit(self, name: str, output_tokens: int, transfer_to: str | None) -> None:
        self.world.requests[name] = Request(name, output_tokens)
        counted = CountedRequest(name, len(PROMPT), output_tokens)
        self.open[name] = SimpleNamespace(
            request=counted, owner=OWN, epoch=0, brought_tokens=0, came_from="", instance_id="a"
        )
        if transfer_to is not None:
            self.coordinator.handle(TransferOrdered(name, transfer_to))

    def order(self, name: str, target_: str) -> None:
        is_here = name in self.open
        decodes = is_here and self.coordinator.is_decoding(name)
        self.coordinator.handle(MoveOrdered(next(self.order_ids), name, target_, is_here, decodes))

    def step(self) -> None:
        began, ended = self.world.step()
        for name in ended:
            del self.open[name]
        started = tuple(SimpleNamespace(request_id=name) for name in began)
        result: Any = SimpleNamespace(finished=tuple(ended), started=started)
        self.coordinator.after_step(result)

    def tick(self) -> None:
        self.coordinator.handle(source.Tick())
        self.coordinator.handle_incoming(target.Tick())

    def lose(self, peer: str) -> None:
        lost = self.world.peers[peer]
        self.world.peers = {name: own for name, own in self.world.peers.items() if name != peer}
        self.coordinator.peer_lost(lost)

    def receive(self, message: messages.ToTarget) -> None:
        offered = CountedRequest("x1", len(PROMPT), 50)
        self.coordinator.hear_source(Incarnation("d", "d.1"), message, offered)


def plain(instruction: Any) -> Any:
    """Without the tokens, which only the live shell has, the names of connections, and what rounding does to times."""
    match instruction:
        case Do(migration_id, source.Send(messages.Offer() as offer)):
            bare = EngineRequest(offer.request.request_id, (), SamplingParams(max_tokens=1))
            return Do(migration_id, source.Send(replace(offer, request=bare, frontend_id="")))
        case Do(migration_id, source.Send(messages.FinalMessage() as final)):
            return Do(migration_id, source.Send(replace(final, emitted_token_ids=())))
        case target_manager.Do(migration_id, target.Reserve()):
            return (migration_id, "reserve")
        case target_manager.Answer(_, message):
            return message
        case target_manager.ArrivalEnded(duration_ms=duration_ms):
            return replace(instruction, duration_ms=round(duration_ms, 3))
        case MigrationEnded(outcome=outcome):
            times = [None if each is None else round(each, 3) for each in (outcome.paused_ms, outcome.duration_ms)]
            return replace(instruction, outcome=replace(outcome, paused_ms=times[0], duration_ms=times[1] or 0.0))
        case TransferEnded(since_first_token_ms=since_ms) if since_ms is not None:
            return replace(instruction, since_first_token_ms=round(since_ms, 3))
    return instruction


def in_order(log: list[tuple[float, str, Any]]) -> list[tuple[float, str, Any]]:
    """What concerns different requests at one moment may come in any order: engines tell of a step as they like."""
    return sorted(log, key=lambda entry: (entry[0], entry[1], repr(entry[2])))


async def test_instruction_logs_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[float, str, Any]] = []
    for manager in (SourceManager, TargetManager):

        def recorded(self: Any, event: Any, now_ms: float, handle: Any = manager.handle) -> tuple[Any, ...]:
            instructions: tuple[Any, ...] = handle(self, event, now_ms)
            self.validate()
            log.extend((round(now_ms, 3), type(self).__name__, plain(each)) for each in instructions)
            return instructions

        monkeypatch.setattr(manager, "handle", recorded)
    live = LiveStory(World())
    await live.tell()
    await live.coordinator._tasks.cancel()
    of_live, log = in_order(log), []
    await SimulatedStory(World()).tell()
    log = in_order(log)
    for number, (one, other) in enumerate(zip(log, of_live, strict=False)):
        assert one == other, f"instruction {number}"
    assert len(log) == len(of_live)
    said = [each for _, _, each in of_live]
    ends = [each.outcome.ending for each in said if isinstance(each, MigrationEnded)]
    assert set(ends) == set(Ending), "all ends occur"
    states = {each.outcome.state for each in said if isinstance(each, MigrationEnded)}
    assert states >= {source.SourceState.MOVED, source.SourceState.KEPT, source.SourceState.LOST, None}
    results = {each.result for each in said if isinstance(each, TransferEnded)}
    assert results == {TransferResult.MOVED, TransferResult.FAILED}
    assert sum(isinstance(each, (AskDecode, WakeAfter)) for each in said) == 2
    arrivals = [each.state for each in said if isinstance(each, target_manager.ArrivalEnded)]
    assert arrivals == [target.TargetState.COMMITTED, target.TargetState.DISCARDED]
