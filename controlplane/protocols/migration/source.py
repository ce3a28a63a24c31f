"""The source's side of a migration."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from controlplane.model.request import EngineRequest
from controlplane.protocols.migration.limits import MigrationLimits
from controlplane.protocols.migration.messages import (
    Abort,
    Accept,
    Committed,
    Failed,
    FinalMessage,
    Offer,
    Pulled,
    Refuse,
    Round,
    ToTarget,
)
from mesh.errors import IllegalTransition
from mesh.invariants import invariants


class SourceState(StrEnum):
    """Where a migration stands, seen from the source."""

    WAITING = "waiting"
    """Nothing of the request is computed yet: the target knows nothing, and keeps no room for it."""
    OFFERED = "offered"
    """Waiting for the target's answer; the request runs."""
    COPYING = "copying"
    """Rounds of pre-copy; the request runs."""
    PAUSING = "pausing"
    """The engine has been asked to pause the request after its current step."""
    COMMITTING = "committing"
    """Paused, and sent whole; waiting for the target to commit."""
    TAKING_BACK = "taking_back"
    """Paused; the target has been asked to drop it."""
    MOVED = "moved"
    """The target owns the request."""
    KEPT = "kept"
    """The migration ended and the request is still, or was until its end, here."""
    LOST = "lost"
    """The target did not answer: the request was given up for recovery."""


TRANSITIONS: dict[SourceState, frozenset[SourceState]] = {
    SourceState.WAITING: frozenset({SourceState.OFFERED, SourceState.KEPT}),
    SourceState.OFFERED: frozenset({SourceState.COPYING, SourceState.KEPT}),
    SourceState.COPYING: frozenset({SourceState.PAUSING, SourceState.KEPT}),
    SourceState.PAUSING: frozenset({SourceState.COMMITTING, SourceState.KEPT}),
    SourceState.COMMITTING: frozenset({SourceState.MOVED, SourceState.KEPT, SourceState.TAKING_BACK, SourceState.LOST}),
    SourceState.TAKING_BACK: frozenset({SourceState.MOVED, SourceState.KEPT, SourceState.LOST}),
    SourceState.MOVED: frozenset(),
    SourceState.KEPT: frozenset(),
    SourceState.LOST: frozenset(),
}
FINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)
PAUSED = frozenset({SourceState.COMMITTING, SourceState.TAKING_BACK})


@dataclass(frozen=True, slots=True)
class Progress:
    """Engine: so many blocks of the request are complete. `decoding` once its first token was emitted."""

    full_blocks: int
    decoding: bool


@dataclass(frozen=True, slots=True)
class Paused:
    """Engine: the request is paused, with exactly these tokens; all of them were sent to the frontend."""

    emitted_token_ids: tuple[int, ...]
    computed_tokens: int
    blocks: int
    """Blocks that hold its KV, the partly filled last one included."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Engine: the request ended by itself (or was aborted by its client) before it was paused."""


@dataclass(frozen=True, slots=True)
class TargetLost:
    """The target's process is gone."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Whoever ordered the migration takes the order back."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


SourceEvent: TypeAlias = (
    Accept | Refuse | Pulled | Committed | Failed | Progress | Paused | Ended | TargetLost | Cancel | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the target."""

    message: ToTarget


@dataclass(frozen=True, slots=True)
class Pause:
    """Have the engine pause the request after its current step; its blocks stay."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Have the engine go on with the paused request."""


@dataclass(frozen=True, slots=True)
class Release:
    """The target owns the request: free its blocks here and tell the frontend where it lives."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nobody is known to own the request: free its blocks here and have the frontend recover it."""

    reason: str


SourceInstruction: TypeAlias = Send | Pause | Resume | Release | GiveUp


