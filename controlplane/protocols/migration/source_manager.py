"""All migrations away from one instance, and the transfers of prefills that are decoded elsewhere."""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import TypeAlias

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.migration.limits import ManagerLimits
from controlplane.protocols.migration.messages import (
    Accept,
    Committed,
    Failed,
    Pulled,
    Refuse,
    ToSource,
)
from controlplane.protocols.migration.orders import Order, Slot, Transfer, TransferState
from controlplane.protocols.migration.source import (
    FINAL,
    PAUSED,
    Cancel,
    Ended,
    Paused,
    Progress,
    SourceEvent,
    SourceInstruction,
    SourceMigration,
    SourceState,
    TargetLost,
    Tick,
)
from controlplane.protocols.migration.source_events import (
    Abort,
    AbortAsked,
    AdoptionAsked,
    AskDecode,
    ConnectionLost,
    DecodeChosen,
    Do,
    Ending,
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
from mesh.invariants import invariants

_Instructions: TypeAlias = Iterator[SourceManagerInstruction]


class SourceManager:
    """Feed events to `handle` and carry out what it returns, in order; an answer that is known at once may be fed
    before the next instruction is carried out. `Tick` is due every 50 ms or so while `is_busy`.

    Orders wait for a slot, first come, first served; those of requests that decode never wait for another's prefill.
    """

    def __init__(self, own: Incarnation, block_tokens: int, limits: ManagerLimits | None = None) -> None:
        self.limits = limits or ManagerLimits()
        self._own = own
        self._block_tokens = block_tokens
        self._peers: Mapping[str, Incarnation] = MappingProxyType({})
        self._obstacle_reason = ""
        self._is_stopping = False
        self._numbers = count(1)
        self._orders: dict[str, Order] = {}
        """By request: one for each at most."""
        self._waiting: dict[Slot, list[Order]] = {slot: [] for slot in Slot}
        """In the order of their numbers."""
        self._migrations: dict[str, Order] = {}
        """Those that have a slot, by migration id."""
        self._transfers: dict[str, Transfer] = {}
        self._departed_ms: dict[str, float] = {}
        """When a migration of a request ended, for as long as the target answers for it."""

    def handle(self, event: SourceManagerEvent, now_ms: float) -> tuple[SourceManagerInstruction, ...]:
        """What is to be done about `event`. Events that come too late to matter return nothing."""
        return (*_HANDLERS[type(event)](self, event, now_ms), *self._fill_slots(now_ms))

    # -- what there is

    @property
    def orders(self) -> int:
        """Migrations that wait or are under way."""
        return len(self._orders)

    @property
    def migration_ids(self) -> tuple[str, ...]:
        """Migrations that are under way."""
        return tuple(self._migrations)

    @property
    def transfers(self) -> int:
        """Requests that are to be decoded elsewhere and are still here."""
        return len(self._transfers)

    @property
    def asking(self) -> tuple[str, ...]:
        """Requests of which a scheduler is asked who decodes them."""
        return tuple(each.request_id for each in self._transfers.values() if each.state is TransferState.ASKING)

    @property
    def is_busy(self) -> bool:
        """Ticks are needed."""
        return bool(self._migrations)

    def awaits_step(self, migration_id: str) -> bool:
        """Whether the next step of the request's engine decides how its migration goes on."""
        order = self._migrations.get(migration_id)
        return order is not None and order.machine is not None and order.machine.awaits_step

    def knows(self, request_id: str) -> bool:
        """Whether the request's first token and end are to be told of."""
        return request_id in self._orders or request_id in self._transfers

    def is_ordered(self, request_id: str) -> bool:
        """Whether a migration of the request waits or is under way."""
        return request_id in self._orders

    def is_paused(self, request_id: str) -> bool:
        """Whether the request stands still, and may be the target's already: an abort has to wait."""
        order = self._orders.get(request_id)
        return order is not None and order.machine is not None and order.machine.state in PAUSED

    def moved_lately(self, request_id: str) -> bool:
        """Whether the request moves away from here or did so a short while ago."""
        order = self._orders.get(request_id)
        return request_id in self._departed_ms or (order is not None and bool(order.migration_id))

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where the state contradicts itself or exceeds a bound."""
        limits, waiting = self.limits, [order for queue in self._waiting.values() for order in queue]
        assert sum(order.order_id is not None for order in waiting) <= limits.queued, "too many orders wait"
        for slot, queue in self._waiting.items():
            assert all(order.slot is slot and not order.migration_id for order in queue), "an order in a wrong queue"
            assert [each.number for each in queue] == sorted(each.number for each in queue), "an order has jumped"
            used = sum(order.slot is slot for order in self._migrations.values())
            assert used <= limits.parallel, f"{used} {slot} migrations, at most {limits.parallel}"
            assert used == limits.parallel or not queue, "an order waits though there is a slot"
        orders = {id(order) for order in (*waiting, *self._migrations.values())}
        assert orders == {id(order) for order in self._orders.values()}, "an order neither waits nor is under way"
        assert len(orders) == len(waiting) + len(self._migrations), "an order is in two places"
        for request_id, order in self._orders.items():
            if order.machine is not None:
                assert order.machine.state not in FINAL, f"it has ended and holds a slot: {order.machine.story}"
                order.machine.validate()
            if order.order_id is None:
                transfer = self._transfers.get(request_id)
                assert transfer is not None, f"nobody has ordered the migration of {request_id}"
                assert transfer.state is TransferState.MOVING, f"{request_id} moves while its transfer is not tried"
        for transfer in self._transfers.values():
            assert 0 <= transfer.tries <= limits.transfer_tries, f"{transfer.request_id}: {transfer.tries} tries"
            moving = transfer.request_id in self._orders and self._orders[transfer.request_id].order_id is None
            assert moving == (transfer.state is TransferState.MOVING), f"{transfer.request_id} waits for nothing"

    # -- orders

    def _on_peers_or_obstacle(self, event: PeersChanged | ObstacleChanged, now_ms: float) -> _Instructions:
        match event:
            case PeersChanged(peers):
                self._peers = peers
            case ObstacleChanged(reason):
                self._obstacle_reason = reason
        return iter(())

    def _on_ordered(self, event: MoveOrdered, now_ms: float) -> _Instructions:
        obstacle = self._obstacle(event.request_id, event.target_id, is_here=event.is_here)
        waiting = sum(order.order_id is not None for queue in self._waiting.values() for order in queue)
        limits = self.limits.stop_and_copy if event.stop_and_copy else self.limits.live
        slot = Slot.DECODING if event.is_decoding else Slot.PREFILLING
        order = Order(next(self._numbers), event.order_id, event.request_id, event.target_id, limits, slot)
        if not obstacle and waiting >= self.limits.queued and not self._has_room(slot):
            obstacle = f"{waiting} migrations wait here already; try again later"
        if obstacle:
            yield _ended(order, MigrationOutcome(Ending.FAILED, obstacle))
        else:
            self._queue(order)

    def _on_withdrawn(self, event: MoveWithdrawn, now_ms: float) -> _Instructions:
        order = next((each for each in self._orders.values() if each.order_id == event.order_id), None)
        if order is None:
            return
        if order.machine is None:
            yield from self._drop(order, MigrationOutcome(Ending.FAILED, "the order was withdrawn"), now_ms)
        else:
            yield from self._tell(order, Cancel("the order was withdrawn"), now_ms)

    def _obstacle(self, request_id: str, target_id: str, *, is_here: bool) -> str:
        """Why a request cannot even wait for its migration; empty if it can."""
        if self._is_stopping:
            return "the worker is stopping"
        if self._obstacle_reason:
            return f"no request can leave this worker: {self._obstacle_reason}"
        if not is_here:
            return f"request {request_id} does not run here; see `penstock status` or ListRequests"
        if request_id in self._orders:
            return f"request {request_id} is being moved already"
        if target_id == self._own.instance_id:
            return f"request {request_id} is on {target_id} already"
        if target_id not in self._peers:
            known = ", ".join(sorted(self._peers)) or "none"
            return f"{target_id} is no instance that could take it; those of the same model and engine: {known}"
        return ""

    def _queue(self, order: Order) -> None:
        self._orders[order.request_id] = order
        insort(self._waiting[order.slot], order, key=lambda each: each.number)

    def _has_room(self, slot: Slot) -> bool:
        return sum(order.slot is slot for order in self._migrations.values()) < self.limits.parallel

    def _fill_slots(self, now_ms: float) -> _Instructions:
        for slot, queue in self._waiting.items():
            while queue and self._has_room(slot):
                order = queue.pop(0)
                target = self._peers.get(order.target_id)
                if target is None:
                    del self._orders[order.request_id]
                    outcome = MigrationOutcome(Ending.FAILED, "its target left before the migration had its turn")
                    yield from self._close(order, outcome, now_ms)
                    continue
                order.migration_id = f"{self._own.instance_id}.{self._own.incarnation_id}-{order.number}"
                self._migrations[order.migration_id] = order
                yield Export(order.migration_id, order.request_id, target)

    def _drop(self, order: Order, outcome: MigrationOutcome, now_ms: float) -> _Instructions:
        """End an order whose migration has not begun."""
        assert order.machine is None, "a migration ends by its state machine"
        del self._orders[order.request_id]
        if order.migration_id:
            del self._migrations[order.migration_id]
        else:
            self._waiting[order.slot].remove(order)
        yield from self._close(order, outcome, now_ms)

    def _close(self, order: Order, outcome: MigrationOutcome, now_ms: float) -> _Instructions:
        yield _ended(order, outcome)
        if order.order_id is None:
            yield from self._transfer_tried(self._transfers[order.request_id], outcome, now_ms)

    # -- requests

    def _on_began(self, event: RequestBegan, now_ms: float) -> _Instructions:
        order, transfer = self._orders.get(event.request_id), self._transfers.get(event.request_id)
        if order is not None and not order.migration_id and order.slot is Slot.PREFILLING:
            self._waiting[order.slot].remove(order)
            order.slot = Slot.DECODING
            self._queue(order)
        if transfer is not None and transfer.first_token_ms is None:
            transfer.first_token_ms = now_ms
            if transfer.state is TransferState.PREFILLING:
                transfer.become(TransferState.ASKING)
                yield AskDecode(event.request_id)

    def _on_gone(self, event: RequestGone, now_ms: float) -> _Instructions:
        order = self._orders.get(event.request_id)
        if order is None:
            yield from self._skip_transfer(event.request_id)
        elif order.machine is None:
            yield from self._drop(order, _ENDED, now_ms)
        elif order.machine.state not in PAUSED:
            yield from self._tell(order, Ended(), now_ms)

    def _on_abort(self, event: AbortAsked, now_ms: float) -> _Instructions:
        order = self._orders.get(event.request_id)
        if order is None:
            yield from self._skip_transfer(event.request_id)
        elif order.machine is None:
            yield from self._drop(order, _ENDED, now_ms)
        elif order.machine.state in PAUSED:
            order.abort_waits = True
            yield from self._tell(order, Cancel("the request was taken back"), now_ms)

    def _on_adoption(self, event: AdoptionAsked, now_ms: float) -> _Instructions:
        order = self._orders.get(event.request_id)
        if order is not None and order.machine is not None and order.machine.state not in PAUSED:
            yield from self._tell(order, Cancel("its client has come back to a frontend"), now_ms)

    # -- migrations

    def _on_exported(self, event: Exported, now_ms: float) -> _Instructions:
        order = self._migrations.get(event.migration_id)
        if order is None or order.machine is not None:
            yield Withdraw(event.migration_id, event.request.request_id)
            return
        order.submitted_tokens = event.submitted_tokens
        order.progress = self._progress(order, event.full_blocks, event.emitted_tokens)
        order.machine = SourceMigration(
            event.migration_id,
            event.request,
            epoch=event.epoch,
            frontend_id=event.frontend_id,
            limits=order.limits,
            now_ms=now_ms,
        )
        yield from self._carry_on(order, order.machine, order.machine.start(order.progress), now_ms)

    def _on_not_exported(self, event: NotExported, now_ms: float) -> _Instructions:
        order = self._migrations.get(event.migration_id)
        if order is not None and order.machine is None:
            yield from self._drop(order, MigrationOutcome(Ending.FAILED, event.reason), now_ms)

    def _on_progressed(self, event: Progressed, now_ms: float) -> _Instructions:
        order = self._migrations.get(event.migration_id)
        if order is None or order.machine is None:
            return
        progress = self._progress(order, event.full_blocks, event.emitted_tokens)
        if progress != order.progress:
            order.progress = progress
            yield from self._tell(order, progress, now_ms)

    def _on_paused(self, event: RequestPaused, now_ms: float) -> _Instructions:
        order = self._migrations.get(event.migration_id)
        if order is not None:
            order.paused_ms, order.blocks = event.since_ms, event.blocks
            paused = Paused(event.emitted_token_ids, event.computed_tokens, event.blocks)
            yield from self._tell(order, paused, now_ms)

    def _on_failure(self, event: PauseFailed | ConnectionLost, now_ms: float) -> _Instructions:
        order = self._migrations.get(event.migration_id)
        if order is not None:
            failure = Cancel(event.reason) if isinstance(event, PauseFailed) else TargetLost()
            yield from self._tell(order, failure, now_ms)

    def _on_message(self, event: ToSource, now_ms: float) -> _Instructions:
        order = self._migrations.get(event.migration_id)
        if order is not None:
            if isinstance(event, Refuse):
                order.ending = Ending.REFUSED
            yield from self._tell(order, event, now_ms)

    def _on_tick(self, event: Tick, now_ms: float) -> _Instructions:
        limit_ms = self.limits.migration_ms
        for order in list(self._migrations.values()):
            if order.offered_ms is not None and now_ms - order.offered_ms >= limit_ms:
                yield from self._tell(order, Cancel(f"it took more than {limit_ms / 1000:g} s"), now_ms)
            yield from self._tell(order, event, now_ms)
        for transfer in list(self._transfers.values()):
            if transfer.state is TransferState.REFUSED and now_ms >= transfer.retry_at_ms:
                yield from self._try_transfer(transfer, now_ms)
        oldest_ms = now_ms - self.limits.remember_ms
        for request_id in [each for each, ended_ms in self._departed_ms.items() if ended_ms < oldest_ms]:
            del self._departed_ms[request_id]

    def _on_stopped(self, event: Stopped, now_ms: float) -> _Instructions:
        self._is_stopping = True
        for order in list(self._orders.values()):
            if order.machine is None:
                yield from self._drop(order, MigrationOutcome(Ending.FAILED, "the worker is stopping"), now_ms)
            else:
                yield from self._tell(order, Cancel("the worker is stopping"), now_ms)

    def _progress(self, order: Order, full_blocks: int, emitted_tokens: int) -> Progress:
        """A request decodes once it has emitted a token here and the engine has told of all blocks from before: vLLM
        tells of them a while later, and a pause before that would leave everything to the last round."""
        known_blocks = order.submitted_tokens // self._block_tokens
        return Progress(full_blocks, decoding=emitted_tokens > 0 and full_blocks >= known_blocks)

    def _tell(self, order: Order, event: SourceEvent, now_ms: float) -> _Instructions:
        machine = order.machine
        if machine is None or machine.state in FINAL:
            return
        if isinstance(event, Ended):
            order.ending = Ending.ENDED
        yield from self._carry_on(order, machine, machine.handle(event, now_ms), now_ms)

    def _carry_on(
        self, order: Order, machine: SourceMigration, instructions: Iterable[SourceInstruction], now_ms: float
    ) -> _Instructions:
        for instruction in instructions:
            if order.offered_ms is None:  # nothing is done about a migration before its offer
                order.offered_ms = now_ms
            yield Do(order.migration_id, instruction)
        if machine.state not in FINAL:
            return
        del self._orders[order.request_id], self._migrations[order.migration_id]
        self._departed_ms[order.request_id] = now_ms
        if machine.state is SourceState.KEPT:
            yield Withdraw(order.migration_id, order.request_id)
            if order.abort_waits:
                yield Abort(order.request_id)
        moved = machine.state is SourceState.MOVED
        outcome = MigrationOutcome(
            Ending.MOVED if moved else order.ending,
            machine.reason,
            machine.rounds,
            order.blocks if moved else machine.copied_blocks,
            None if order.paused_ms is None else now_ms - order.paused_ms,
            0.0 if order.offered_ms is None else now_ms - order.offered_ms,
            machine.state,
            machine.story,
        )
        yield from self._close(order, outcome, now_ms)

    # -- transfers of prefills

    def _on_transfer(self, event: TransferOrdered, now_ms: float) -> _Instructions:
        if event.target_id == self._own.instance_id or event.request_id in self._transfers:
            return
        transfer = self._transfers[event.request_id] = Transfer(event.request_id, event.target_id)
        if event.target_id:
            yield from self._try_transfer(transfer, now_ms)

    def _on_decode_chosen(self, event: DecodeChosen, now_ms: float) -> _Instructions:
        transfer = self._transfers.get(event.request_id)
        if transfer is None or transfer.state is not TransferState.ASKING:
            return
        transfer.target_id = event.target_id
        if event.target_id:
            yield from self._try_transfer(transfer, now_ms)
        elif event.error:
            reason = f"nobody could say who decodes it: {event.error}"
            yield self._end_transfer(transfer, TransferResult.FAILED, reason, now_ms)
        else:
            del self._transfers[event.request_id]

    def _try_transfer(self, transfer: Transfer, now_ms: float) -> _Instructions:
        transfer.become(TransferState.MOVING)
        transfer.tries += 1
        request_id, target_id = transfer.request_id, transfer.target_id
        slot = Slot.PREFILLING if transfer.first_token_ms is None else Slot.DECODING
        order = Order(next(self._numbers), None, request_id, target_id, self.limits.transfer, slot)
        obstacle = self._obstacle(request_id, target_id, is_here=True)
        if obstacle:
            yield from self._close(order, MigrationOutcome(Ending.FAILED, obstacle), now_ms)
        else:
            self._queue(order)

    def _transfer_tried(self, transfer: Transfer, outcome: MigrationOutcome, now_ms: float) -> _Instructions:
        if outcome.ending is Ending.REFUSED and transfer.tries < self.limits.transfer_tries:
            transfer.become(TransferState.REFUSED)
            delay_ms = self.limits.retry_after_ms(transfer.tries)
            transfer.retry_at_ms = now_ms + delay_ms
            yield WakeAfter(delay_ms)
        elif outcome.moved:
            yield self._end_transfer(transfer, TransferResult.MOVED, "", now_ms)
        elif outcome.ending is Ending.ENDED:
            yield self._end_transfer(transfer, TransferResult.SKIPPED, outcome.reason, now_ms)
        else:
            yield self._end_transfer(transfer, TransferResult.FAILED, outcome.reason, now_ms)

    def _end_transfer(self, transfer: Transfer, result: TransferResult, reason: str, now_ms: float) -> TransferEnded:
        del self._transfers[transfer.request_id]
        since_ms = None if transfer.first_token_ms is None else now_ms - transfer.first_token_ms
        return TransferEnded(transfer.request_id, transfer.target_id, result, reason, since_ms)

    def _skip_transfer(self, request_id: str) -> _Instructions:
        """The request has ended between two tries, or before anybody was asked."""
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None and transfer.tries:
            yield TransferEnded(request_id, transfer.target_id, TransferResult.SKIPPED, _ENDED.reason)


_ENDED = MigrationOutcome(Ending.ENDED, "the request ended before it was moved")


def _ended(order: Order, outcome: MigrationOutcome) -> MigrationEnded:
    return MigrationEnded(order.order_id, order.migration_id, order.request_id, order.target_id, outcome)


_HANDLERS: dict[type, Callable[..., _Instructions]] = {
    **dict.fromkeys((PeersChanged, ObstacleChanged), SourceManager._on_peers_or_obstacle),
    MoveOrdered: SourceManager._on_ordered,
    MoveWithdrawn: SourceManager._on_withdrawn,
    TransferOrdered: SourceManager._on_transfer,
    DecodeChosen: SourceManager._on_decode_chosen,
    RequestBegan: SourceManager._on_began,
    RequestGone: SourceManager._on_gone,
    AbortAsked: SourceManager._on_abort,
    AdoptionAsked: SourceManager._on_adoption,
    Exported: SourceManager._on_exported,
    NotExported: SourceManager._on_not_exported,
    Progressed: SourceManager._on_progressed,
    RequestPaused: SourceManager._on_paused,
    **dict.fromkeys((PauseFailed, ConnectionLost), SourceManager._on_failure),
    **dict.fromkeys((Accept, Refuse, Pulled, Committed, Failed), SourceManager._on_message),
    Stopped: SourceManager._on_stopped,
    Tick: SourceManager._on_tick,
}
