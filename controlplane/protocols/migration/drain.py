"""Empties an instance: which of its requests move where, and when one that stayed is tried again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from mesh.invariants import invariants

PAUSE_MS: Final = 200.0
"""Between two passes over what stayed; doubled after each that moved nothing."""
LONGEST_PAUSE_MS: Final = 5_000.0
MOVES_A_PASS: Final = 64


@dataclass(frozen=True, slots=True)
class Looked:
    """The requests that run here, and of them those that somebody else has ordered to move."""

    running: tuple[str, ...]
    ordered: frozenset[str]


@dataclass(frozen=True, slots=True)
class LoadsKnown:
    """The answer to `AskLoads`: waiting and running requests of each instance that can take some."""

    requests: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """The answer to `Move`."""

    request_id: str
    moved: bool


DrainEvent: TypeAlias = Looked | LoadsKnown | MoveEnded


@dataclass(frozen=True, slots=True)
class AskLoads:
    """Find out how loaded the other instances are; answer `LoadsKnown`."""


@dataclass(frozen=True, slots=True)
class Move:
    """Have a request moved; answer `MoveEnded`."""

    request_id: str
    target_id: str


@dataclass(frozen=True, slots=True)
class LookAfter:
    """Look again after so long; answer `Looked`."""

    delay_ms: float


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing runs here any more."""

    moved: int


DrainInstruction: TypeAlias = AskLoads | Move | LookAfter | Drained


class Drain:
    """One drain. It begins with `Looked`; feed events to `handle` and carry out what it returns.

    Requests go to the least loaded instances, and elsewhere where one is refused, until none is left: what cannot be
    moved now may be once another instance has room or is there again. What others have ordered may yet stay, and is
    looked at again.
    """

    def __init__(self) -> None:
        self._moved = 0
        self._pause_ms = PAUSE_MS
        self._candidates: tuple[str, ...] = ()
        self._moving: dict[str, str] = {}
        """Target of each request of this pass whose move has not ended."""
        self._succeeded = 0
        self._failed = 0
        """Moves of this pass."""
        self._refused_by: dict[str, frozenset[str]] = {}
        """Instances to which a move of a request has failed."""

    def handle(self, event: DrainEvent) -> tuple[DrainInstruction, ...]:
        """What is to be done about `event`."""
        match event:
            case Looked(running, ordered):
                return self._look(running, ordered)
            case LoadsKnown(requests):
                return self._plan(requests)
            case MoveEnded(request_id, moved):
                return self._ended(request_id, moved)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where the state contradicts itself or exceeds a bound."""
        assert len(self._moving) <= MOVES_A_PASS, f"{len(self._moving)} requests move at once"
        assert PAUSE_MS <= self._pause_ms <= LONGEST_PAUSE_MS, f"a pause of {self._pause_ms} ms"

    def _look(self, running: tuple[str, ...], ordered: frozenset[str]) -> tuple[DrainInstruction, ...]:
        assert not self._moving, f"{len(self._moving)} moves of the pass before have not ended"
        if not running:
            return (Drained(self._moved),)
        self._refused_by = {each: self._refused_by[each] for each in running if each in self._refused_by}
        self._candidates = tuple(each for each in running if each not in ordered)[:MOVES_A_PASS]
        return (AskLoads(),) if self._candidates else (self._pause(),)

    def _plan(self, requests: Mapping[str, int]) -> tuple[DrainInstruction, ...]:
        if not requests:
            return (self._pause(),)
        self._succeeded = self._failed = 0
        self._moving = assign(self._candidates, requests, self._refused_by)
        return tuple(Move(request_id, target_id) for request_id, target_id in self._moving.items())

    def _ended(self, request_id: str, moved: bool) -> tuple[DrainInstruction, ...]:
        target_id = self._moving.pop(request_id)
        self._moved += moved
        self._succeeded += moved
        if not moved:
            self._failed += 1
            self._refused_by[request_id] = self._refused_by.get(request_id, frozenset()) | {target_id}
        if self._moving:
            return ()
        return (self._pause() if self._failed else LookAfter(0.0),)

    def _pause(self) -> LookAfter:
        delay_ms = self._pause_ms
        self._pause_ms = PAUSE_MS if self._succeeded else min(2 * delay_ms, LONGEST_PAUSE_MS)
        self._succeeded = 0
        return LookAfter(delay_ms)


def assign(
    request_ids: Sequence[str], loads: Mapping[str, int], refused_by: Mapping[str, frozenset[str]]
) -> dict[str, str]:
    """A target for each request: the least loaded (`loads` in requests), counting those assigned before, that has not
    refused it; where all have, they are asked again."""
    counts = dict(sorted(loads.items()))
    plan: dict[str, str] = {}
    for request_id in request_ids:
        unwilling = refused_by.get(request_id, frozenset())
        if unwilling >= set(loads):
            unwilling = frozenset()
        target = min((each for each in counts if each not in unwilling), key=counts.__getitem__)
        counts[target] += 1
        plan[request_id] = target
    return plan
