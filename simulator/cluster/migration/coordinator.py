"""What the migration managers of one instance say, done to a modelled instance."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from controlplane.model.incarnation import Incarnation
from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.protocols.migration import source, target, target_manager
from controlplane.protocols.migration.messages import FinalMessage, Offer, Round, ToSource, ToTarget
from controlplane.protocols.migration.source_events import (
    Abort,
    AskDecode,
    ConnectionLost,
    Do,
    Export,
    Exported,
    MigrationEnded,
    NotExported,
    PeersChanged,
    Progressed,
    RequestBegan,
    RequestGone,
    RequestPaused,
    SourceManagerEvent,
    SourceManagerInstruction,
    TransferEnded,
    WakeAfter,
    Withdraw,
)
from controlplane.protocols.migration.source_manager import SourceManager
from controlplane.protocols.migration.target_manager import TargetManager
from mesh.errors import RequestRefused
from simulator.cluster.config import MigrationConfig
from simulator.cluster.events import Event, EventQueue, Rank
from simulator.cluster.kv_links import KvLinks, Transfer
from simulator.cluster.ledger import Ledger, OpenRequest
from simulator.cluster.worker import Worker
from simulator.instance.counted_request import CountedRequest
from simulator.instance.sequence import SequenceState
from simulator.instance.step import StepResult

FRONTEND_ID = "simulated"


@dataclass(slots=True, eq=False)
class _Outgoing:
    request_id: str
    entry: OpenRequest
    target: Incarnation
    offered: CountedRequest
    """The request as it stood when the migration began."""
    brought_tokens: int
    """Generated tokens that it had when it was submitted here."""
    is_pausing: bool = False
    """A pause was asked for and has not happened."""
    is_watched: bool = False
    """Every step of the instance ends by itself for its sake."""


@dataclass(slots=True, eq=False)
class _Incoming:
    offer: Offer
    request: CountedRequest
    """What the offer stands for."""
    source: Incarnation
    computed_tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens whose KV is here once a pull is done, by first block and count."""
    transfer: Transfer | None = None


class MigratingCluster(Protocol):
    """The cluster as one of its coordinators knows it: `Migrations`."""

    config: MigrationConfig
    events: EventQueue
    links: KvLinks
    ledger: Ledger
    peers: Mapping[str, Incarnation]
    """Instances that are alive. A new mapping whenever that changes."""

    def send(self, source: Incarnation, target: Incarnation, message: ToTarget, offered: CountedRequest) -> None:
        """Send a message about the request `offered` to a target."""

    def answer(self, connection: str, message: ToSource) -> None:
        """Send a message to the source at the other end of a connection, see `connection_of`."""

    def ask_decode(self, coordinator: "SimulatedCoordinator", request_id: str) -> None:
        """Ask the scheduler who decodes a request; the answer comes as `DecodeChosen`."""

    def ended(self, coordinator: "SimulatedCoordinator", ended: MigrationEnded) -> None:
        """A migration from this instance has ended."""

    def transfer_ended(self, ended: TransferEnded) -> None:
        """It is known who decodes a request."""

    def given_up(self, source: Incarnation, request_id: str, emitted_tokens: int) -> None:
        """The source knows of nobody who owns the request."""


