"""All migrations of a cluster: their start, their bounds, and the messages between both ends."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from controlplane.model.incarnation import Incarnation
from controlplane.model.migration_order import MigrationOrder
from controlplane.protocols.migration.limits import MigrationLimits
from controlplane.protocols.migration.messages import Failed, Offer, Refuse, ToSource, ToTarget
from controlplane.protocols.migration.source import SourceState, TargetLost
from simulator.cluster.config import MigrationConfig
from simulator.cluster.events import EventQueue, Rank
from simulator.cluster.kv_links import KvLinks
from simulator.cluster.ledger import Ledger
from simulator.cluster.migration.incoming import Incoming
from simulator.cluster.migration.outgoing import Outgoing
from simulator.cluster.worker import Worker

REMEMBER_MS = 10_000.0
"""How long a target knows how a migration ended: many times as long as a source asks."""
WITHDRAWN = "the request ended, or an instance left, before the migration had its turn"


@dataclass(frozen=True, slots=True)
class MigrationEnd:
    """How a migration ended, for whoever ordered it."""

    order: MigrationOrder
    moved: bool
    reason: str
    """Why it did not; empty where it did."""
    ordered_ms: float
    ended_ms: float
    refused: bool = False
    """The target would not take it now; it may later."""
    rounds: int = 0
    blocks: int = 0
    """Of the request's KV, whether copied or found in the target's prefix cache; 0 unless it moved."""
    paused_ms: float = 0.0
    """How long the request stood still at its source."""


@dataclass(frozen=True, slots=True)
class _Queued:
    order: MigrationOrder
    limits: MigrationLimits
    ended: Callable[[MigrationEnd], None]
    ordered_ms: float


class MigrationOffice:
    """Every instance leads so many migrations at once in each direction; orders beyond that wait at the source, offers
    beyond that are refused by the target."""

    def __init__(
        self,
        config: MigrationConfig,
        events: EventQueue,
        links: KvLinks,
        ledger: Ledger,
        workers: Mapping[str, Worker],
        recover: Callable[[str, int, float], None],
    ) -> None:
        """`recover` is told the id of a request that its source has given up, and its emitted tokens."""
        self.config = config
        self.events = events
        self.links = links
        self.ledger = ledger
        self._workers = workers
        self._recover = recover
        self._numbers = count(1)
        self._outgoing: dict[str, Outgoing] = {}
        """By migration id."""
        self._leaving: dict[str, list[Outgoing]] = {}
        """By source."""
        self._incoming: dict[str, Incoming] = {}
        self._coming: dict[str, int] = {}
        """Migrations under way to each target."""
        self._queued: dict[str, deque[_Queued]] = {}
        """By source."""
        self._ends: dict[str, _Queued] = {}
        self._ordered: set[str] = set()
        """Requests for which a migration waits or is under way."""

    def moves(self, request_id: str) -> bool:
        """Whether a migration of the request waits or is under way."""
        return request_id in self._ordered

    def order(
        self,
        order: MigrationOrder,
        ended: Callable[[MigrationEnd], None],
        limits: MigrationLimits | None = None,
    ) -> None:
        """Move a running request as soon as its source has a turn; `ended` is called once, at once where it cannot
        even be queued."""
        queued = _Queued(order, limits or self.config.limits, ended, self.events.now_ms)
        obstacle = self._obstacle(order)
        if obstacle:
            ended(MigrationEnd(order, False, obstacle, queued.ordered_ms, self.events.now_ms))
            return
        self._ordered.add(order.request_id)
        self._queued.setdefault(order.source_instance_id, deque()).append(queued)
        self._start_queued(order.source_instance_id)

    def after_step(self, worker: Worker, now_ms: float) -> None:
        """A step of an instance is over."""
        source_id = worker.description.instance_id
        for outgoing in tuple(self._leaving.get(source_id, ())):
            outgoing.after_step(now_ms)
        if self._queued.get(source_id):
            self._start_queued(source_id)

    def instance_lost(self, lost: Incarnation, now_ms: float) -> None:
        """An instance has died; its workers are gone from the mapping already."""
        for queued in self._queued.pop(lost.instance_id, ()):
            self._report(queued, WITHDRAWN)
        for outgoing in self._leaving.pop(lost.instance_id, []):
            outgoing.give_in()
            del self._outgoing[outgoing.migration_id]
            self._report(self._ends.pop(outgoing.migration_id), "the source is gone")
        for migration_id, incoming in list(self._incoming.items()):
            if incoming.worker.description.instance_id == lost.instance_id:
                incoming.give_in()
                del self._incoming[migration_id]
            elif incoming.source == lost and not incoming.is_over:
                incoming.source_lost(now_ms)
        self._coming.pop(lost.instance_id, None)
        for outgoing in list(self._outgoing.values()):
            if outgoing.target == lost:
                outgoing.handle(TargetLost(), now_ms)

    # -- what both ends of a migration ask for

    def send_to_target(self, outgoing: Outgoing, message: ToTarget) -> None:
        """Over the network, to the incarnation that the migration is about."""
        self._later(lambda now_ms: self._to_target(outgoing, message, now_ms))

    def send_to_source(self, incoming: Incoming, message: ToSource) -> None:
        """The same in the other direction."""
        self._later(lambda now_ms: self._to_source(message, now_ms))

    def source_ended(self, outgoing: Outgoing, now_ms: float) -> None:
        """Its state is final."""
        source_id, machine = outgoing.order.source_instance_id, outgoing.machine
        del self._outgoing[outgoing.migration_id]
        self._leaving[source_id].remove(outgoing)
        moved = machine.state is SourceState.MOVED
        self._report(
            self._ends.pop(outgoing.migration_id),
            "" if moved else machine.reason or machine.state.value,
            refused=outgoing.refused,
            rounds=machine.rounds,
            blocks=outgoing.blocks if moved else 0,
            paused_ms=0.0 if outgoing.paused_at_ms is None else now_ms - outgoing.paused_at_ms,
        )
        self._start_queued(source_id)

    def target_ended(self, incoming: Incoming, now_ms: float) -> None:
        """Its state is final; it is remembered for a while."""
        target_id, migration_id = incoming.worker.description.instance_id, incoming.offer.migration_id
        self._coming[target_id] -= 1

        def forget(_: float) -> None:
            self._incoming.pop(migration_id, None)

        self.events.at(now_ms + REMEMBER_MS, Rank.MESSAGE, forget, background=True)

    def given_up(self, outgoing: Outgoing, emitted_tokens: int, reason: str, now_ms: float) -> None:
        """The source knows of nobody who owns the request: it is recovered, unless it has ended or its new owner was
        heard of meanwhile. As at the frontend, the word of a former owner counts for nothing."""
        entry = self.ledger.open.get(outgoing.order.request_id)
        owner = None if entry is None else entry.owner
        if owner is not None and owner.instance_id == outgoing.order.source_instance_id:
            self._recover(outgoing.order.request_id, emitted_tokens, now_ms)

    # -- inside

    def _obstacle(self, order: MigrationOrder) -> str:
        """Why it cannot even be queued; empty if it can."""
        entry = self.ledger.open.get(order.request_id)
        if entry is None or entry.owner is None or entry.owner.instance_id != order.source_instance_id:
            return f"request {order.request_id} does not run on {order.source_instance_id}"
        if order.target_instance_id not in self._workers:
            return f"{order.target_instance_id} is no instance that could take it"
        if order.request_id in self._ordered:
            return f"request {order.request_id} is being moved already"
        if len(self._queued.get(order.source_instance_id, ())) >= self.config.queued:
            return f"{self.config.queued} migrations wait at {order.source_instance_id} already, the limit"
        return ""

    def _start_queued(self, source_id: str) -> None:
        """Those that decode have their own places, so that nobody waits for another's prefill."""
        still_waiting: deque[_Queued] = deque()
        waiting = self._queued.pop(source_id, deque())
        while waiting:
            queued = waiting.popleft()
            if not self._is_valid(queued.order):
                self._report(queued, WITHDRAWN)
            elif self._has_place(queued.order):
                self._start(queued)
            else:
                still_waiting.append(queued)
        still_waiting.extend(self._queued.pop(source_id, ()))
        if still_waiting:
            self._queued[source_id] = still_waiting

    def _is_valid(self, order: MigrationOrder) -> bool:
        """Its request still runs at its source, and its target is there."""
        entry, source = self.ledger.open.get(order.request_id), self._workers.get(order.source_instance_id)
        return (
            entry is not None
            and source is not None
            and order.target_instance_id in self._workers
            and entry.owner == _owner(source)
        )

    def _has_place(self, order: MigrationOrder) -> bool:
        decodes = self._decodes(order)
        leaving = self._leaving.get(order.source_instance_id, ())
        return sum(each.began_decoding == decodes for each in leaving) < self.config.parallel

    def _decodes(self, order: MigrationOrder) -> bool:
        return self._workers[order.source_instance_id].instance.generated_tokens(order.request_id) > 0

    def _start(self, queued: _Queued) -> None:
        order, now_ms = queued.order, self.events.now_ms
        source, target = self._workers[order.source_instance_id], self._workers[order.target_instance_id]
        entry = self.ledger.open[order.request_id]
        migration_id = f"m{next(self._numbers)}"
        source.look(now_ms)
        outgoing = Outgoing(migration_id, order, _owner(target), entry, source, queued.limits, self, now_ms)
        self._outgoing[migration_id] = outgoing
        self._leaving.setdefault(order.source_instance_id, []).append(outgoing)
        self._ends[migration_id] = queued
        outgoing.start(now_ms)

    def _to_target(self, outgoing: Outgoing, message: ToTarget, now_ms: float) -> None:
        worker = self._workers.get(outgoing.target.instance_id)
        if worker is None or _owner(worker) != outgoing.target:
            return
        known = self._incoming.get(message.migration_id)
        if known is not None:
            known.receive(message, now_ms)
        elif isinstance(message, Offer):
            self._take(outgoing, message, worker, now_ms)
        else:
            # A migration is remembered for longer than its source asks for it: this one never was here.
            self._answer(Failed(message.migration_id, "this migration is unknown here"))

    def _take(self, outgoing: Outgoing, offer: Offer, worker: Worker, now_ms: float) -> None:
        target_id = worker.description.instance_id
        coming = self._coming.get(target_id, 0)
        if coming >= self.config.arriving:
            self._answer(Refuse(offer.migration_id, f"{coming} migrations to {target_id} are under way; try again"))
            return
        self._coming[target_id] = coming + 1
        incoming = Incoming(offer, outgoing.offered, _owner(outgoing.worker), worker, self, now_ms)
        self._incoming[offer.migration_id] = incoming
        incoming.start(now_ms)

    def _answer(self, message: ToSource) -> None:
        self._later(lambda now_ms: self._to_source(message, now_ms))

    def _to_source(self, message: ToSource, now_ms: float) -> None:
        outgoing = self._outgoing.get(message.migration_id)
        if outgoing is not None:
            outgoing.handle(message, now_ms)

    def _later(self, act: Callable[[float], None]) -> None:
        self.events.at(self.events.now_ms + self.config.message_delay_ms, Rank.MESSAGE, act)

    def _report(
        self,
        queued: _Queued,
        reason: str,
        *,
        refused: bool = False,
        rounds: int = 0,
        blocks: int = 0,
        paused_ms: float = 0.0,
    ) -> None:
        order, now_ms = queued.order, self.events.now_ms
        self._ordered.discard(order.request_id)
        queued.ended(
            MigrationEnd(order, not reason, reason, queued.ordered_ms, now_ms, refused, rounds, blocks, paused_ms)
        )


def _owner(worker: Worker) -> Incarnation:
    return Incarnation(worker.description.instance_id, worker.description.incarnation_id)
