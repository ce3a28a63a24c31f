"""Gathers the choices of a client's request from the workers that have them, for a client that came back to another
frontend. Pure; time is an argument.

    NEW --begin--> ASKING --all choices are here--> COMPLETE --looked after--> ENDED
                    |  ^
    some are missing|  |woken
                    v  |
                   PAUSED

Every state but ENDED may become ENDED: the request is another key's or is not found in time, or its client has left.
Then what was taken goes back to its workers, which keep it for the client's next try.

A life of a choice that has generated less than its client has seen is not gone on with: a recovery has left it behind,
on a worker that was frozen or cut off meanwhile. The life that the client knows may be found at the next try.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from controlplane.protocols.ownership import EPOCHS_PER_ADOPTION, EPOCHS_PER_RECOVERY
from mesh.errors import IllegalTransition
from mesh.invariants import invariants

ANSWER_S: Final = 1.0
"""How long workers are given to say what they have."""
RETRY_S: Final = 0.2
PATIENCE_S: Final = 3.0
"""For a request that is nowhere just now: it may be moving, or the frontend that was asked has only just started."""


class AdoptionState(StrEnum):
    """How far the gathering is."""

    NEW = "new"
    """Nobody was asked yet."""
    ASKING = "asking"
    """All workers are asked for what they have."""
    PAUSED = "paused"
    """Choices were missing; all workers are asked again after a pause."""
    COMPLETE = "complete"
    """All choices are here, and go back to their workers if nobody looks after them."""
    ENDED = "ended"
    """Somebody looks after the choices, or they were given back."""


TRANSITIONS: Final[dict[AdoptionState, frozenset[AdoptionState]]] = {
    AdoptionState.NEW: frozenset({AdoptionState.ASKING, AdoptionState.ENDED}),
    AdoptionState.ASKING: frozenset({AdoptionState.PAUSED, AdoptionState.COMPLETE, AdoptionState.ENDED}),
    AdoptionState.PAUSED: frozenset({AdoptionState.ASKING, AdoptionState.ENDED}),
    AdoptionState.COMPLETE: frozenset({AdoptionState.ENDED}),
    AdoptionState.ENDED: frozenset(),
}

# -- events


@dataclass(frozen=True, slots=True)
class Begin:
    """A client asks for the request, with this API key; empty where none is needed."""

    key_name: str


@dataclass(frozen=True, slots=True)
class Found:
    """A worker has a choice, which is this frontend's from now on."""

    index: int
    epoch: int
    choices: int
    """How many the request has in all."""
    key_name: str
    """Whose API key it was asked with."""
    is_behind: bool = False
    """The client has seen more of the choice than this worker has generated."""

    @property
    def life(self) -> tuple[int, int]:
        """The same wherever it moves and whoever adopts it."""
        return self.index, self.epoch % EPOCHS_PER_ADOPTION // EPOCHS_PER_RECOVERY


@dataclass(frozen=True, slots=True)
class AllAnswered:
    """All workers have said what they have, or the time for that is up."""


@dataclass(frozen=True, slots=True)
class Woken:
    """The pause is over."""


@dataclass(frozen=True, slots=True)
class LookedAfter:
    """Somebody reads the choices, and drops or releases them."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The client's connection has ended, or its request cannot be answered."""


Event: TypeAlias = Begin | Found | AllAnswered | Woken | LookedAfter | Closed

# -- instructions


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask all workers; say `Found` for each choice that one has, and `AllAnswered` after so long at most."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Take:
    """Go on with the choice."""

    is_newer: bool
    """Drop the one that was taken before: a recovery has left it behind."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Say `Woken` after so long. What was found goes back to its workers until then: asked again, they would take it
    from this frontend as from any other."""

    seconds: float
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """All choices are here: answer the client."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Give these choices back to their workers, and tell the client that there is no such request."""

    indexes: tuple[int, ...]
    missing: int
    """Choices that no worker has, of a request of which others were found."""
    behind: int = 0
    """Choices of which the client has seen more than any worker has."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release these choices to their workers, to be resumed once more."""

    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nothing:
    """There is nothing to do."""


