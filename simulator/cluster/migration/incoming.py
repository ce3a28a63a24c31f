"""A request that comes to an instance: carries out what `TargetMigration` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.migration.messages import HandOver, Offer, Round, ToTarget
from controlplane.protocols.migration.target import (
    FINAL,
    Activate,
    Arrived,
    Discard,
    NotArrived,
    NotReserved,
    Pull,
    Reserve,
    Reserved,
    Send,
    SourceLost,
    TargetEvent,
    TargetInstruction,
    TargetMigration,
    Tick,
)
from mesh.errors import RequestRefused
from simulator.cluster.events import Event, Rank
from simulator.cluster.kv_links import Transfer
from simulator.cluster.worker import Worker
from simulator.instance.counted_request import CountedRequest

if TYPE_CHECKING:
    from simulator.cluster.migration.office import MigrationOffice


class Incoming:
    """One migration of one request, at its target; kept for a while after its end, because the source may ask again."""

    def __init__(
        self,
        offer: Offer,
        request: CountedRequest,
        source: Incarnation,
        worker: Worker,
        office: MigrationOffice,
        now_ms: float,
    ) -> None:
        """`request` is what the offer stands for."""
        self.offer = offer
        self.source = source
        self.worker = worker
        self._request = request
        self._office = office
        self.machine = TargetMigration(offer, limits=office.config.limits, now_ms=now_ms)
        self._computed_tokens: dict[tuple[int, int], int] = {}
        """Tokens whose KV is here once a pull is done, by first block and count."""
        self._transfer: Transfer | None = None
        self._timer: Event | None = None
        self._wind_timer(now_ms)

    @property
    def is_over(self) -> bool:
        """Only its answer is remembered."""
        return self.machine.state in FINAL

    def start(self, now_ms: float) -> None:
        """Ask the instance for room."""
        self._carry_out(self.machine.start(), now_ms)

    def receive(self, message: ToTarget, now_ms: float) -> None:
        """What the source said."""
        if isinstance(message, (Round, HandOver)):
            block_tokens = self.worker.instance.config.block_tokens
            stop_tokens = (message.first_block + message.block_count) * block_tokens
            computed = message.computed_tokens if isinstance(message, HandOver) else stop_tokens
            self._computed_tokens[message.first_block, message.block_count] = computed
        self.handle(message, now_ms)

    def handle(self, event: TargetEvent, now_ms: float) -> None:
        """Feed the state machine and do what it says."""
        self._carry_out(self.machine.handle(event, now_ms), now_ms)
        if self.is_over and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._office.target_ended(self, now_ms)

    def source_lost(self, now_ms: float) -> None:
        """The source has died, and with it what it was sending."""
        if self._transfer is not None:
            self._drop_transfer()
            self.handle(NotArrived("the source is gone"), now_ms)
        else:
            self.handle(SourceLost(), now_ms)

    def give_in(self) -> None:
        """The target has died."""
        self._drop_transfer()
        if self._timer is not None:
            self._timer.cancel()

    def _carry_out(self, instructions: tuple[TargetInstruction, ...], now_ms: float) -> None:
        for instruction in instructions:
            match instruction:
                case Send(message):
                    self._office.send_to_source(self, message)
                case Reserve():
                    self._reserve(now_ms)
                case Pull(first_block, block_count):
                    self._pull(first_block, block_count, now_ms)
                case Activate(_, computed_tokens):
                    self._activate(computed_tokens, now_ms)
                case Discard():
                    self._drop_transfer()
                    self.worker.touch(now_ms)
                    self.worker.instance.abort(self._request.request_id)
                    self.worker.wake(now_ms)

    def _reserve(self, now_ms: float) -> None:
        self.worker.touch(now_ms)
        try:
            self.worker.instance.admit_import(self._request, 0)
        except RequestRefused as error:
            self.handle(NotReserved(str(error)), now_ms)
            return
        self.worker.wake(now_ms)
        self.handle(Reserved(), now_ms)

    def _pull(self, first_block: int, block_count: int, now_ms: float) -> None:
        """Blocks that the prefix cache has here are not pulled."""
        instance, request_id = self.worker.instance, self._request.request_id
        self.worker.touch(now_ms)
        try:
            wanted = instance.extend_import(request_id, self._computed_tokens[first_block, block_count])
        except RequestRefused as error:
            self.handle(NotArrived(str(error)), now_ms)
            return
        self.worker.wake(now_ms)
        if not wanted.block_ids:
            self.handle(Arrived(first_block, block_count), now_ms)
            return

        def arrived(at_ms: float) -> None:
            self._transfer = None
            self.handle(Arrived(first_block, block_count), at_ms)

        def failed(at_ms: float, reason: str) -> None:
            self._transfer = None
            self.handle(NotArrived(reason), at_ms)

        size_bytes = len(wanted.block_ids) * instance.config.block_bytes
        own_id = self.worker.description.instance_id
        self._transfer = self._office.links.transfer(self.source.instance_id, own_id, size_bytes, arrived, failed)

    def _activate(self, computed_tokens: int, now_ms: float) -> None:
        request_id = self._request.request_id
        description = self.worker.description
        owner = Incarnation(description.instance_id, description.incarnation_id)
        self.worker.touch(now_ms)
        if self._office.ledger.handed_over(request_id, owner, self.offer.epoch):
            self.worker.instance.complete_import(request_id, computed_tokens + 1)
            self.worker.wake(now_ms, request_id)
        else:
            # Recovered elsewhere meanwhile: the frontend does not want this life of the request.
            self.worker.instance.abort(request_id)
            self.worker.wake(now_ms)

    def _drop_transfer(self) -> None:
        if self._transfer is not None:
            self._office.links.cancel(self._transfer)
            self._transfer = None

    def _wind_timer(self, now_ms: float) -> None:
        def tick(at_ms: float) -> None:
            self._timer = None
            self._wind_timer(at_ms)
            self.handle(Tick(), at_ms)

        self._timer = self._office.events.at(now_ms + self._office.config.limits.idle_ms, Rank.MESSAGE, tick)
