"""Prefixes that one instance holds for others while they pull them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from controlplane.protocols.prefix_pull.limits import PullLimits
from controlplane.protocols.prefix_pull.target import ObstacleChanged, Stopped, Tick
from mesh.errors import IllegalTransition
from mesh.invariants import invariants


class HoldState(StrEnum):
    """Where a hold stands."""

    PINNING = "pinning"
    """The engine has been asked which blocks are there, and may be waiting for some."""
    HELD = "held"
    """Blocks are pinned, and may be read."""
    RELEASED = "released"


TRANSITIONS: dict[HoldState, frozenset[HoldState]] = {
    HoldState.PINNING: frozenset({HoldState.HELD, HoldState.RELEASED}),
    HoldState.HELD: frozenset({HoldState.RELEASED}),
    HoldState.RELEASED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class HoldAsked:
    """A peer wants the leading blocks of a prompt held."""

    hold_id: str
    blocks: int
    wait_ms: float
    """For blocks that are being computed here."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Engine: this many leading blocks are pinned."""

    hold_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class NotPinned:
    """Engine: none are, and why."""

    hold_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The peer has what it wanted, wants no more, or is lost."""

    hold_id: str


HoldEvent: TypeAlias = HoldAsked | Pinned | NotPinned | CallEnded | ObstacleChanged | Tick | Stopped


@dataclass(frozen=True, slots=True)
class Pin:
    """Have the engine pin what is cached; answer Pinned or NotPinned."""

    hold_id: str
    blocks: int
    wait_ms: float


@dataclass(frozen=True, slots=True)
class Unpin:
    """Let go; what has not been pinned yet is not to be pinned."""

    hold_id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell the peer which blocks it may pull; the call goes on."""

    hold_id: str


@dataclass(frozen=True, slots=True)
class EndCall:
    """Tell the peer that nothing is held (any more), and end the call."""

    hold_id: str
    reason: str


HoldInstruction: TypeAlias = Pin | Unpin | Answer | EndCall
_Instructions: TypeAlias = Iterator[HoldInstruction]


@dataclass(slots=True, eq=False)
class _Hold:
    hold_id: str
    ends_ms: float
    state: HoldState = HoldState.PINNING

    def become(self, state: HoldState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"hold {self.hold_id} cannot go from {self.state} to {state}")
        self.state = state


class HoldManager:
    """Bounds how many prefixes are held, and for how long. Feed events to `handle` and carry out what it returns, in
    order. `Tick` is due every 50 ms or so while there are any `hold_ids`."""

    def __init__(self, limits: PullLimits | None = None) -> None:
        self.limits = limits or PullLimits()
        self._holds: dict[str, _Hold] = {}
        """Those that are not released."""
        self._obstacle_reason = ""

    def handle(self, event: HoldEvent, now_ms: float) -> tuple[HoldInstruction, ...]:
        """What is to be done about `event`."""
        handler: Callable[[HoldEvent, float], _Instructions] = _HANDLERS[type(event)].__get__(self)
        return tuple(handler(event, now_ms))

    @property
    def hold_ids(self) -> tuple[str, ...]:
        """Of all that are held or about to be."""
        return tuple(self._holds)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where the state contradicts itself or exceeds a bound."""
        assert len(self._holds) <= self.limits.holding, "too many prefixes are held"
        for hold_id, hold in self._holds.items():
            assert hold_id == hold.hold_id, "each by its own id"
            assert hold.state is not HoldState.RELEASED, "what is released is forgotten"

    def _on_asked(self, event: HoldAsked, now_ms: float) -> _Instructions:
        if event.hold_id in self._holds:
            return  # a copy of a message that has been heard
        reason = self._obstacle_reason
        if not reason and len(self._holds) >= self.limits.holding:
            reason = f"{len(self._holds)} prefixes are held for others already"
        if reason:
            yield EndCall(event.hold_id, reason)
            return
        self._holds[event.hold_id] = _Hold(event.hold_id, now_ms + self.limits.hold_ms)
        yield Pin(event.hold_id, event.blocks, event.wait_ms)

    def _on_pinned(self, event: Pinned, now_ms: float) -> _Instructions:
        hold = self._holds.get(event.hold_id)
        if hold is None:
            yield Unpin(event.hold_id)  # it was let go while it was pinned
        elif hold.state is HoldState.PINNING and event.blocks > 0:
            hold.become(HoldState.HELD)
            yield Answer(event.hold_id)
        elif hold.state is HoldState.PINNING:
            yield from self._release(hold, "none of the blocks are here")

    def _on_not_pinned(self, event: NotPinned, now_ms: float) -> _Instructions:
        hold = self._holds.get(event.hold_id)
        if hold is not None and hold.state is HoldState.PINNING:
            yield from self._release(hold, event.reason)

    def _on_call_ended(self, event: CallEnded, now_ms: float) -> _Instructions:
        hold = self._holds.get(event.hold_id)
        if hold is not None:
            yield from self._release(hold)

    def _on_obstacle(self, event: ObstacleChanged, now_ms: float) -> _Instructions:
        self._obstacle_reason = event.reason
        return iter(())

    def _on_tick(self, event: Tick, now_ms: float) -> _Instructions:
        for hold in tuple(self._holds.values()):
            if now_ms >= hold.ends_ms:
                yield from self._release(hold, f"held for {self.limits.hold_ms:.0f} ms, the longest there is")

    def _on_stopped(self, event: Stopped, now_ms: float) -> _Instructions:
        self._obstacle_reason = "the worker ends"
        for hold in tuple(self._holds.values()):
            yield from self._release(hold, self._obstacle_reason)

    def _release(self, hold: _Hold, reason: str = "") -> _Instructions:
        """`reason`: the peer has to be told."""
        hold.become(HoldState.RELEASED)
        del self._holds[hold.hold_id]
        yield Unpin(hold.hold_id)
        if reason:
            yield EndCall(hold.hold_id, reason)


_HANDLERS: dict[type, Callable[..., _Instructions]] = {
    HoldAsked: HoldManager._on_asked,
    Pinned: HoldManager._on_pinned,
    NotPinned: HoldManager._on_not_pinned,
    CallEnded: HoldManager._on_call_ended,
    ObstacleChanged: HoldManager._on_obstacle,
    Tick: HoldManager._on_tick,
    Stopped: HoldManager._on_stopped,
}
