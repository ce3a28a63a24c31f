"""A request that comes: carries out what `TargetMigration` says."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from controlplane.protocols.migration.messages import Abort, HandOver, Round
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
    TargetState,
    Tick,
)
from engine_worker.coordinator import wire
from engine_worker.coordinator.workplace import Workplace
from mesh.errors import PenstockError
from penstock.v1 import migration_pb2

log = logging.getLogger(__name__)


class IncomingMigration:
    """One migration of one request from elsewhere; kept after its end, because the source may ask again."""

    def __init__(
        self,
        message: migration_pb2.MigrationOffer,
        kv_address: str,
        send: Callable[[migration_pb2.TargetMessage], None],
        workplace: Workplace,
    ) -> None:
        """`kv_address` is that of the source's transfer agent."""
        self.offer = wire.offer_of(message)
        self._kv_address = kv_address
        self._send = send
        self._workplace = workplace
        self._machine = TargetMigration(self.offer, limits=workplace.settings.limits, now_ms=workplace.now_ms)
        self._began_s = workplace.clock()
        self.ended_s: float | None = None
        """When it ended."""
        self._deadline_s = (
            workplace.clock() + message.request.deadline_ms / 1000 if message.request.deadline_ms else None
        )
        self._model = message.request.model
        self._named: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Block ids at the source and the generated tokens that they cover, by first block and count."""
        self._pulling: asyncio.Task[None] | None = None
        self._blocks = 0

    def start(self) -> None:
        """Ask the engine for room."""
        self._carry_out(self._machine.start())

    @property
    def is_over(self) -> bool:
        """Only its answer is remembered."""
        return self._machine.state in FINAL

    def receive(self, message: migration_pb2.SourceMessage) -> None:
        """What the source said."""
        if message.HasField("offer"):
            self.handle(self.offer)
            return
        said = wire.to_target(message)
        if isinstance(said, Round):
            covered = tuple(message.round.emitted_token_ids)
            self._named[said.first_block, said.block_count] = (tuple(message.round.block_ids), covered)
        elif isinstance(said, HandOver):
            covered = said.emitted_token_ids[: max(0, said.computed_tokens - len(self.offer.request.prompt_token_ids))]
            self._named[said.first_block, said.block_count] = (tuple(message.hand_over.block_ids), covered)
            if said.block_count == 0 and (obstacle := self._obstacle()) is not None:
                self.handle(Abort(said.migration_id, obstacle))
                return
        self.handle(said)

    def source_lost(self) -> None:
        """The source's process is gone."""
        self.handle(SourceLost())

    def tick(self) -> None:
        """Time has passed."""
        self.handle(Tick())

    def handle(self, event: TargetEvent) -> None:
        """Feed the state machine and do what it says."""
        was_over = self.is_over
        self._carry_out(self._machine.handle(event, self._workplace.now_ms))
        if self.is_over and not was_over:
            self._finish()

    def _carry_out(self, instructions: tuple[TargetInstruction, ...]) -> None:
        spawn = self._workplace.tasks.spawn
        for instruction in instructions:
            match instruction:
                case Send(message):
                    self._send(wire.target_message(message))
                case Reserve():
                    spawn(self._reserve(), name=f"reserve {self.offer.migration_id}")
                case Pull(first_block, block_count):
                    named = self._named[first_block, block_count]
                    self._pulling = spawn(self._pull(first_block, *named), name=f"pull {self.offer.migration_id}")
                case Activate(emitted_token_ids, computed_tokens):
                    self._activate(emitted_token_ids, computed_tokens)
                case Discard():
                    spawn(self._discard(), name=f"discard {self.offer.migration_id}")

    async def _reserve(self) -> None:
        if (obstacle := self._obstacle()) is not None:
            self.handle(NotReserved(obstacle))
            return
        try:
            await self._workplace.engine.reserve(self.offer.migration_id, self.offer.request)
        except PenstockError as error:
            self.handle(NotReserved(str(error)))
        except Exception as error:
            log.exception("room for a migration could not be made", extra={"story": self._machine.story})
            self._workplace.engine.discard(self.offer.migration_id)
            self.handle(NotReserved(f"the engine failed: {error!r}"))
        else:
            self.handle(Reserved())

    async def _pull(self, first_block: int, block_ids: tuple[int, ...], covered: tuple[int, ...]) -> None:
        deadline_s = self._workplace.settings.limits.round_ms / 1000
        try:
            await self._workplace.engine.pull(
                self.offer.migration_id, self._kv_address, first_block, block_ids, covered, deadline_s
            )
        except PenstockError as error:
            self.handle(NotArrived(str(error)))
            return
        except Exception as error:
            # What the engine's memory raises may be anything; unheard, the blocks would be held for ever.
            log.exception("blocks could not be pulled", extra={"story": self._machine.story})
            self.handle(NotArrived(f"the engine failed: {error!r}"))
            return
        if (obstacle := self._obstacle()) is not None:
            self.handle(NotArrived(obstacle))
            return
        self._blocks = first_block + len(block_ids)
        self.handle(Arrived(first_block, len(block_ids)))

    def _obstacle(self) -> str | None:
        """Why the request cannot be owned here. Asked once more right before it would be, without a pause between."""
        return self._workplace.instance.import_obstacle(self.offer.request, self._model, self.offer.frontend_id)

    def _activate(self, emitted_token_ids: tuple[int, ...], computed_tokens: int) -> None:
        request = replace(self.offer.request, emitted_token_ids=emitted_token_ids)
        self._workplace.instance.take_over(
            request, self.offer.frontend_id, epoch=self.offer.epoch, deadline_s=self._deadline_s
        )
        try:
            self._workplace.engine.activate(self.offer.migration_id, emitted_token_ids, computed_tokens)
        except Exception as error:
            # The source gives it up in any case: the frontend recovers it.
            log.exception("a request that moved here cannot be run", extra={"request_id": request.request_id})
            self._workplace.engine.discard(self.offer.migration_id)
            self._workplace.instance.give_up(request.request_id, f"the engine could not run it: {error}")

    async def _discard(self) -> None:
        """The reserved blocks are free only when no transfer writes into them any more."""
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.gather(self._pulling, return_exceptions=True)
        self._workplace.engine.discard(self.offer.migration_id)

    def _finish(self) -> None:
        self.ended_s = self._workplace.clock()
        self._named.clear()
        committed = self._machine.state is TargetState.COMMITTED
        blocks = self._blocks if committed else 0
        kv_bytes = blocks * self._workplace.engine.kv_block_bytes
        seconds = self.ended_s - self._began_s
        self._workplace.metrics.ended("in", self._machine.state.value, blocks, kv_bytes, seconds)
        extra = {"request_id": self.offer.request.request_id, "story": self._machine.story}
        log.info("a migration to here ended", extra=extra)
