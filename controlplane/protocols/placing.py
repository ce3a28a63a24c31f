"""Which schedulers one request is asked of, until one has answered or none is left. Pure.

A scheduler that misses is replaced at once; one that is only slow is kept, and another one asked besides (the hedged
requests of Dean and Barroso, "The Tail at Scale"). Whoever was asked in vain is told that the request has ended there:
it may have counted it as load of an instance.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from mesh.errors import IllegalTransition
from mesh.invariants import invariants

MAX_ASKED: Final = 3
"""Schedulers that one placement is asked of; then the fallback places."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this scheduler where the request goes; tell `answered` or `missed`."""

    scheduler_id: str


@dataclass(frozen=True, slots=True)
class Retract:
    """Tell this scheduler that the request has ended there."""

    scheduler_id: str


@dataclass(frozen=True, slots=True)
class Use:
    """Place the request as this scheduler answered; no other answer counts any more."""

    scheduler_id: str


@dataclass(frozen=True, slots=True)
class FallBack:
    """No scheduler answers: place without one."""

    reason: str


Instruction: TypeAlias = Ask | Retract | Use | FallBack


class Candidate(NamedTuple):
    """A scheduler that may be asked."""

    scheduler_id: str
    outstanding: int
    """Placements that it was asked for and has not answered."""


def least_outstanding(candidates: Sequence[Candidate], turn: int) -> str | None:
    """The scheduler with the fewest unanswered placements; among equals the `turn`-th, cyclically."""
    if not candidates:
        return None
    fewest = min(candidate.outstanding for candidate in candidates)
    tied = [candidate.scheduler_id for candidate in candidates if candidate.outstanding == fewest]
    return tied[turn % len(tied)]


class PlacementAttempt:
    """Of one request. Every call returns what is to be done, in order; after `Use` or `FallBack` there is nothing more.

    `choose` names a scheduler other than those given, or None.
    """

    def __init__(self, choose: Callable[[Collection[str]], str | None]) -> None:
        self._choose = choose
        self._asked: list[str] = []
        self._waiting: list[str] = []
        """Those asked that may still answer."""
        self._reason = "no scheduler is connected"
        self.decided = False

    def begin(self) -> list[Instruction]:
        """Ask the first scheduler, or fall back if there is none. Once; raises IllegalTransition after that."""
        if self._asked or self.decided:
            raise IllegalTransition(f"a placement begins again; it was asked of {self._asked}")
        return self._ask_another() or self._fall_back()

    def slow(self) -> list[Instruction]:
        """Nobody has answered for a while: ask one more, if there is one."""
        return [] if self.decided else self._ask_another()

    def answered(self, scheduler_id: str) -> list[Instruction]:
        """A scheduler gave an answer that can be used."""
        if self.decided or scheduler_id not in self._waiting:
            return []
        self._waiting.remove(scheduler_id)
        self.decided = True
        return [*self._retract(), Use(scheduler_id)]

    def missed(self, scheduler_id: str, reason: str) -> list[Instruction]:
        """A scheduler will not answer in time, or cannot. It may have placed the request all the same."""
        if self.decided or scheduler_id not in self._waiting:
            return []
        self._waiting.remove(scheduler_id)
        self._reason = reason
        instructions: list[Instruction] = [Retract(scheduler_id), *self._ask_another()]
        return instructions if self._waiting else [*instructions, *self._fall_back()]

    def abandon(self) -> list[Instruction]:
        """Nobody wants the placement any more."""
        if self.decided:
            return []
        self.decided = True
        return self._retract()

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert len(set(self._asked)) == len(self._asked) <= MAX_ASKED, "nobody is asked twice, and not all are"
        assert set(self._waiting) <= set(self._asked), "only those that were asked may answer"
        if self._asked:
            assert self.decided is (not self._waiting), "it is waited for answers until it is decided, and not after"

    def _ask_another(self) -> list[Instruction]:
        if len(self._asked) >= MAX_ASKED:
            return []
        scheduler_id = self._choose(self._asked)
        if scheduler_id is None:
            return []
        assert scheduler_id not in self._asked, f"{scheduler_id} was asked before"
        self._asked.append(scheduler_id)
        self._waiting.append(scheduler_id)
        return [Ask(scheduler_id)]

    def _fall_back(self) -> list[Instruction]:
        self.decided = True
        return [FallBack(self._reason)]

    def _retract(self) -> list[Instruction]:
        waiting, self._waiting = self._waiting, []
        return [Retract(scheduler_id) for scheduler_id in waiting]
