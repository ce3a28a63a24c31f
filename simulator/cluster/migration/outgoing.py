"""A request that leaves an instance: carries out what `SourceMigration` says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from controlplane.model.incarnation import Incarnation
from controlplane.model.migration_order import MigrationOrder
from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.protocols.migration.limits import MigrationLimits
from controlplane.protocols.migration.messages import Pulled, Refuse, Round
from controlplane.protocols.migration.source import (
    FINAL,
    PAUSED,
    Ended,
    GiveUp,
    Pause,
    Paused,
    Progress,
    Release,
    Resume,
    Send,
    SourceEvent,
    SourceInstruction,
    SourceMigration,
    SourceState,
    Tick,
)
from simulator.cluster.events import Event, Rank
from simulator.cluster.ledger import OpenRequest
from simulator.cluster.worker import Worker
from simulator.instance.sequence import SequenceState

if TYPE_CHECKING:
    from simulator.cluster.migration.office import MigrationOffice

FRONTEND_ID = "simulated"


class Outgoing:
    """One migration of one request, at its source."""

    def __init__(
        self,
        migration_id: str,
        order: MigrationOrder,
        target: Incarnation,
        entry: OpenRequest,
        worker: Worker,
        limits: MigrationLimits,
        office: MigrationOffice,
        now_ms: float,
    ) -> None:
        self.migration_id = migration_id
        self.order = order
        self.target = target
        self.worker = worker
        self.refused = False
        """The target would not take the request."""
        self.paused_at_ms: float | None = None
        self.blocks = 0
        """Of its KV when it was paused."""
        self._office = office
        self._emitted_tokens = worker.instance.generated_tokens(order.request_id)
        self.offered = replace(entry.request, emitted_tokens=self._emitted_tokens)
        """The request as it stood when the migration began."""
        self.began_decoding = self._emitted_tokens > 0
        """Whether it decoded then."""
        # Only lengths are simulated: both ends know the request by its id.
        request = EngineRequest(order.request_id, (), SamplingParams(max_tokens=entry.request.output_tokens))
        self.machine = SourceMigration(
            migration_id, request, epoch=entry.epoch, frontend_id=FRONTEND_ID, limits=limits, now_ms=now_ms
        )
        self._told: Progress | None = None
        self._pauses = False
        """A pause was asked for and has not happened."""
        self._round = 0
        """The round that is being copied; 0: none is."""
        self._watches = False
        """Every step of the source matters now."""
        self._timer: Event | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more will come of it."""
        return self.machine.state in FINAL

    def start(self, now_ms: float) -> None:
        """Make the offer."""
        self._wind_timer(now_ms)
        self._carry_out(self.machine.start(), now_ms)

    def handle(self, event: SourceEvent, now_ms: float) -> None:
        """What the target said, a loss of it, a cancellation or a tick."""
        if self.is_over:
            return
        self._tell_progress(now_ms)
        self.refused = isinstance(event, Refuse)
        self._feed(event, now_ms)

    def after_step(self, now_ms: float) -> None:
        """The source has finished a step."""
        if self.is_over:
            return
        state = self.worker.instance.state_of(self.order.request_id)
        if state is SequenceState.ENDED:
            if self.machine.state not in PAUSED:
                self._feed(Ended(), now_ms)
        elif self._pauses:
            self._pause_if_it_decodes(now_ms)
        else:
            self._tell_progress(now_ms)

    def give_in(self) -> None:
        """The source has died."""
        if self._timer is not None:
            self._timer.cancel()
        self._watch(False, self._office.events.now_ms)

    def _feed(self, event: SourceEvent, now_ms: float) -> None:
        if self.is_over:
            return
        if isinstance(event, Pulled) and event.number == self._round:
            self._round = 0
        self._carry_out(self.machine.handle(event, now_ms), now_ms)
        if self.is_over:
            self.give_in()
            self._office.source_ended(self, now_ms)
        else:
            waits = self.machine.state is SourceState.COPYING and not self._round
            self._watch(waits or self._pauses, now_ms)

    def _carry_out(self, instructions: tuple[SourceInstruction, ...], now_ms: float) -> None:
        for instruction in instructions:
            match instruction:
                case Send(message):
                    if isinstance(message, Round):
                        self._round = message.number
                    self._office.send_to_target(self, message)
                case Pause():
                    self._pauses = True
                    if self.worker.instance.planned is None:
                        self._pause_if_it_decodes(now_ms)
                case Resume():
                    self._resume(now_ms)
                case Release():
                    self._free(now_ms)
                case GiveUp(reason):
                    emitted_tokens = self.worker.instance.generated_tokens(self.order.request_id)
                    self._free(now_ms)
                    self._office.given_up(self, emitted_tokens, reason, now_ms)

    def _watch(self, watches: bool, now_ms: float) -> None:
        """Between two steps nothing happens here, unless the machine waits for the next one."""
        if watches and not self._watches:
            self.worker.watch(now_ms)
        elif self._watches and not watches:
            self.worker.unwatch()
        self._watches = watches

    def _pause_if_it_decodes(self, now_ms: float) -> None:
        """A preempted request is paused once it decodes again, as in the live engine."""
        instance, request_id = self.worker.instance, self.order.request_id
        if instance.state_of(request_id) is not SequenceState.DECODE:
            return
        self.worker.touch(now_ms)
        instance.pause(request_id)
        self.worker.wake(now_ms)
        self._pauses = False
        self.paused_at_ms = now_ms
        exported = instance.export(request_id)
        self.blocks = len(exported.block_ids)
        self._feed(Paused((), exported.computed_tokens, self.blocks), now_ms)

    def _resume(self, now_ms: float) -> None:
        self._pauses = False
        if self.worker.instance.state_of(self.order.request_id) is SequenceState.PAUSED:
            self.worker.touch(now_ms)
            self.worker.instance.resume(self.order.request_id)
            self.worker.wake(now_ms)

    def _free(self, now_ms: float) -> None:
        self.worker.touch(now_ms)
        self.worker.instance.abort(self.order.request_id)
        self.worker.wake(now_ms)

    def _tell_progress(self, now_ms: float) -> None:
        """As the live engine does: the full blocks, and whether it decodes with all blocks from before in place."""
        instance, request_id = self.worker.instance, self.order.request_id
        self.worker.look(now_ms)
        if self.machine.state in PAUSED or instance.state_of(request_id) is SequenceState.ENDED:
            return
        block_tokens = instance.config.block_tokens
        full_blocks = instance.export(request_id).computed_tokens // block_tokens
        known_blocks = (self.offered.prompt_tokens + self._emitted_tokens) // block_tokens
        decodes = instance.generated_tokens(request_id) > self._emitted_tokens and full_blocks >= known_blocks
        progress = Progress(full_blocks, decodes)
        if progress != self._told:
            self._told = progress
            self._feed(progress, now_ms)

    def _wind_timer(self, now_ms: float) -> None:
        def tick(at_ms: float) -> None:
            self._timer = None
            self.handle(Tick(), at_ms)
            if not self.is_over:
                self._wind_timer(at_ms)

        self._timer = self._office.events.at(now_ms + self._office.config.tick_ms, Rank.MESSAGE, tick)