class SimulatedCoordinator:
    """One life of an instance: what `Coordinator` and `IncomingMigrations` are to a worker."""

    def __init__(self, worker: Worker, cluster: MigratingCluster) -> None:
        description, limits = worker.description, cluster.config.limits
        self.own = Incarnation(description.instance_id, description.incarnation_id)
        self.worker = worker
        self.source = SourceManager(self.own, description.block_tokens, limits)
        self.target = TargetManager(limits)
        self._cluster = cluster
        self._peers: object = None
        self._outgoing: dict[str, _Outgoing] = {}
        """By migration, as those below."""
        self._incoming: dict[str, _Incoming] = {}
        self._timer: Event | None = None
        self._is_alive = True

    # -- what happens

    def handle(self, event: SourceManagerEvent) -> None:
        """Tell the source's manager and carry out what it says."""
        self._look_around()
        for instruction in self.source.handle(event, self._now_ms):
            self._carry_out(instruction)
        self._watch_steps()
        self._wind_timer()

    def handle_incoming(self, event: target_manager.TargetManagerEvent) -> None:
        """Tell the target's manager and carry out what it says."""
        for instruction in self.target.handle(event, self._now_ms):
            match instruction:
                case target_manager.Answer(connection, message):
                    self._cluster.answer(connection, message)
                case target_manager.Do(migration_id, step):
                    self._do_incoming(self._incoming.get(migration_id), step)
                case target_manager.ArrivalEnded(migration_id):
                    del self._incoming[migration_id]
        self._wind_timer()

    def after_step(self, result: StepResult) -> None:
        """A step of the instance is over."""
        for request_id in result.finished:
            if self.source.knows(request_id):
                self.handle(RequestGone(request_id))
        for started in result.started:
            if self.source.knows(started.request_id):
                self.handle(RequestBegan(started.request_id))
        for migration_id, outgoing in list(self._outgoing.items()):
            if outgoing.is_pausing:
                self._pause_if_it_decodes(migration_id, outgoing)
            else:
                self._tell_progress(migration_id)

    def hear_target(self, message: ToSource) -> None:
        """A target has sent a message."""
        self._tell_progress(message.migration_id)
        self.handle(message)

    def hear_source(self, source_: Incarnation, message: ToTarget, offered: CountedRequest) -> None:
        """A source has sent a message about the request `offered`."""
        migration_id = message.migration_id
        if isinstance(message, Offer):
            self._incoming.setdefault(migration_id, _Incoming(message, offered, source_))
        incoming = self._incoming.get(migration_id)
        if incoming is not None and isinstance(message, (Round, FinalMessage)):
            stop_tokens = (message.first_block + message.block_count) * self.worker.instance.config.block_tokens
            computed = message.computed_tokens if isinstance(message, FinalMessage) else stop_tokens
            incoming.computed_tokens[message.first_block, message.block_count] = computed
        self.handle_incoming(target_manager.Received(connection_of(source_), message))
        if not self.target.is_running(migration_id):
            self._incoming.pop(migration_id, None)

    def peer_lost(self, peer: Incarnation) -> None:
        """Another instance has died, and with it what it was sending."""
        for migration_id, incoming in list(self._incoming.items()):
            if incoming.source == peer and incoming.transfer is not None:
                self._drop_transfer(incoming)
                self.handle_incoming(target_manager.Answered(migration_id, target.NotArrived("the source is gone")))
        self.handle_incoming(target_manager.ConnectionEnded(connection_of(peer)))
        for migration_id, outgoing in list(self._outgoing.items()):
            if outgoing.target == peer:
                self.handle(ConnectionLost(migration_id))

    def stop(self) -> None:
        """The instance has died."""
        self._is_alive = False
        if self._timer is not None:
            self._timer.cancel()
        for incoming in self._incoming.values():
            self._drop_transfer(incoming)

    def is_decoding(self, request_id: str) -> bool:
        """Whether the prompt of a request that runs here is computed."""
        if self.worker.instance.state_of(request_id) is SequenceState.ENDED:
            return False  # it waits for its prefix, and the instance has not heard of it
        entry = self._cluster.ledger.open[request_id]
        return bool(entry.came_from) or self.worker.instance.generated_tokens(request_id) > entry.brought_tokens

    @property
    def _now_ms(self) -> float:
        return self._cluster.events.now_ms

    def _look_around(self) -> None:
        if self._peers is not self._cluster.peers:
            self._peers = self._cluster.peers
            self.source.handle(PeersChanged(self._cluster.peers), self._now_ms)

    # -- requests that leave

    def _carry_out(self, instruction: SourceManagerInstruction) -> None:
        match instruction:
            case Export(migration_id, request_id, target_):
                self._export(migration_id, request_id, target_)
            case Do(migration_id, step):
                self._do(migration_id, self._outgoing[migration_id], step)
            case AskDecode(request_id):
                self._cluster.ask_decode(self, request_id)
            case MigrationEnded():
                outgoing = self._outgoing.pop(instruction.migration_id, None)
                if outgoing is not None and outgoing.is_watched:
                    self.worker.unwatch()
                self._cluster.ended(self, instruction)
            case TransferEnded():
                self._cluster.transfer_ended(instruction)
            case WakeAfter(delay_ms):
                self._after(delay_ms, lambda: self.handle(source.Tick()))
            case Withdraw() | Abort():
                pass  # nobody reads blocks but by a transfer, and no client leaves

    def _export(self, migration_id: str, request_id: str, target_: Incarnation) -> None:
        entry, instance = self._cluster.ledger.open.get(request_id), self.worker.instance
        self.worker.look(self._now_ms)
        if entry is None or entry.owner != self.own or instance.state_of(request_id) is SequenceState.ENDED:
            self.handle(NotExported(migration_id, f"request {request_id} does not run on {self.own.instance_id}"))
            return
        offered = replace(entry.request, emitted_tokens=instance.generated_tokens(request_id))
        self._outgoing[migration_id] = _Outgoing(request_id, entry, target_, offered, entry.brought_tokens)
        full_blocks, emitted_tokens = self._progress(self._outgoing[migration_id])
        self.handle(
            Exported(
                migration_id,
                # Only lengths are simulated: both ends know the request by its id.
                EngineRequest(request_id, (), SamplingParams(max_tokens=entry.request.output_tokens)),
                entry.epoch,
                FRONTEND_ID,
                entry.request.prompt_tokens + entry.brought_tokens,
                full_blocks,
                emitted_tokens,
            )
        )

    def _do(self, migration_id: str, outgoing: _Outgoing, step: source.SourceInstruction) -> None:
        instance, request_id = self.worker.instance, outgoing.request_id
        match step:
            case source.Send(message):
                self._cluster.send(self.own, outgoing.target, message, outgoing.offered)
            case source.Pause():
                outgoing.is_pausing = True
                if instance.planned is None:
                    self._pause_if_it_decodes(migration_id, outgoing)
            case source.Resume():
                outgoing.is_pausing = False
                if instance.state_of(request_id) is SequenceState.PAUSED:
                    self._change(lambda: instance.resume(request_id))
            case source.Release():
                self._change(lambda: self.worker.release(request_id))
            case source.GiveUp():
                emitted_tokens = instance.generated_tokens(request_id)
                self._change(lambda: self.worker.release(request_id))
                self._cluster.given_up(self.own, request_id, emitted_tokens)

    def _pause_if_it_decodes(self, migration_id: str, outgoing: _Outgoing) -> None:
        """A preempted request is paused once it decodes again, as in the live engine."""
        instance, request_id = self.worker.instance, outgoing.request_id
        if instance.state_of(request_id) is not SequenceState.DECODE:
            return
        self._change(lambda: instance.pause(request_id))
        outgoing.is_pausing = False
        exported = instance.export(request_id)
        self.handle(
            RequestPaused(migration_id, (), exported.computed_tokens, len(exported.block_ids), since_ms=self._now_ms)
        )

    def _tell_progress(self, migration_id: str) -> None:
        outgoing = self._outgoing.get(migration_id)
        if outgoing is None:
            return
        self.worker.look(self._now_ms)
        if self.worker.instance.state_of(outgoing.request_id) not in (SequenceState.PAUSED, SequenceState.ENDED):
            self.handle(Progressed(migration_id, *self._progress(outgoing)))

    def _progress(self, outgoing: _Outgoing) -> tuple[int, int]:
        """Full blocks, and tokens emitted here."""
        instance = self.worker.instance
        full_blocks = instance.export(outgoing.request_id).computed_tokens // instance.config.block_tokens
        return full_blocks, instance.generated_tokens(outgoing.request_id) - outgoing.brought_tokens

    def _watch_steps(self) -> None:
        """Between two steps nothing happens here, unless a migration waits for the next one."""
        for migration_id, outgoing in list(self._outgoing.items()):
            watches = outgoing.is_pausing or self.source.awaits_step(migration_id)
            if watches and not outgoing.is_watched:
                self.worker.watch(self._now_ms)
            elif outgoing.is_watched and not watches:
                self.worker.unwatch()
            outgoing.is_watched = watches

    # -- requests that come

    def _do_incoming(self, incoming: _Incoming | None, step: target.TargetInstruction) -> None:
        assert incoming is not None, f"{step} for a migration that has ended"
        match step:
            case target.Reserve():
                self._reserve(incoming)
            case target.Pull(first_block, block_count):
                self._pull(incoming, first_block, block_count)
            case target.Activate(_, computed_tokens):
                self._activate(incoming, computed_tokens)
            case target.Discard():
                self._drop_transfer(incoming)
                self._change(lambda: self.worker.instance.abort(incoming.request.request_id))

    def _reserve(self, incoming: _Incoming) -> None:
        migration_id = incoming.offer.migration_id
        self.worker.touch(self._now_ms)
        try:
            self.worker.instance.admit_import(incoming.request, 0)
        except RequestRefused as error:
            self.handle_incoming(target_manager.Answered(migration_id, target.NotReserved(str(error))))
            return
        self.worker.wake(self._now_ms)
        self.handle_incoming(target_manager.Answered(migration_id, target.Reserved()))

    def _pull(self, incoming: _Incoming, first_block: int, block_count: int) -> None:
        """Blocks that the prefix cache has here are not pulled."""
        migration_id, instance = incoming.offer.migration_id, self.worker.instance
        self.worker.touch(self._now_ms)

        def arrived(_: float) -> None:
            incoming.transfer = None
            self.handle_incoming(target_manager.Answered(migration_id, target.Arrived(first_block, block_count)))

        def failed(_: float, reason: str) -> None:
            incoming.transfer = None
            self.handle_incoming(target_manager.Answered(migration_id, target.NotArrived(reason)))

        try:
            computed_tokens = incoming.computed_tokens[first_block, block_count]
            wanted = instance.extend_import(incoming.request.request_id, computed_tokens)
        except RequestRefused as error:
            failed(self._now_ms, str(error))
            return
        self.worker.wake(self._now_ms)
        if not wanted.block_ids:
            arrived(self._now_ms)
            return
        size_bytes = len(wanted.block_ids) * instance.config.block_bytes
        incoming.transfer = self._cluster.links.transfer(
            incoming.source.instance_id, self.own.instance_id, size_bytes, arrived, failed
        )

    def _activate(self, incoming: _Incoming, computed_tokens: int) -> None:
        request, instance = incoming.request, self.worker.instance
        emitted_tokens = computed_tokens + 1 - request.prompt_tokens
        self.worker.touch(self._now_ms)
        if self._cluster.ledger.handed_off(request.request_id, self.own, incoming.offer.epoch, emitted_tokens):
            instance.complete_import(request.request_id, computed_tokens + 1)
            self.worker.wake(self._now_ms, request.request_id)
        else:
            # Recovered elsewhere meanwhile: the frontend does not want this life of the request.
            instance.abort(request.request_id)
            self.worker.wake(self._now_ms)

    def _drop_transfer(self, incoming: _Incoming) -> None:
        if incoming.transfer is not None:
            self._cluster.links.cancel(incoming.transfer)
            incoming.transfer = None

    # -- time

    def _change(self, act: Callable[[], object]) -> None:
        self.worker.touch(self._now_ms)
        act()
        self.worker.wake(self._now_ms)

    def _after(self, delay_ms: float, act: Callable[[], None]) -> Event:
        def happen(_: float) -> None:
            if self._is_alive:
                act()

        return self._cluster.events.at(self._now_ms + delay_ms, Rank.MESSAGE, happen)

    def _wind_timer(self) -> None:
        def tick() -> None:
            self._timer = None
            self.handle(source.Tick())
            self.handle_incoming(target.Tick())

        if self._timer is None and self._is_alive and (self.source.is_busy or self.target.running):
            self._timer = self._after(self._cluster.config.tick_ms, tick)


def connection_of(source_: Incarnation) -> str:
    """The name of the only way from one life of an instance to any other."""
    return ".".join(source_)
