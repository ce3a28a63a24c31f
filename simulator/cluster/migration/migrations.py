"""All migrations of a cluster: who orders them and is told how they ended, and the messages between the instances."""

from collections.abc import Callable, Mapping
from itertools import count

from controlplane.model.incarnation import Incarnation
from controlplane.model.migration_order import MigrationOrder
from controlplane.protocols.migration.messages import ToSource, ToTarget
from controlplane.protocols.migration.source_events import (
    DecodeChosen,
    Ending,
    MigrationEnded,
    MoveOrdered,
    TransferEnded,
    TransferOrdered,
    TransferResult,
)
from simulator.cluster.config import MigrationConfig
from simulator.cluster.control import MigrationEnd
from simulator.cluster.events import EventQueue, Rank
from simulator.cluster.kv_links import KvLinks
from simulator.cluster.ledger import Ledger
from simulator.cluster.migration.coordinator import SimulatedCoordinator, connection_of
from simulator.cluster.worker import Worker
from simulator.instance.counted_request import CountedRequest
from simulator.instance.step import StepResult

TRANSFER = "to be decoded there"
"""The reason of an order that transfers a prefill."""


class Migrations:
    """A coordinator for each instance, and the network between them."""

    def __init__(
        self,
        config: MigrationConfig,
        events: EventQueue,
        links: KvLinks,
        ledger: Ledger,
        recover: Callable[[str, int, float], None],
        choose_decode: Callable[[str, str, float], str],
        tell: Callable[[MigrationEnd], None],
    ) -> None:
        """`recover` is told the id of a request that its source has given up, and its emitted tokens. `choose_decode`
        is asked who decodes a request that an instance has prefilled; empty: that one. `tell` hears how orders end."""
        self.config = config
        self.events = events
        self.links = links
        self.ledger = ledger
        self.transferred = 0
        """Prefills that were decoded elsewhere, as they were meant to be."""
        self.not_transferred = 0
        """Those that were decoded, or ended, where they were prefilled, although something else was meant."""
        self.peers: Mapping[str, Incarnation] = {}
        """Instances that are alive. A new mapping whenever that changes."""
        self.coordinators: dict[str, SimulatedCoordinator] = {}
        """By instance."""
        self._connections: dict[str, Incarnation] = {}
        self._recover = recover
        self._choose_decode = choose_decode
        self._tell = tell
        self._order_ids = count(1)
        self._orders: dict[int, tuple[MigrationOrder, float]] = {}
        """Orders that have not ended, and when they were given."""

    def joined(self, worker: Worker) -> None:
        """A new life of an instance."""
        coordinator = SimulatedCoordinator(worker, self)
        self.coordinators[coordinator.own.instance_id] = coordinator
        self._connections[connection_of(coordinator.own)] = coordinator.own
        self.peers = {**self.peers, coordinator.own.instance_id: coordinator.own}

    def lost(self, instance_id: str) -> None:
        """An instance has died."""
        lost = self.coordinators.pop(instance_id)
        self.peers = {each: own for each, own in self.peers.items() if each != instance_id}
        lost.stop()
        for order_id, (order, ordered_ms) in list(self._orders.items()):
            if order.source_instance_id == instance_id:
                del self._orders[order_id]
                self._tell(MigrationEnd(order, False, "the source is gone", ordered_ms, self.events.now_ms))
        for coordinator in list(self.coordinators.values()):
            coordinator.peer_lost(lost.own)

    def after_step(self, worker: Worker, result: StepResult) -> None:
        """A step of an instance is over."""
        self.coordinators[worker.description.instance_id].after_step(result)

    def moves(self, request_id: str) -> bool:
        """Whether a migration of the request waits or is under way."""
        entry = self.ledger.open.get(request_id)
        if entry is None or entry.owner is None:
            return False
        # Its source learns a while later that the target has it.
        holders = (self.coordinators.get(each) for each in (entry.owner.instance_id, entry.came_from))
        return any(holder is not None and holder.source.is_ordered(request_id) for holder in holders)

    def order(self, order: MigrationOrder) -> None:
        """Move a running request as soon as its source has a slot; how that ended is told once, at once where it cannot
        even wait for one."""
        now_ms, request_id = self.events.now_ms, order.request_id
        coordinator = self.coordinators.get(order.source_instance_id)
        if coordinator is None:
            self._tell(MigrationEnd(order, False, f"{order.source_instance_id} is not there", now_ms, now_ms))
            return
        coordinator.worker.look(now_ms)
        entry = self.ledger.open.get(request_id)
        is_here = entry is not None and entry.owner == coordinator.own
        is_decoding = is_here and coordinator.is_decoding(request_id)
        order_id = next(self._order_ids)
        self._orders[order_id] = (order, now_ms)
        coordinator.handle(MoveOrdered(order_id, request_id, order.target_instance_id, is_here, is_decoding))

    def transfer(self, request_id: str, prefill_id: str, decode_id: str) -> None:
        """A request that was just placed is to be decoded elsewhere; `decode_id` is empty if it is chosen later."""
        self.coordinators[prefill_id].handle(TransferOrdered(request_id, decode_id))

    # -- what coordinators ask for

    def send(self, source: Incarnation, target: Incarnation, message: ToTarget, offered: CountedRequest) -> None:
        """Over the network; lost where either of the two has died meanwhile."""

        def arrive(_: float) -> None:
            if self.peers.get(target.instance_id) == target and self.peers.get(source.instance_id) == source:
                self.coordinators[target.instance_id].hear_source(source, message, offered)

        self.events.at(self.events.now_ms + self.config.message_delay_ms, Rank.MESSAGE, arrive)

    def answer(self, connection: str, message: ToSource) -> None:
        """The same in the other direction."""
        source = self._connections[connection]

        def arrive(_: float) -> None:
            if self.peers.get(source.instance_id) == source:
                self.coordinators[source.instance_id].hear_target(message)

        self.events.at(self.events.now_ms + self.config.message_delay_ms, Rank.MESSAGE, arrive)

    def ask_decode(self, coordinator: SimulatedCoordinator, request_id: str) -> None:
        """The question takes a message; the scheduler chooses then."""

        def choose(now_ms: float) -> None:
            entry, own = self.ledger.open.get(request_id), coordinator.own
            if entry is not None and entry.owner == own and self.peers.get(own.instance_id) == own:
                decode_id = self._choose_decode(request_id, own.instance_id, now_ms)
                coordinator.handle(DecodeChosen(request_id, decode_id))

        self.events.at(self.events.now_ms + self.config.message_delay_ms, Rank.ARRIVAL, choose)

    def ended(self, coordinator: SimulatedCoordinator, ended: MigrationEnded) -> None:
        """An order has ended."""
        outcome, now_ms = ended.outcome, self.events.now_ms
        if ended.order_id is None:
            order = MigrationOrder(ended.request_id, coordinator.own.instance_id, ended.target_id, TRANSFER)
            ordered_ms = now_ms - outcome.duration_ms
        else:
            order, ordered_ms = self._orders.pop(ended.order_id)
        self._tell(
            MigrationEnd(
                order,
                outcome.moved,
                "" if outcome.moved else outcome.reason,
                ordered_ms,
                now_ms,
                outcome.ending is Ending.REFUSED,
                outcome.rounds,
                outcome.blocks if outcome.moved else 0,
                outcome.paused_ms or 0.0,
            )
        )

    def transfer_ended(self, ended: TransferEnded) -> None:
        """It is known who decodes a request."""
        if ended.result is TransferResult.MOVED:
            self.transferred += 1
        else:
            self.not_transferred += 1

    def given_up(self, source: Incarnation, request_id: str, emitted_tokens: int) -> None:
        """The source knows of nobody who owns the request: it is recovered, unless it has ended or its new owner was
        heard of meanwhile. As at the frontend, what a former owner says counts for nothing."""
        entry = self.ledger.open.get(request_id)
        if entry is not None and entry.owner is not None and entry.owner.instance_id == source.instance_id:
            self._recover(request_id, emitted_tokens, self.events.now_ms)
