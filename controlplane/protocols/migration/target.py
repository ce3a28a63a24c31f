"""The target's side of a migration."""

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
    ToSource,
)
from mesh.errors import IllegalTransition
from mesh.invariants import invariants


class TargetState(StrEnum):
    """Where a migration stands, seen from the target."""

    RESERVING = "reserving"
    """The engine has been asked for blocks."""
    RECEIVING = "receiving"
    """Blocks are reserved; rounds of pre-copy come and are pulled."""
    COMPLETING = "completing"
    """The source has paused the request; its last blocks are being pulled."""
    COMMITTED = "committed"
    """The request is this instance's."""
    DISCARDED = "discarded"
    """Nothing of it is here, and it will never run here."""


TRANSITIONS: dict[TargetState, frozenset[TargetState]] = {
    TargetState.RESERVING: frozenset({TargetState.RECEIVING, TargetState.DISCARDED}),
    TargetState.RECEIVING: frozenset({TargetState.COMPLETING, TargetState.DISCARDED}),
    TargetState.COMPLETING: frozenset({TargetState.COMMITTED, TargetState.DISCARDED}),
    TargetState.COMMITTED: frozenset(),
    TargetState.DISCARDED: frozenset(),
}
FINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)
HOLDING = frozenset({TargetState.RECEIVING, TargetState.COMPLETING})
"""Blocks are reserved for a request that is not this instance's."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Engine: the blocks are there."""


@dataclass(frozen=True, slots=True)
class NotReserved:
    """Engine: no blocks, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """Transfer agent: these blocks are here, whole."""

    first_block: int
    block_count: int


@dataclass(frozen=True, slots=True)
class NotArrived:
    """Transfer agent: they could not be had, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The source's process is gone."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