class SourceMigration:
    """One migration, seen from the instance that has the request.

    Feed events to `handle` and carry out what it returns, in order. The request is this instance's until the state
    is MOVED or LOST; it stands still in COMMITTING and TAKING_BACK, and in PAUSING from when the engine says so.
    """

    def __init__(
        self,
        migration_id: str,
        request: EngineRequest,
        *,
        epoch: int,
        frontend_id: str,
        limits: MigrationLimits,
        now_ms: float,
    ) -> None:
        """`epoch` is the request's present one."""
        self.migration_id = migration_id
        self.state = SourceState.WAITING
        self.reason = ""
        """Why the migration ended as it did."""
        self.rounds = 0
        self.copied_blocks = 0
        """Blocks that the target has said to have."""
        self._limits = limits
        self._progress = Progress(0, False)
        self._decoding_rounds = 0
        self._unanswered: ToTarget | None = None
        self._sent_ms = now_ms
        self._entered_ms = now_ms
        self._story = [f"{now_ms:.0f} ms: ordered"]
        self._offer = Offer(migration_id, request, epoch + 1, frontend_id)

    def start(self, progress: Progress | None = None) -> tuple[SourceInstruction, ...]:
        """The offer. If the engine has told of its progress and nothing is computed, it is made as soon as something
        is: a request that waits for its turn here must not hold memory there."""
        if progress is not None:
            self._progress = progress
            if not _has_begun(progress):
                return ()
        return self._make_offer(self._entered_ms)

    def handle(self, event: SourceEvent, now_ms: float) -> tuple[SourceInstruction, ...]:
        """What is to be done about `event`. Events that come too late to matter return nothing."""
        if self.state in FINAL:
            return ()
        handler: Callable[[SourceEvent, float], tuple[SourceInstruction, ...]] = _HANDLERS[type(event)].__get__(self)
        return handler(event, now_ms)

    @property
    def story(self) -> str:
        """What happened so far, for logs and errors."""
        return f"migration {self.migration_id}: " + "; ".join(self._story)

    @property
    def awaits_step(self) -> bool:
        """Whether the next step of the engine decides how it goes on."""
        return self.state is SourceState.PAUSING or (self.state is SourceState.COPYING and self._unanswered is None)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where the state contradicts itself or exceeds a bound."""
        waits_for = type(self._unanswered)
        match self.state:
            case SourceState.WAITING:
                assert self._unanswered is None, self.story
                assert not self.copied_blocks, self.story
            case SourceState.OFFERED:
                assert waits_for is Offer, self.story
            case SourceState.COPYING | SourceState.PAUSING:
                assert self._unanswered is None or waits_for is Round, self.story
            case SourceState.COMMITTING:
                assert waits_for is FinalMessage, self.story
            case SourceState.TAKING_BACK:
                assert waits_for is Abort, self.story
        assert self.copied_blocks >= 0, self.story
        assert self._decoding_rounds <= min(self.rounds, self._limits.max_rounds), self.story

    def _on_accept(self, event: Accept, now_ms: float) -> tuple[SourceInstruction, ...]:
        if self.state is not SourceState.OFFERED:
            return ()
        self._enter(SourceState.COPYING, now_ms)
        self._unanswered = None
        return self._next_round(now_ms)

    def _on_refusal(self, event: Refuse | Failed, now_ms: float) -> tuple[SourceInstruction, ...]:
        """The target has nothing and never will: whatever the state, the request is ours."""
        return self._keep(event.reason, now_ms)

    def _on_pulled(self, event: Pulled, now_ms: float) -> tuple[SourceInstruction, ...]:
        outstanding = self._unanswered
        if not isinstance(outstanding, Round) or outstanding.number != event.number:
            return ()
        self.copied_blocks = outstanding.first_block + outstanding.block_count
        self._unanswered = None
        return self._next_round(now_ms)

    def _on_progress(self, event: Progress, now_ms: float) -> tuple[SourceInstruction, ...]:
        self._progress = event
        if self.state is SourceState.WAITING and _has_begun(event):
            return self._make_offer(now_ms)
        if self.state is SourceState.COPYING and self._unanswered is None:
            return self._next_round(now_ms)
        return ()

    def _on_paused(self, event: Paused, now_ms: float) -> tuple[SourceInstruction, ...]:
        if self.state is not SourceState.PAUSING:
            raise IllegalTransition(f"paused without having been asked to; {self.story}")
        self._enter(SourceState.COMMITTING, now_ms)
        message = FinalMessage(
            self.migration_id,
            event.emitted_token_ids,
            event.computed_tokens,
            first_block=self.copied_blocks,
            block_count=event.blocks - self.copied_blocks,
        )
        return self._send(message, now_ms)

    def _on_ended(self, event: Ended, now_ms: float) -> tuple[SourceInstruction, ...]:
        if self.state in PAUSED:
            raise IllegalTransition(f"a paused request cannot end by itself; {self.story}")
        self.reason = "the request ended before it was moved"
        is_known = self.state is not SourceState.WAITING
        self._enter(SourceState.KEPT, now_ms)
        return (Send(Abort(self.migration_id, self.reason)),) if is_known else ()

    def _on_target_lost(self, event: TargetLost, now_ms: float) -> tuple[SourceInstruction, ...]:
        if self.state in PAUSED:
            # It may have committed and sent tokens before it died: only the frontend can know.
            return self._give_up("the target died before it said whether it committed", now_ms)
        return self._keep("the target is gone", now_ms)

    def _on_cancel(self, event: Cancel, now_ms: float) -> tuple[SourceInstruction, ...]:
        if self.state in PAUSED:
            return self._take_back(event.reason, now_ms)
        if self.state is SourceState.WAITING:
            return self._keep(event.reason, now_ms)
        return self._abort(event.reason, now_ms)

    def _on_tick(self, event: Tick, now_ms: float) -> tuple[SourceInstruction, ...]:
        age_ms = now_ms - self._entered_ms
        limits = self._limits
        match self.state:
            case SourceState.OFFERED if age_ms >= limits.offer_ms:
                return self._abort("the target did not answer the offer", now_ms)
            case SourceState.COPYING if self._unanswered is not None and age_ms >= limits.round_ms:
                return self._abort(f"round {self.rounds} was not copied in time", now_ms)
            case SourceState.COMMITTING if age_ms >= limits.commit_ms:
                return self._take_back("the target did not commit in time", now_ms)
            case SourceState.TAKING_BACK if age_ms >= limits.take_back_ms:
                return self._give_up("the target did not say whether it committed", now_ms)
        if self._unanswered is not None and now_ms - self._sent_ms >= limits.resend_ms:
            return self._send(self._unanswered, now_ms)
        return ()

    def _on_committed(self, event: Committed, now_ms: float) -> tuple[SourceInstruction, ...]:
        if self.state not in PAUSED:
            raise IllegalTransition(f"the target committed a request that was never sent to it; {self.story}")
        self._enter(SourceState.MOVED, now_ms)
        return (Release(),)

    def _make_offer(self, now_ms: float) -> tuple[SourceInstruction, ...]:
        self._enter(SourceState.OFFERED, now_ms)
        return self._send(self._offer, now_ms)

    def _next_round(self, now_ms: float) -> tuple[SourceInstruction, ...]:
        """The next round, the pause, or nothing while the prompt is still being computed."""
        remaining = self._progress.full_blocks - self.copied_blocks
        enough = remaining <= self._limits.last_round_blocks or self._decoding_rounds >= self._limits.max_rounds
        if self._progress.decoding and enough:
            self._enter(SourceState.PAUSING, now_ms)
            return (Pause(),)
        if remaining <= 0:
            return ()
        self.rounds += 1
        self._decoding_rounds += self._progress.decoding
        self._entered_ms = now_ms
        return self._send(Round(self.migration_id, self.rounds, self.copied_blocks, remaining), now_ms)

    def _keep(self, reason: str, now_ms: float) -> tuple[SourceInstruction, ...]:
        standing_still = self.state in PAUSED or self.state is SourceState.PAUSING
        self.reason = reason
        self._enter(SourceState.KEPT, now_ms)
        return (Resume(),) if standing_still else ()

    def _abort(self, reason: str, now_ms: float) -> tuple[SourceInstruction, ...]:
        """Before the final message the target cannot commit, so its answer need not be awaited."""
        kept = self._keep(reason, now_ms)
        return (Send(Abort(self.migration_id, reason)), *kept)

    def _take_back(self, reason: str, now_ms: float) -> tuple[SourceInstruction, ...]:
        if self.state is SourceState.TAKING_BACK:
            return ()
        self._enter(SourceState.TAKING_BACK, now_ms)
        return self._send(Abort(self.migration_id, reason), now_ms)

    def _give_up(self, reason: str, now_ms: float) -> tuple[SourceInstruction, ...]:
        self.reason = reason
        self._enter(SourceState.LOST, now_ms)
        return (GiveUp(reason),)

    def _send(self, message: ToTarget, now_ms: float) -> tuple[SourceInstruction, ...]:
        self._unanswered = message
        self._sent_ms = now_ms
        return (Send(message),)

    def _enter(self, state: SourceState, now_ms: float) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.state} cannot become {state}; {self.story}")
        self.state = state
        self._entered_ms = now_ms
        self._story.append(f"{now_ms:.0f} ms: {state}" + (f" ({self.reason})" if self.reason else ""))


def _has_begun(progress: Progress) -> bool:
    return progress.decoding or progress.full_blocks > 0


_HANDLERS: dict[type, Callable[..., tuple[SourceInstruction, ...]]] = {
    Accept: SourceMigration._on_accept,
    Refuse: SourceMigration._on_refusal,
    Failed: SourceMigration._on_refusal,
    Pulled: SourceMigration._on_pulled,
    Committed: SourceMigration._on_committed,
    Progress: SourceMigration._on_progress,
    Paused: SourceMigration._on_paused,
    Ended: SourceMigration._on_ended,
    TargetLost: SourceMigration._on_target_lost,
    Cancel: SourceMigration._on_cancel,
    Tick: SourceMigration._on_tick,
}