Instruction: TypeAlias = Ask | Take | Pause | Resume | Refuse | GiveBack | Nothing


@dataclass(slots=True)
class AdoptionManager:
    """Of one client request. Every event is answered by the one thing to do next.

    Raises `IllegalTransition`, with the request's story, for an event that the state does not allow.
    """

    request_id: str
    state: AdoptionState = AdoptionState.NEW
    _key_name: str = ""
    _began_s: float = 0.0
    _found: dict[int, Found] = field(default_factory=dict)
    """The newest life of each choice, by its index."""
    _left_behind: set[tuple[int, int]] = field(default_factory=set)
    """Lives that were behind their client once. What they generate while others are asked for is not what it saw."""

    def handle(self, event: Event, now_s: float) -> Instruction:
        """What to do now that this has happened."""
        match event:
            case Begin(key_name):
                self._expect(event, AdoptionState.NEW)
                self._key_name, self._began_s = key_name, now_s
                return self._ask()
            case Found():
                self._expect(event, AdoptionState.ASKING)
                return self._take(event)
            case AllAnswered():
                self._expect(event, AdoptionState.ASKING)
                return self._judge(now_s)
            case Woken():
                self._expect(event, AdoptionState.PAUSED)
                return self._ask()
            case LookedAfter():
                self._expect(event, AdoptionState.COMPLETE)
                self._go(AdoptionState.ENDED)
                return Nothing()
            case Closed():
                if self.state is AdoptionState.ENDED:
                    return Nothing()
                self._go(AdoptionState.ENDED)
                return GiveBack(tuple(sorted(self._found)))

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        for index, found in self._found.items():
            assert index == found.index, self._story()
            assert 0 <= index < found.choices, self._story()
        if self.state is AdoptionState.COMPLETE:
            assert self._found, self._story()
            assert not self._missing(), self._story()
            assert not any(found.life in self._left_behind for found in self._found.values()), self._story()
        if self.state in (AdoptionState.NEW, AdoptionState.PAUSED):
            assert not self._found, self._story()

    def _ask(self) -> Ask:
        self._go(AdoptionState.ASKING)
        return Ask(ANSWER_S)

    def _take(self, found: Found) -> Take | Nothing:
        former = self._found.get(found.index)
        if not 0 <= found.index < found.choices:
            return Nothing()
        if found.is_behind:
            self._left_behind.add(found.life)
        # An adoption makes the epoch of a life higher that was left behind, too.
        if former is not None and self._rank(former) >= self._rank(found):
            return Nothing()
        self._found[found.index] = found
        return Take(is_newer=former is not None)

    def _judge(self, now_s: float) -> Instruction:
        missing = self._missing()
        behind = sum(found.life in self._left_behind for found in self._found.values())
        is_anothers = any(found.key_name != self._key_name for found in self._found.values())
        if self._found and not missing and not behind and not is_anothers:
            self._go(AdoptionState.COMPLETE)
            return Resume()
        if is_anothers or now_s - self._began_s >= PATIENCE_S:
            self._go(AdoptionState.ENDED)
            return Refuse(tuple(sorted(self._found)), *((0, 0) if is_anothers else (missing, behind)))
        self._go(AdoptionState.PAUSED)
        indexes = tuple(sorted(self._found))
        self._found.clear()
        return Pause(RETRY_S, indexes)

    def _rank(self, found: Found) -> tuple[bool, int]:
        """Of several lives of a choice, the one of the highest rank is the client's."""
        return found.life not in self._left_behind, found.epoch

    def _missing(self) -> int:
        choices = max((found.choices for found in self._found.values()), default=0)
        return choices - len(self._found)

    def _go(self, state: AdoptionState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self._story()} cannot become {state}")
        self.state = state

    def _expect(self, event: Event, state: AdoptionState) -> None:
        if self.state is not state:
            raise IllegalTransition(f"{self._story()} does not await {event}")

    def _story(self) -> str:
        return (
            f"the adoption of request {self.request_id}, {self.state}, begun at {self._began_s:.3f} s, with choices "
            f"{sorted(self._found)}"
        )
