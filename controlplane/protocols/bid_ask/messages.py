"""What sender and receiver say to each other. Every message may be lost, doubled or late."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Ask:
    """Sender: who takes this request?"""

    ask_id: str
    """Of this attempt to find a taker; never used again."""
    request_id: str
    context_tokens: int
    sender_load_tokens: int
    """Context of all requests that the sender offers, this one included."""
    frontend_id: str = ""
    """The frontend that the request's tokens go to: only who is connected to it can take the request. Empty: any."""


@dataclass(frozen=True, slots=True)
class Bid:
    """Receiver: I would take it, at this load and from then on."""

    ask_id: str
    load_tokens: int
    """Context of all requests that run or are queued there, those promised to it included."""
    earliest_start_ms: float
    """From now; context tokens promised to it over its measured throughput."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Receiver: I cannot take it, for this reason."""

    ask_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Award:
    """Sender: the request is promised to you; say Ready when you can take it."""

    ask_id: str
    request_id: str
    context_tokens: int
    sender_load_tokens: int
    frontend_id: str = ""
    """As in `Ask`: checked again, for the frontend may have gone since."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Receiver: it is in my queue."""

    ask_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Receiver: I do not take it, or no longer; promise it to somebody else."""

    ask_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Receiver: begin, if you can at once. Sent again while the transfer runs, to learn of its end."""

    ask_id: str
    attempt: int
    """Number of the attempt, from 1: a Busy or Begun that is late is told apart by it."""


@dataclass(frozen=True, slots=True)
class Starving:
    """Receiver: too many attempts failed; begin as soon as you can, I keep a slot free until then."""

    ask_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Begun:
    """Sender: the transfer begins; hold the slot until Done."""

    ask_id: str


@dataclass(frozen=True, slots=True)
class Busy:
    """Sender: this attempt comes to nothing, others are being transferred."""

    ask_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Sender: the request is not, or no longer, promised to you, and no transfer of it runs."""

    ask_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """Sender: the transfer has ended."""

    ask_id: str
    moved: bool


ToReceiver: TypeAlias = Ask | Award | Begun | Busy | Withdrawn | Done
ToSender: TypeAlias = Bid | Pass | Accepted | Refused | Ready | Starving
Message: TypeAlias = ToReceiver | ToSender
