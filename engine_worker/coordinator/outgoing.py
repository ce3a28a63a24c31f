"""A request that leaves: carries out what `SourceMigration` says."""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Literal

from controlplane.protocols.migration.limits import MigrationLimits
from controlplane.protocols.migration.messages import HandOver, Offer, Refuse, Round, ToTarget
from controlplane.protocols.migration.source import (
    FINAL,
    PAUSED,
    Cancel,
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
from engine_worker.coordinator import wire
from engine_worker.coordinator.link import TargetLink
from engine_worker.coordinator.workplace import Workplace
from engine_worker.engines.movable import ExportProgress, PausedRequest
from engine_worker.request_table import TrackedRequest
from penstock.v1 import migration_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MigrationOutcome:
    """How a migration ended."""

    moved: bool
    reason: str = ""
    """Why it did not."""
    ending: Literal["moved", "ended", "refused", "failed"] = "failed"
    """Ended: there was nothing left to move. Refused: the target wants it not now."""
    rounds: int = 0
    blocks: int = 0
    paused_ms: float = 0.0


class OutgoingMigration:
    """One migration of one request to `target`. The engine is heard through `look`, everything else by `handle`."""

    def __init__(
        self,
        migration_id: str,
        tracked: TrackedRequest,
        link: TargetLink,
        limits: MigrationLimits,
        workplace: Workplace,
    ) -> None:
        self.outcome: asyncio.Future[MigrationOutcome] = asyncio.get_running_loop().create_future()
        self.request_id = tracked.request.request_id
        self.migration_id = migration_id
        self.link = link
        self._tracked = tracked
        self._workplace = workplace
        self._machine = SourceMigration(
            migration_id,
            replace(tracked.request, emitted_token_ids=tuple(tracked.emitted_token_ids)),
            epoch=tracked.epoch,
            frontend_id=tracked.frontend_id,
            limits=limits,
            now_ms=workplace.now_ms,
        )
        self._news: ExportProgress | None = None
        """The engine's latest; the frontend's side may not have caught up with it."""
        self._taken: Progress | None = None
        """What the state machine knows of it."""
        self._block_ids: tuple[int, ...] = ()
        self._paused: PausedRequest | None = None
        self._is_told = False
        """All tokens of the paused request are on the stream to the frontend."""
        self._paused_at_s = 0.0
        self._abort_waits = False
        self._ending: Literal["ended", "refused", "failed"] = "failed"
        self._offered_s: float | None = None
        self._is_started = False

    def start(self) -> None:
        """Make the offer, or wait with it for the prefill to begin. Raises what the engine's `export` raises; nothing
        has happened then."""
        self._workplace.engine.export(self.request_id, self.migration_id, self._on_progress)
        progress = self._take_progress() or Progress(0, decoding=False)
        self._is_started = True
        self._carry_out(self._machine.start(progress))
        self.look()

    def handle(self, event: SourceEvent) -> None:
        """What the target said, a loss of it, a cancellation or a tick."""
        if self._machine.state in FINAL:
            return
        self._note_ending(event)
        try:
            self._carry_out(self._machine.handle(event, self._workplace.now_ms))
        finally:
            # However the engine takes it: whoever waits for the outcome holds a place that others wait for.
            if self._machine.state in FINAL and not self.outcome.done():
                self._finish()

    def tick(self) -> None:
        """Time has passed."""
        offered_s, limit_s = self._offered_s, self._workplace.settings.migration_s
        if offered_s is not None and self._workplace.clock() - offered_s >= limit_s:
            self.handle(Cancel(f"it took more than {limit_s:g} s"))
        self.handle(Tick())

    def look(self) -> None:
        """The outputs of a step are on their way to the frontends. What a step brought counts only from then on, so
        that no token is left behind here when the request moves."""
        if self._machine.state in FINAL:
            return
        if self._workplace.instance.table.find(self.request_id) is not self._tracked:
            if self._machine.state not in PAUSED:
                self.handle(Ended())
            return
        told_tokens = len(self._tracked.emitted_token_ids)
        paused, progress = self._paused, self._take_progress()
        if progress is not None:
            self.handle(progress)
        if paused is not None and not self._is_told and told_tokens >= len(paused.emitted_token_ids):
            self._is_told = True
            self._block_ids = paused.block_ids
            self.handle(Paused(paused.emitted_token_ids, paused.computed_tokens, len(paused.block_ids)))

    def keep_abort(self) -> bool:
        """The request is to be aborted. True if it stands still and the abort has to wait until that is over."""
        if self._machine.state not in PAUSED:
            return False
        self._abort_waits = True
        self.handle(Cancel("the request was taken back"))
        return True

    def _take_progress(self) -> Progress | None:
        """What is new, once its tokens are on their way."""
        news = self._news
        if news is None or len(self._tracked.emitted_token_ids) < news.emitted_tokens:
            return None
        progress = Progress(len(news.block_ids), self._decodes(news))
        if progress == self._taken:
            return None
        self._taken, self._block_ids = progress, news.block_ids
        return progress

    def _note_ending(self, event: SourceEvent) -> None:
        if isinstance(event, Ended):
            self._ending = "ended"
        elif isinstance(event, Refuse):
            self._ending = "refused"

    def _decodes(self, progress: ExportProgress) -> bool:
        """Whether it has emitted tokens here, and the engine has told of all blocks from before: some tell of them
        a while later, and a pause before that would leave everything to the last round."""
        request, told_tokens = self._tracked.request, len(self._tracked.emitted_token_ids)
        known_tokens = len(request.prompt_token_ids) + len(request.emitted_token_ids)
        known_blocks = known_tokens // self._workplace.instance.description.block_tokens
        return told_tokens > len(request.emitted_token_ids) and len(progress.block_ids) >= known_blocks

    def _on_progress(self, progress: ExportProgress) -> None:
        self._news = progress
        if self._is_started:
            self.look()  # a step of a prefill has no output that would be heard of

    def _carry_out(self, instructions: tuple[SourceInstruction, ...]) -> None:
        engine = self._workplace.engine
        for instruction in instructions:
            match instruction:
                case Send(message):
                    self.link.send(self._wire_message(message))
                case Pause():
                    self._workplace.tasks.spawn(self._pause(), name=f"pause {self.migration_id}")
                case Resume():
                    engine.resume(self.request_id)
                case Release():
                    engine.release(self.request_id, self.migration_id)
                    self._workplace.instance.hand_away(
                        self.request_id, self.link.target.member_id, self.link.target.incarnation_id
                    )
                case GiveUp(reason):
                    engine.release(self.request_id, self.migration_id)
                    self._workplace.instance.give_up(self.request_id, reason)

    def _wire_message(self, message: ToTarget) -> migration_pb2.SourceMessage:
        instance = self._workplace.instance
        if isinstance(message, Offer):
            self._offered_s = self._offered_s or self._workplace.clock()
            deadline_s = self._tracked.deadline_s
            left_ms = 0 if deadline_s is None else max(1, round(1000 * (deadline_s - self._workplace.clock())))
            return wire.offer_message(message, model=instance.description.model, deadline_ms=left_ms)
        if not isinstance(message, (Round, HandOver)):
            return wire.source_message(message, (), ())
        stop = message.first_block + message.block_count
        covered = stop * instance.description.block_tokens - len(self._tracked.request.prompt_token_ids)
        emitted = self._tracked.emitted_token_ids[: max(0, covered)]
        return wire.source_message(message, self._block_ids[message.first_block : stop], emitted)

    async def _pause(self) -> None:
        try:
            paused = await self._workplace.engine.pause(self.request_id)
        except Exception as error:
            log.exception("the engine could not pause a request", extra={"request_id": self.request_id})
            self.handle(Cancel(f"the engine could not pause it: {error!r}"))
            return
        self._paused_at_s = self._workplace.clock()
        if paused is None:
            self.handle(Ended())
            return
        self._paused = paused
        self.look()

    def _finish(self) -> None:
        workplace, state = self._workplace, self._machine.state
        paused_s = 0.0 if self._paused is None else workplace.clock() - self._paused_at_s
        moved = state is SourceState.MOVED
        blocks = len(self._block_ids) if moved else self._machine.copied_blocks
        rounds = self._machine.rounds
        ending = "moved" if moved else self._ending
        self.outcome.set_result(MigrationOutcome(moved, self._machine.reason, ending, rounds, blocks, 1000 * paused_s))
        moved_blocks = blocks if moved else 0
        seconds = 0.0 if self._offered_s is None else workplace.clock() - self._offered_s
        workplace.metrics.ended(
            "out", state.value, moved_blocks, moved_blocks * workplace.engine.kv_block_bytes, seconds
        )
        if self._paused is not None:
            workplace.metrics.paused(paused_s)
        level = logging.ERROR if state is SourceState.LOST else logging.INFO
        log.log(level, "a migration ended", extra={"request_id": self.request_id, "story": self._machine.story})
        if state is SourceState.KEPT:
            workplace.engine.withdraw(self.request_id, self.migration_id)
            if self._abort_waits:
                workplace.engine.abort(self.request_id)
