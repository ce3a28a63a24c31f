"""Which schedulers are asked who decodes one request whose prompt is computed, and when that is given up. Pure.

    NEW --begun--> ASKING --answered, given up--> DECIDED
                    |  ^
                    '--' missed, or another scheduler leads

The request is decoded where it is meanwhile, and for good if nobody says otherwise. So schedulers are asked one after
another, and few: an answer that comes late moves more KV for less. Time is no argument: each `Ask` has a deadline, and
its end is an event.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from mesh.errors import IllegalTransition
from mesh.invariants import invariants

DEADLINE_S: Final = 0.5
"""For the answer to one question."""
MAX_ASKED: Final = 3
"""Schedulers, for one request."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer is wanted."""

    scheduler_ids: tuple[str, ...]
    """Those in the mesh, each once."""
    connected_id: str = ""
    """The one that was asked last: it is asked first, since a connection to it is open. Empty: none."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The scheduler that was asked has answered."""

    instance_id: str
    """Who decodes the request; empty: it stays."""
    leader_id: str = ""
    """The scheduler whose word counts, if it is one: where it is another one, `instance_id` says nothing."""


@dataclass(frozen=True, slots=True)
class Missed:
    """The scheduler that was asked does not answer in time, or cannot."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stale:
    """It answered as the leader that it was: another one has been heard of since. Who that is, it does not know."""

    reason: str


Event: TypeAlias = Begun | Answered | Missed | Stale


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this scheduler, and tell `Answered`, `Missed` or `Stale`."""

    scheduler_id: str
    deadline_s: float = DEADLINE_S


@dataclass(frozen=True, slots=True)
class Use:
    """This instance decodes the request; empty: the one where it is."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The request is decoded where it is, though that was not meant so."""

    reason: str


Instruction: TypeAlias = Ask | Use | GiveUp


class InquiryState(Enum):
    """How far a question has come."""

    NEW = "new"
    ASKING = "asking"
    DECIDED = "decided"


class DecodeInquiry:
    """Of one request. Raises `IllegalTransition` for events that only a bug can bring, in a wrong order."""

    def __init__(self, request_id: str) -> None:
        self.state = InquiryState.NEW
        self._request_id = request_id
        self._left: list[str] = []
        """Those that may still be asked, in that order."""
        self._asked: list[str] = []

    def handle(self, event: Event) -> tuple[Instruction, ...]:
        """What is to be done about `event`: one more question, or how it ends."""
        expected = InquiryState.NEW if isinstance(event, Begun) else InquiryState.ASKING
        if self.state is not expected:
            asked = f"{self.state.value}, asked of {self._asked}"
            raise IllegalTransition(f"who decodes {self._request_id} is {asked}; {event} is out of place")
        return tuple(self._handle(event))

    def _handle(self, event: Event) -> Iterator[Instruction]:
        match event:
            case Begun(scheduler_ids, connected_id):
                first = scheduler_ids.index(connected_id) if connected_id in scheduler_ids else 0
                self._left = [*scheduler_ids[first:], *scheduler_ids[:first]]
                yield self._ask() if self._left else self._give_up("the mesh has no scheduler now")
            case Answered(instance_id, leader_id):
                if leader_id in ("", self._asked[-1]):
                    self.state = InquiryState.DECIDED
                    yield Use(instance_id)
                elif leader_id in self._left:
                    self._left.remove(leader_id)
                    self._left.insert(0, leader_id)
                    yield self._ask()
                else:
                    yield self._give_up(f"{leader_id} leads the schedulers, and is not there or was asked before")
            case Missed(reason):
                yield self._ask() if self._left else self._give_up(reason)
            case Stale(reason):
                yield self._give_up(reason)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert len(set(self._asked)) == len(self._asked) <= MAX_ASKED, "nobody is asked twice, and not all are"
        assert not set(self._asked) & set(self._left), "who was asked is not asked again"
        assert self._asked or self.state is not InquiryState.ASKING, "it waits for somebody"

    def _ask(self) -> Instruction:
        if len(self._asked) == MAX_ASKED:
            return self._give_up(f"none of {', '.join(self._asked)} could say who decodes {self._request_id}")
        self.state = InquiryState.ASKING
        self._asked.append(self._left.pop(0))
        return Ask(self._asked[-1])

    def _give_up(self, reason: str) -> GiveUp:
        self.state = InquiryState.DECIDED
        return GiveUp(reason)
