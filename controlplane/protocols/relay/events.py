"""One relayed request, and what a relay manager is told and answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

from controlplane.model.incarnation import Incarnation
from controlplane.model.queue_belief import PresentLoad
from controlplane.protocols.ownership import Delta, Filled, TokenGap, TokenStream
from mesh.errors import IllegalTransition


class RelayedDelta(Delta, Protocol):
    """What an engine step added to one of many requests."""

    @property
    def request_id(self) -> str:
        """The request's id at the workers: one choice of a client's request."""


D = TypeVar("D", bound=RelayedDelta)
E = TypeVar("E")
"""What a client is told when its request fails; passed through as it is."""


class RelayState(StrEnum):
    """Where a request stands between its workers and its client."""

    NEW = "new"
    """No worker has it."""
    RUNNING = "running"
    """A worker owns it, and sends its tokens."""
    LOST = "lost"
    """Its owner was lost. It is to be placed again; until then nobody's tokens count."""
    ENDED = "ended"
    """Nothing more is passed on."""


TRANSITIONS: Final[dict[RelayState, frozenset[RelayState]]] = {
    RelayState.NEW: frozenset({RelayState.RUNNING, RelayState.ENDED}),
    RelayState.RUNNING: frozenset({RelayState.NEW, RelayState.LOST, RelayState.ENDED}),
    RelayState.LOST: frozenset({RelayState.RUNNING, RelayState.ENDED}),
    RelayState.ENDED: frozenset(),
}


class LossReason(StrEnum):
    """Why a request has no owner any more."""

    WORKER_LOST = "worker_lost"
    """The stream to its worker has ended."""
    WORKER_HUNG = "worker_hung"
    """Its worker gives no sign of life, or its engine makes no step."""
    UNAVAILABLE = "unavailable"
    """Its worker cannot serve it now."""
    HANDOFF = "handoff"
    """It was lost on its way from one worker to another."""
    BOUNCED = "bounced"
    """More waits at its worker than was believed. That is nobody's failure."""


@dataclass(frozen=True, slots=True)
class Loss(Generic[E]):
    """How a request has lost its owner."""

    reason: LossReason
    instance_id: str
    """The owner that was lost."""
    error: E
    """What the client is told if the request cannot be recovered."""
    present: PresentLoad | None = None
    """Of a worker that has given the request back for it."""


class RelayedRequest(Generic[D]):
    """One request: whose tokens count, and where it stands."""

    __slots__ = ("last_instance_id", "max_tokens", "request_id", "state", "stream")

    def __init__(self, request_id: str, max_tokens: int, emitted_token_ids: list[int] | None = None) -> None:
        """`emitted_token_ids`: those that another frontend has passed on."""
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.state = RelayState.NEW
        self.stream = TokenStream[D]()
        self.stream.token_ids = emitted_token_ids or []
        self.last_instance_id = ""
        """Of the owner that was lost last."""

    @property
    def instance_id(self) -> str:
        """The owner, or the latest one while there is none."""
        owner = self.stream.owner
        return self.last_instance_id if owner is None else owner.instance_id

    def go(self, state: RelayState) -> None:
        """Raises IllegalTransition, with the request's story, where the state table has no such step."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.story} cannot become {state}; this is a bug of the frontend")
        self.state = state

    @property
    def story(self) -> str:
        """For messages: where the request stands."""
        stream = self.stream
        owner = "nobody" if stream.owner is None else f"{stream.owner.instance_id} ({stream.owner.incarnation_id})"
        return (
            f"request {self.request_id}, {self.state}, of {owner} in epoch {stream.epoch}, last lost by "
            f"{self.last_instance_id or 'nobody'}, with {len(stream.token_ids)} of {self.max_tokens} tokens"
        )


# -- events


@dataclass(frozen=True, slots=True)
class Submitted(Generic[D]):
    """A worker was given the request, which has no owner."""

    request: RelayedRequest[D]
    owner: Incarnation


@dataclass(frozen=True, slots=True)
class Adopted(Generic[D]):
    """A worker has the request of a client that came back, and goes on with it under this epoch."""

    request: RelayedRequest[D]
    owner: Incarnation
    epoch: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The request was submitted together with others that could not be: all of them are to be placed anew."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DeltaCame(Generic[D]):
    """Tokens that `TokenStream.push` has not taken, or the request's end."""

    sender: Incarnation
    delta: D