TargetEvent: TypeAlias = (
    Offer | Round | FinalMessage | Abort | Reserved | NotReserved | Arrived | NotArrived | SourceLost | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the source."""

    message: ToSource


@dataclass(frozen=True, slots=True)
class Reserve:
    """Have the engine set blocks aside for the request; answer Reserved or NotReserved."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Pull:
    """Have the transfer agent pull these blocks of the request from the source; answer Arrived or NotArrived.

    Of no blocks at all where everything was copied before: the answer says then whether the request can be run here.
    """

    first_block: int
    block_count: int


@dataclass(frozen=True, slots=True)
class Activate:
    """Have the engine run the request from here on, under the offer's epoch. Its blocks become the request's own."""

    emitted_token_ids: tuple[int, ...]
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Free the reserved blocks, once a transfer into them has ended."""


TargetInstruction: TypeAlias = Send | Reserve | Pull | Activate | Discard


class TargetMigration:
    """One migration, seen from the instance that is to have the request.

    It is made from the source's offer; feed every event to `handle` and carry out what it returns, in order. The
    point of no return is the arrival of the last block: COMMITTED and DISCARDED are both for ever, and the object
    must be kept for a while after, because the source may ask again.
    """

    def __init__(self, offer: Offer, *, limits: MigrationLimits, now_ms: float) -> None:
        self.migration_id = offer.migration_id
        self.offer = offer
        self.state = TargetState.RESERVING
        self.reason = ""
        """Why it was discarded."""
        self._limits = limits
        self._heard_ms = now_ms
        self._pulling: Round | FinalMessage | None = None
        self._pulled_round = 0
        self._story = [f"{now_ms:.0f} ms: offered"]

    def start(self) -> tuple[TargetInstruction, ...]:
        """The reservation."""
        return (Reserve(self.offer.request),)

    def handle(self, event: TargetEvent, now_ms: float) -> tuple[TargetInstruction, ...]:
        """What is to be done about `event`."""
        if isinstance(event, (Offer, Round, FinalMessage, Abort)):
            self._heard_ms = now_ms
        if self.state in FINAL:
            return self._answer_again(event)
        handler: Callable[[TargetEvent, float], tuple[TargetInstruction, ...]] = _HANDLERS[type(event)].__get__(self)
        return handler(event, now_ms)

    @property
    def story(self) -> str:
        """What happened so far, for logs and errors."""
        return f"migration {self.migration_id}: " + "; ".join(self._story)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where the state contradicts itself."""
        match self.state:
            case TargetState.RESERVING:
                assert self._pulling is None, self.story
            case TargetState.RECEIVING:
                assert self._pulling is None or isinstance(self._pulling, Round), self.story
            case TargetState.COMPLETING:
                assert isinstance(self._pulling, FinalMessage), self.story

    def _answer_again(self, event: TargetEvent) -> tuple[TargetInstruction, ...]:
        """The source has not heard how it ended, or the engine not yet that it did."""
        if isinstance(event, Reserved) and self.state is TargetState.DISCARDED:
            return (Discard(),)
        if not isinstance(event, (Offer, Round, FinalMessage, Abort)):
            return ()
        if self.state is TargetState.COMMITTED:
            return (Send(Committed(self.migration_id)),)
        return (Send(Failed(self.migration_id, self.reason)),)

    def _on_offer(self, event: Offer, now_ms: float) -> tuple[TargetInstruction, ...]:
        """The same offer again: the answer was lost."""
        return () if self.state is TargetState.RESERVING else (Send(Accept(self.migration_id)),)

    def _on_reserved(self, event: Reserved, now_ms: float) -> tuple[TargetInstruction, ...]:
        self._enter(TargetState.RECEIVING, now_ms)
        return (Send(Accept(self.migration_id)),)

    def _on_not_reserved(self, event: NotReserved, now_ms: float) -> tuple[TargetInstruction, ...]:
        self.reason = event.reason
        self._enter(TargetState.DISCARDED, now_ms)
        return (Send(Refuse(self.migration_id, event.reason)),)

    def _on_round(self, event: Round, now_ms: float) -> tuple[TargetInstruction, ...]:
        if self.state is not TargetState.RECEIVING or self._pulling == event:
            return ()
        if event.number <= self._pulled_round:
            return (Send(Pulled(self.migration_id, event.number)),)
        return self._pull(event)

    def _on_final_message(self, event: FinalMessage, now_ms: float) -> tuple[TargetInstruction, ...]:
        if self.state is not TargetState.RECEIVING:
            return ()
        self._enter(TargetState.COMPLETING, now_ms)
        return self._pull(event)

    def _on_arrived(self, event: Arrived, now_ms: float) -> tuple[TargetInstruction, ...]:
        pulling = self._pulling
        if pulling is None or (event.first_block, event.block_count) != (pulling.first_block, pulling.block_count):
            raise IllegalTransition(f"blocks arrived that were not asked for: {event}; {self.story}")
        self._pulling = None
        if isinstance(pulling, FinalMessage):
            return self._commit(pulling, now_ms)
        self._pulled_round = pulling.number
        return (Send(Pulled(self.migration_id, pulling.number)),)

    def _on_not_arrived(self, event: NotArrived, now_ms: float) -> tuple[TargetInstruction, ...]:
        return self._discard(event.reason, now_ms)

    def _on_abort(self, event: Abort, now_ms: float) -> tuple[TargetInstruction, ...]:
        return self._discard(event.reason, now_ms)

    def _on_source_lost(self, event: SourceLost, now_ms: float) -> tuple[TargetInstruction, ...]:
        """While the last blocks travel their own end decides: they may all be here already."""
        return () if self.state is TargetState.COMPLETING else self._discard("the source is gone", now_ms)

    def _on_tick(self, event: Tick, now_ms: float) -> tuple[TargetInstruction, ...]:
        if self._pulling is None and now_ms - self._heard_ms >= self._limits.idle_ms:
            return self._discard("the source fell silent", now_ms)
        return ()

    def _pull(self, work: Round | FinalMessage) -> tuple[TargetInstruction, ...]:
        self._pulling = work
        return (Pull(work.first_block, work.block_count),)

    def _commit(self, work: FinalMessage, now_ms: float) -> tuple[TargetInstruction, ...]:
        self._enter(TargetState.COMMITTED, now_ms)
        activate = Activate(work.emitted_token_ids, work.computed_tokens)
        return (activate, Send(Committed(self.migration_id)))

    def _discard(self, reason: str, now_ms: float) -> tuple[TargetInstruction, ...]:
        holding = self.state in HOLDING
        self.reason = reason
        self._enter(TargetState.DISCARDED, now_ms)
        answer = Send(Failed(self.migration_id, reason))
        return (Discard(), answer) if holding else (answer,)

    def _enter(self, state: TargetState, now_ms: float) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.state} cannot become {state}; {self.story}")
        self.state = state
        self._story.append(f"{now_ms:.0f} ms: {state}" + (f" ({self.reason})" if self.reason else ""))


_HANDLERS: dict[type, Callable[..., tuple[TargetInstruction, ...]]] = {
    Offer: TargetMigration._on_offer,
    Reserved: TargetMigration._on_reserved,
    NotReserved: TargetMigration._on_not_reserved,
    Round: TargetMigration._on_round,
    FinalMessage: TargetMigration._on_final_message,
    Arrived: TargetMigration._on_arrived,
    NotArrived: TargetMigration._on_not_arrived,
    Abort: TargetMigration._on_abort,
    SourceLost: TargetMigration._on_source_lost,
    Tick: TargetMigration._on_tick,
}
