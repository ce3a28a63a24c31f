"""Requests that leave this worker: carries out what `SourceManager` says, and puts together all that moves requests."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import TypeAlias

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.migration.drain import (
    AskLoads,
    Drain,
    Drained,
    DrainEvent,
    LoadsKnown,
    LookAfter,
    Looked,
    Move,
    MoveEnded,
)
from controlplane.protocols.migration.messages import FinalMessage, Offer, Round, ToTarget
from controlplane.protocols.migration.source import (
    GiveUp,
    Pause,
    Release,
    Resume,
    Send,
    SourceInstruction,
    SourceState,
    Tick,
)
from controlplane.protocols.migration.source_events import (
    Abort,
    AbortAsked,
    AdoptionAsked,
    AskDecode,
    ConnectionLost,
    Do,
    Export,
    Exported,
    MigrationEnded,
    MigrationOutcome,
    MoveOrdered,
    MoveWithdrawn,
    NotExported,
    ObstacleChanged,
    PauseFailed,
    PeersChanged,
    Progressed,
    RequestBegan,
    RequestGone,
    RequestPaused,
    SourceManagerEvent,
    SourceManagerInstruction,
    Stopped,
    TransferEnded,
    TransferOrdered,
    TransferResult,
    WakeAfter,
    Withdraw,
)
from controlplane.protocols.migration.source_manager import SourceManager
from engine_worker.coordinator import wire
from engine_worker.coordinator.decode_inquirer import DecodeInquirer
from engine_worker.coordinator.incoming import IncomingMigrations
from engine_worker.coordinator.link import TargetLink
from engine_worker.coordinator.loads import ready_loads
from engine_worker.coordinator.metrics import MigrationMetrics
from engine_worker.coordinator.outgoing import OutgoingRequest, WatchedRequest
from engine_worker.coordinator.peers import Peers
from engine_worker.coordinator.service import MigrationService
from engine_worker.engines.movable import ExportProgress, MovableEngine
from engine_worker.instance import Instance
from engine_worker.kv.addresses import reachable_address
from engine_worker.kv.tokens import new_token
from engine_worker.request_table import TrackedRequest
from mesh.errors import PenstockError
from mesh.exit_status import ExitStatus
from mesh.invariants import invariants
from mesh.leadership_state import Fence
from mesh.membership import Member
from mesh.role import RoleContext
from mesh.tasks import TaskSet
from penstock.v1 import migration_pb2, migration_pb2_grpc

log = logging.getLogger(__name__)

LinkKey: TypeAlias = tuple[str, str, str, str, str]
"""Instance, incarnation and address of the target, and the addresses that it was told of this worker and of its KV
transfer agent."""


class Coordinator:
    """Moves requests to other workers and takes theirs (`incoming`); serves `penstock.v1.Migration`.

    What is decided is decided by `SourceManager`, `TargetManager` and `Drain`; here is what it takes to do it: the
    engine, the request table, streams to other workers, the scheduler. On one event loop.
    """

    def __init__(
        self,
        instance: Instance,
        engine: MovableEngine,
        context: RoleContext,
        fence: Fence,
        *,
        open_link: Callable[..., TargetLink] = TargetLink,
        inquirer: DecodeInquirer | None = None,
    ) -> None:
        """`fence` knows the leaders whose answers are taken. `open_link` and `inquirer` are seams for tests."""
        own = instance.description
        self.manager = SourceManager(Incarnation(own.instance_id, own.incarnation_id), own.block_tokens)
        self._instance, self._engine = instance, engine
        self._bind_host = context.bind_host
        self.peers = Peers(instance, context.directory)
        self._transport = context.runtime.transport
        self._clock, self._entropy = context.runtime.clock, context.runtime.entropy
        self._shutdown, self._tracer = context.shutdown, context.tracer
        self._metrics = MigrationMetrics(context.registry)
        self._tasks = TaskSet("coordinator")
        self.incoming = IncomingMigrations(instance, engine, self._metrics, self._tasks, self._clock.now_s)
        self._inquirer = inquirer or DecodeInquirer(context.directory, self._transport, fence)
        self._open_link = open_link
        self._watched: dict[str, WatchedRequest] = {}  # by request
        self._outgoing: dict[str, OutgoingRequest] = {}  # by migration
        self._links: dict[LinkKey, TargetLink] = {}
        self._order_ids = count(1)
        self._outcomes: dict[int, asyncio.Future[MigrationOutcome]] = {}  # by the order that somebody waits for
        self._told_peers: dict[str, Incarnation] = {}
        self._obstacle = ""
        self._all_ended = asyncio.Event()
        self._evacuation: asyncio.Task[None] | None = None
        self._is_leaving = False
        instance.on_change.append(self._look)
        instance.keep_abort = self._keep_abort
        instance.may_adopt = self._may_adopt
        instance.supersede = self._supersede
        context.server.add(
            migration_pb2_grpc.add_MigrationServicer_to_server,
            MigrationService(instance, self.incoming),
            "penstock.v1.Migration",
        )

    # -- what is asked for

    async def migrate(self, request_id: str, target_id: str, *, stop_and_copy: bool = False) -> MigrationOutcome:
        """Move a running request; returns when it has moved, or why it stays. A caller that gives up withdraws it."""
        await self.peers.known()
        self._look_around()
        tracked = self._instance.table.find(request_id)
        is_here = tracked is not None and tracked.state == "running"
        is_decoding = tracked is not None and (tracked.started or tracked.taken_over)
        if tracked is not None and is_here:
            self._watched[request_id] = WatchedRequest(tracked)
        order_id = next(self._order_ids)
        outcome: asyncio.Future[MigrationOutcome] = asyncio.get_running_loop().create_future()
        self._outcomes[order_id] = outcome
        try:
            self.handle(MoveOrdered(order_id, request_id, target_id, is_here, is_decoding, stop_and_copy))
            return await outcome
        except asyncio.CancelledError:
            self.handle(MoveWithdrawn(order_id))
            raise
        finally:
            del self._outcomes[order_id]

    def transfer(self, request_id: str, target_id: str) -> None:
        """The request, just admitted, is to be decoded by another instance once its prompt is computed. By which, the
        scheduler is asked after the first token if no `target_id` is named. One that was refused here stays away."""
        if self.peers.are_known:
            self._order_transfer(request_id, target_id)
        else:
            self._tasks.spawn(self._transfer_among_peers(request_id, target_id), name=f"transfer {request_id}")

    def _order_transfer(self, request_id: str, target_id: str) -> None:
        tracked = self._instance.table.find(request_id)
        if tracked is not None:
            self._look_around()
            self._watched[request_id] = WatchedRequest(tracked)
            self.handle(TransferOrdered(request_id, target_id))
        elif target_id:
            self._note_transfer(TransferEnded(request_id, target_id, TransferResult.SKIPPED, "it ended at once"))

    def evacuate(self) -> None:
        """Begin to move all requests of a draining instance away, unless that goes on already."""
        if self._evacuation is None or self._evacuation.done():
            self._evacuation = self._tasks.spawn(self._evacuate(), name="evacuate")

    def leave(self) -> None:
        """Move all requests away, then end the process. Once is enough, more is no harm."""
        if not self._is_leaving:
            self._is_leaving = True
            self.evacuate()
            self._tasks.spawn(self._leave(), name="leave")

    def tick(self) -> None:
        """Time has passed; call it every 50 ms or so."""
        self._look_around()
        self.handle(Tick())
        self.incoming.tick()

    async def stop(self) -> None:
        """Take no more orders; what is under way is cancelled, what is paused gets a moment to be settled."""
        self.handle(Stopped())
        self.incoming.handle(Stopped())
        if self._outgoing:
            self._all_ended.clear()
            try:
                async with asyncio.timeout(self.manager.limits.live.verdict_ms / 1000):
                    await self._all_ended.wait()
            except TimeoutError:
                log.warning("migrations were not settled in time", extra={"migrations": len(self._outgoing)})
        await self._inquirer.close()
        await self._tasks.cancel()

    @invariants
    def validate(self) -> None:
        """Check what must hold between two events. Raises `InvariantBroken`."""
        self.manager.validate()
        self.incoming.manager.validate()
        assert set(self._outgoing) == set(self.manager.migration_ids), "engine and manager disagree on what is copied"

    # -- what happens

    def handle(self, event: SourceManagerEvent) -> None:
        """Tell the manager and carry out what it says, all of it, however one instruction goes."""
        failure: Exception | None = None
        for instruction in self.manager.handle(event, self._now_ms):
            try:
                self._carry_out(instruction)
            # Others wait for what is behind it: it is raised once all is done.
            except Exception as error:  # noqa: BLE001
                failure = failure or error
        if failure is not None:
            raise failure

    @property
    def _now_ms(self) -> float:
        return 1000 * self._clock.now_s()

    def _look_around(self) -> None:
        """Tell of what has changed outside of this worker."""
        peers = self.peers.incarnations()
        if peers != self._told_peers:
            self._told_peers = peers
            self.handle(PeersChanged(peers))
        if self._instance.transfer_obstacle != self._obstacle:
            self._obstacle = self._instance.transfer_obstacle
            self.handle(ObstacleChanged(self._obstacle))
            self.incoming.handle(ObstacleChanged(self._obstacle))

    def _look(self) -> None:
        """A step is over and its tokens are on their way to the frontends, or the request table has changed."""
        for request_id in [each for each in self._watched if not self.manager.knows(each)]:
            del self._watched[request_id]
        for request_id, watched in list(self._watched.items()):
            if self._instance.table.find(request_id) is not watched.tracked:
                self.handle(RequestGone(request_id))
            elif watched.tracked.started and not watched.began_is_told:
                watched.began_is_told = True
                self.handle(RequestBegan(request_id))
        for outgoing in list(self._outgoing.values()):
            self._look_at(outgoing)

    def _look_at(self, outgoing: OutgoingRequest) -> None:
        if self._instance.table.find(outgoing.request_id) is not outgoing.tracked:
            return
        progress, paused = outgoing.take_progress(), outgoing.paused
        if progress is not None:
            self.handle(Progressed(outgoing.migration_id, *progress))
        if paused is None or outgoing.pause_is_told:
            return
        if len(outgoing.tracked.emitted_token_ids) >= len(paused.emitted_token_ids):
            outgoing.pause_is_told = True
            outgoing.block_ids = paused.block_ids
            self.handle(
                RequestPaused(
                    outgoing.migration_id,
                    paused.emitted_token_ids,
                    paused.computed_tokens,
                    len(paused.block_ids),
                    outgoing.paused_ms,
                )
            )

    def _keep_abort(self, request_id: str) -> bool:
        waits = self.manager.is_paused(request_id)
        self.handle(AbortAsked(request_id))
        return waits

    def _may_adopt(self, request_id: str) -> bool:
        self.handle(AdoptionAsked(request_id))
        return not self.manager.is_paused(request_id)

    def _supersede(self, request_id: str, epoch: int) -> bool:
        return self.incoming.supersede(request_id, epoch) or self.manager.moved_lately(request_id)

    # -- what is done about it

    def _carry_out(self, instruction: SourceManagerInstruction) -> None:
        match instruction:
            case Export(migration_id, request_id, target):
                self._export(migration_id, request_id, target)
            case Withdraw(migration_id, request_id):
                self._engine.withdraw(request_id, migration_id)
            case Do(migration_id, step):
                self._do(self._outgoing[migration_id], step)
            case Abort(request_id):
                self._engine.abort(request_id)
            case AskDecode(request_id):
                self._tasks.spawn(self._ask_decode(self._watched[request_id].tracked), name=f"ask {request_id}")
            case WakeAfter(delay_ms):
                self._tasks.spawn(self._wake(delay_ms / 1000), name="wake")
            case MigrationEnded():
                self._note_migration(instruction)
            case TransferEnded():
                self._note_transfer(instruction)

    def _export(self, migration_id: str, request_id: str, target: Incarnation) -> None:
        tracked = self._watched[request_id].tracked
        member = next((each for each in self.peers.present() if (each.member_id, each.incarnation_id) == target), None)
        if member is None:
            self.handle(NotExported(migration_id, f"{target.instance_id} left before the migration had its turn"))
            return
        try:
            span = self._tracer.child("move", tracked.request.traceparent)
            outgoing = OutgoingRequest(migration_id, tracked, self._link(member), span, new_token(self._entropy))
            self._outgoing[migration_id] = outgoing
            token = outgoing.kv_token
            self._engine.export(request_id, migration_id, token, lambda progress: self._on_progress(outgoing, progress))
        except Exception as error:
            if not isinstance(error, PenstockError):
                log.exception("a request could not be exported", extra={"request_id": request_id})
            self._outgoing.pop(migration_id, None)
            self.handle(NotExported(migration_id, str(error) or repr(error)))
            return
        full_blocks, emitted_tokens = outgoing.take_progress() or (0, 0)
        submitted, emitted = tracked.request, tuple(tracked.emitted_token_ids)
        self.handle(
            Exported(
                migration_id,
                replace(submitted, emitted_token_ids=emitted),
                tracked.epoch,
                tracked.frontend_id,
                len(submitted.prompt_token_ids) + len(submitted.emitted_token_ids),
                full_blocks,
                emitted_tokens,
            )
        )
        outgoing.is_exported = True
        self._look_at(outgoing)

    def _on_progress(self, outgoing: OutgoingRequest, progress: ExportProgress) -> None:
        outgoing.progress = progress
        if outgoing.is_exported:
            self._look_at(outgoing)  # a step of a prefill has no output that would be heard of

    def _do(self, outgoing: OutgoingRequest, step: SourceInstruction) -> None:
        request_id, migration_id, target = outgoing.request_id, outgoing.migration_id, outgoing.link.target
        match step:
            case Send(message):
                outgoing.link.send(self._wire_message(outgoing, message))
            case Pause():
                self._tasks.spawn(self._pause(outgoing), name=f"pause {migration_id}")
            case Resume():
                self._engine.resume(request_id)
            case Release():
                self._engine.release(request_id, migration_id)
                self._instance.hand_off(request_id, target.member_id, target.incarnation_id)
            case GiveUp(reason):
                self._engine.release(request_id, migration_id)
                self._instance.give_up(request_id, reason)

    async def _pause(self, outgoing: OutgoingRequest) -> None:
        try:
            paused = await self._engine.pause(outgoing.request_id)
        except Exception as error:
            log.exception("the engine could not pause a request", extra={"request_id": outgoing.request_id})
            self.handle(PauseFailed(outgoing.migration_id, f"the engine could not pause it: {error!r}"))
            return
        if outgoing.migration_id not in self._outgoing:
            return
        if paused is None:
            self.handle(RequestGone(outgoing.request_id))
            return
        outgoing.paused, outgoing.paused_ms = paused, self._now_ms
        self._look_at(outgoing)

    def _wire_message(self, outgoing: OutgoingRequest, message: ToTarget) -> migration_pb2.SourceMessage:
        description, tracked = self._instance.description, outgoing.tracked
        if isinstance(message, Offer):
            left_ms = tracked.left_ms(self._clock.now_s())
            return wire.offer_message(message, description.model, left_ms, outgoing.kv_token, *tracked.predicted_ends)
        if not isinstance(message, (Round, FinalMessage)):
            return wire.source_message(message, (), ())
        stop = message.first_block + message.block_count
        covered = stop * description.block_tokens - len(tracked.request.prompt_token_ids)
        emitted = tracked.emitted_token_ids[: max(0, covered)]
        return wire.source_message(message, outgoing.block_ids[message.first_block : stop], emitted)

    def _note_migration(self, ended: MigrationEnded) -> None:
        waiting, outcome = self._outcomes.get(ended.order_id or 0), ended.outcome
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)
        outgoing = self._outgoing.pop(ended.migration_id, None)
        if outgoing is not None:
            outgoing.end_span(outcome)
        if not self._outgoing:
            self._all_ended.set()
        if outcome.state is None:
            return
        blocks = outcome.blocks if outcome.moved else 0
        kv_bytes = blocks * self._engine.kv_block_bytes
        self._metrics.ended("out", outcome.state.value, blocks, kv_bytes, outcome.duration_ms / 1000)
        if outcome.paused_ms is not None:
            self._metrics.paused(outcome.paused_ms / 1000)
        level = logging.ERROR if outcome.state is SourceState.LOST else logging.INFO
        log.log(level, "a migration ended", extra={"request_id": ended.request_id, "story": outcome.story})

    def _note_transfer(self, ended: TransferEnded) -> None:
        self._metrics.transfers.labels(ended.result.value).inc()
        if ended.result is TransferResult.MOVED and ended.since_first_token_ms is not None:
            self._metrics.transfer_seconds.observe(ended.since_first_token_ms / 1000)
        elif ended.result is TransferResult.FAILED:
            extra = {"request_id": ended.request_id, "target": ended.target_id, "reason": ended.reason}
            log.warning("a request is decoded where it was prefilled, though not meant to be", extra=extra)

    # -- what takes time

    async def _ask_decode(self, tracked: TrackedRequest) -> None:
        chosen = await self._inquirer.ask(tracked.request, self._instance.description)
        if self._instance.table.find(tracked.request.request_id) is tracked:
            self._look_around()
            self.handle(chosen)

    async def _transfer_among_peers(self, request_id: str, target_id: str) -> None:
        await self.peers.known()
        self._order_transfer(request_id, target_id)

    async def _wake(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self.handle(Tick())

    async def _evacuate(self) -> None:
        drain, is_over = Drain(), False
        events: list[DrainEvent] = [self._looked()]
        while not is_over:
            instructions = drain.handle(events.pop(0))
            if moves := [each for each in instructions if isinstance(each, Move)]:
                events += await asyncio.gather(*(self._move_away(move) for move in moves))
            for instruction in instructions:
                match instruction:
                    case AskLoads():
                        events.append(LoadsKnown(await ready_loads(self._transport, await self.peers.known())))
                    case LookAfter(delay_ms):
                        await asyncio.sleep(delay_ms / 1000)
                        events.append(self._looked())
                    case Drained(moved):
                        is_over = True
                        log.info("moved the running requests away", extra={"moved": moved})

    def _looked(self) -> Looked:
        live = self._instance.table.live()
        running = tuple(each.request.request_id for each in live if each.state == "running")
        return Looked(running, frozenset(each for each in running if self.manager.is_ordered(each)))

    async def _move_away(self, move: Move) -> MoveEnded:
        outcome = await self.migrate(move.request_id, move.target_id)
        if not outcome.moved:
            extra = {"request_id": move.request_id, "target": move.target_id, "reason": outcome.reason}
            log.warning("a request could not be moved away", extra=extra)
        return MoveEnded(move.request_id, outcome.moved)

    async def _leave(self) -> None:
        await self._instance.drained()
        self._shutdown.ask(ExitStatus.DRAINED)

    def _link(self, target: Member) -> TargetLink:
        """The stream to this incarnation of the target, opened if there is none between the addresses of now."""
        own = self._instance.description
        kv_address = reachable_address(self._engine.kv_address, self._bind_host, own.address)
        key = (target.member_id, target.incarnation_id, target.address, own.address, kv_address)
        link = self._links.get(key)
        if link is None:
            hello = wire.source_hello(own.instance_id, own.incarnation_id, kv_address)
            link = self._open_link(target, hello, lambda message: self.handle(wire.to_source(message)), self._transport)
            self._links[key] = link
            self._tasks.spawn(self._run_link(key, link), name=f"link {target.member_id}")
        return link

    async def _run_link(self, key: LinkKey, link: TargetLink) -> None:
        try:
            reason = await link.run()
            log.info("a migration stream ended", extra={"instance_id": link.target.member_id, "reason": reason})
        finally:
            del self._links[key]
            for outgoing in list(self._outgoing.values()):
                if outgoing.link is link:
                    self.handle(ConnectionLost(outgoing.migration_id))