@dataclass(frozen=True, slots=True)
class WorkerGaveUp(Generic[E]):
    """A worker has ended the request with an error."""

    request_id: str
    sender: Incarnation
    epoch: int
    error: E
    reason: LossReason | None
    """None: another worker would not fare better."""
    present: PresentLoad | None = None
    """See `Loss`."""


@dataclass(frozen=True, slots=True)
class Moved(Generic[E]):
    """A worker has handed the request off to another one, and has sent all its tokens."""

    request_id: str
    sender: Incarnation
    target: Incarnation
    epoch: int
    target_lost: Loss[E] | None = None
    """Set where the target is not connected."""


@dataclass(frozen=True, slots=True)
class WorkerLost(Generic[E]):
    """Nothing more comes from this worker."""

    sender: Incarnation
    loss: Loss[E]
    is_connected: bool = False
    """It hangs: it is to drop what it has, should it go on."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nobody wants the request's tokens any more."""

    request_id: str
    is_done: bool = False
    """Its client has all that it wanted."""


@dataclass(frozen=True, slots=True)
class Released:
    """The request's client has gone, and may come back to any frontend."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Some time has passed: due about ten times a second."""


Event: TypeAlias = (
    Submitted[D]
    | Adopted[D]
    | Withdrawn
    | DeltaCame[D]
    | WorkerGaveUp[E]
    | Moved[E]
    | WorkerLost[E]
    | Dropped
    | Released
    | Tick
)

# -- instructions


class Why(StrEnum):
    """Why a worker is to drop a request."""

    DONE = "done"
    """Its client has all that it wanted."""
    UNWANTED = "unwanted"
    """Nobody waits for it."""
    STRAY = "stray"
    """The worker goes on with it although it is another one's."""
    BROKEN = "broken"
    """The worker's tokens do not follow each other."""
    HUNG = "hung"
    """It was taken from the worker, which gives no sign of life."""


@dataclass(frozen=True, slots=True)
class Pass(Generic[D]):
    """Give these tokens to the request's client, in this order."""

    request_id: str
    passed: Sequence[D | Filled]


@dataclass(frozen=True, slots=True)
class FinishAtLength:
    """Tell the client that these were all tokens that it asked for: its worker was lost before it could say so."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the worker to drop the request, in the life of this epoch and those before."""

    worker: Incarnation
    request_id: str
    epoch: int
    why: Why


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the worker to keep the request, in the life of this epoch, for a client that may come back."""

    worker: Incarnation
    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Recover(Generic[E]):
    """Place the request again, or drop it and tell its client."""

    request_id: str
    loss: Loss[E]


@dataclass(frozen=True, slots=True)
class Fail(Generic[E]):
    """Tell the client that the request has failed."""

    request_id: str
    error: E


@dataclass(frozen=True, slots=True)
class FailBroken:
    """Tell the client that its worker's tokens do not follow each other, and the operators: this is a bug."""

    request_id: str
    gap: TokenGap


@dataclass(frozen=True, slots=True)
class FailAdopted:
    """Tell the client that another connection goes on with its request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ReportLoss:
    """Tell the operators how many requests the loss of a worker leaves without an owner."""

    instance_id: str
    reason: LossReason
    requests: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The request has ended: nothing more comes for it. The last instruction about it."""

    request_id: str


Instruction: TypeAlias = (
    Pass[D] | FinishAtLength | Abort | Release | Recover[E] | Fail[E] | FailBroken | FailAdopted | ReportLoss | Forget
)
