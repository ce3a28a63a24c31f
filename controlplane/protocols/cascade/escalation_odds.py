"""How likely an answer that is being written will go to the next tier, by what became of others like it (pure).

Answers are alike that have come as far and about which the model is as sure so far. Of each such group it is counted
how many were escalated: what a score is worth is learnt from what happened, whatever judge decides in the end.
"""

from collections.abc import Iterable
from math import log2
from typing import Final, NamedTuple

from controlplane.model.cascade_record import MAX_SCORE
from mesh.invariants import invariants

ENOUGH: Final = 20
"""Answers of a group before anything is said of it."""
REMEMBERED: Final = 256.0
"""Answers that a group's odds rest on: when there are more, all count half."""
_MOST_TOKENS_LOG2: Final = 12
_SUREST: Final = 12


class Progress(NamedTuple):
    """How far an answer has come, as its group."""

    stage: int
    """Doublings of its tokens; 0: none has come. `WHOLE`: it is complete and waits for its judge."""
    doubt: int
    """Halvings of (100 - score), of the score that it can still get; 0 for the least sure."""


WHOLE: Final = _MOST_TOKENS_LOG2 + 1
UNBEGUN: Final = Progress(0, 0)


def progress_of(tokens: int, score: float, *, is_whole: bool = False) -> Progress:
    """Of an answer with so many tokens; `score`: 0 to 100, 100 where nothing is known of it."""
    missing = 1 - min(max(score, 0.0), MAX_SCORE) / MAX_SCORE
    doubt = _SUREST if missing <= 2.0**-_SUREST else int(-log2(missing))
    stage = WHOLE if is_whole else min(tokens.bit_length(), _MOST_TOKENS_LOG2)
    return Progress(stage, doubt)


class EscalationOdds:
    """Of one tier under one threshold and judge."""

    def __init__(self) -> None:
        self._seen: dict[Progress, tuple[float, float]] = {}
        """(escalated, all) answers that passed through each group."""

    def note(self, passed: Iterable[Progress], escalated: bool) -> None:
        """What was decided of an answer that passed through these groups."""
        for group in passed:
            up, total = self._seen.get(group, (0.0, 0.0))
            if total >= REMEMBERED:
                up, total = up / 2, total / 2
            self._seen[group] = (up + escalated, total + 1)

    def p_escalates(self, group: Progress) -> float:
        """The chance to be escalated, with Jeffreys' prior; 0 while too few such answers are known."""
        up, total = self._seen.get(group, (0.0, 0.0))
        return (up + 0.5) / (total + 1) if total >= ENOUGH else 0.0

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where counts cannot be."""
        assert len(self._seen) <= (WHOLE + 1) * (_SUREST + 1)
        assert all(0 <= up <= total <= REMEMBERED for up, total in self._seen.values())
