"""What a source manager is told, and what it wants done."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from controlplane.model.incarnation import Incarnation
from controlplane.model.request import EngineRequest
from controlplane.protocols.migration.messages import ToSource
from controlplane.protocols.migration.source import SourceInstruction, SourceState, Tick


class Ending(StrEnum):
    """How an order ended, as far as whoever gave it may have to do something about it."""

    MOVED = "moved"
    ENDED = "ended"
    """The request ended first: nothing was left to move."""
    REFUSED = "refused"
    """The target does not take it now; it may later."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class MigrationOutcome:
    """How an order to move a request ended."""

    ending: Ending
    reason: str = ""
    """Why it did not move."""
    rounds: int = 0
    blocks: int = 0
    """KV blocks that the request had when it was paused, or of those that stayed, that were copied."""
    paused_ms: float | None = None
    """How long the request stood still; None if it never did."""
    duration_ms: float = 0.0
    """Since the offer."""
    state: SourceState | None = None
    """Final state of the migration; None if none began."""
    story: str = ""
    """What happened, for logs."""

    @property
    def moved(self) -> bool:
        """The target owns the request."""
        return self.ending is Ending.MOVED


class TransferResult(StrEnum):
    """What became of a request that was prefilled here to be decoded elsewhere."""

    MOVED = "moved"
    FAILED = "failed"
    """It is decoded here."""
    SKIPPED = "skipped"
    """It ended before."""


# -- events


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """The instances to which requests could move now, by instance id: those that KV of this one makes sense to."""

    peers: Mapping[str, Incarnation]


@dataclass(frozen=True, slots=True)
class ObstacleChanged:
    """Why no KV can be sent or received now; empty if it can."""

    reason: str


@dataclass(frozen=True, slots=True)
class MoveOrdered:
    """Somebody wants a request moved. The answer is one `MigrationEnded` with the order's id."""

    order_id: int
    request_id: str
    target_id: str
    is_here: bool
    """The request runs on this instance, and is not being aborted."""
    is_decoding: bool
    """Its prompt is computed."""
    stop_and_copy: bool = False


@dataclass(frozen=True, slots=True)
class MoveWithdrawn:
    """Whoever gave the order takes it back."""

    order_id: int


@dataclass(frozen=True, slots=True)
class TransferOrdered:
    """A request that was just admitted is to be decoded elsewhere; `target_id` is empty if it is chosen later."""

    request_id: str
    target_id: str


@dataclass(frozen=True, slots=True)
class DecodeChosen:
    """The answer to `AskDecode`. Without a target the request stays, and `error` says whether that was meant so."""

    request_id: str
    target_id: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RequestBegan:
    """The first token of a request is out: its prompt is computed."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestGone:
    """A request is not here any more: it ended by itself, or was aborted."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """The request is to be aborted. While it `is_paused` that waits for its end: see `Abort`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AdoptionAsked:
    """A client has come back for the request, to whichever frontend. While it `is_paused` it may be the target's
    already, and that frontend has to ask again; a move that has come less far is ended, since the target was offered
    the request as another frontend's."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Exported:
    """The answer to `Export`: peers may read the blocks of the request, which stands as `request` says."""

    migration_id: str
    request: EngineRequest
    epoch: int
    frontend_id: str
    submitted_tokens: int
    """Prompt and generated tokens that it brought along when it was submitted here."""
    full_blocks: int
    emitted_tokens: int
    """Tokens generated here since then."""


@dataclass(frozen=True, slots=True)
class NotExported:
    """The other answer to `Export`."""

    migration_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """A step of the engine is over, and its tokens are on their way to the frontend."""

    migration_id: str
    full_blocks: int
    emitted_tokens: int


@dataclass(frozen=True, slots=True)
class RequestPaused:
    """The request stands still since `since_ms`, and all its tokens are on their way to the frontend."""

    migration_id: str
    emitted_token_ids: tuple[int, ...]
    computed_tokens: int
    blocks: int
    since_ms: float


@dataclass(frozen=True, slots=True)
class PauseFailed:
    """The engine could not pause the request."""

    migration_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The target of a migration is gone, or the way to it."""

    migration_id: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The instance is about to end: no more orders, and an end to those there are."""


SourceManagerEvent: TypeAlias = (
    PeersChanged
    | ObstacleChanged
    | MoveOrdered
    | MoveWithdrawn
    | TransferOrdered
    | DecodeChosen
    | RequestBegan
    | RequestGone
    | AbortAsked
    | AdoptionAsked
    | Exported
    | NotExported
    | Progressed
    | RequestPaused
    | PauseFailed
    | ConnectionLost
    | ToSource
    | Stopped
    | Tick
)


# -- instructions


@dataclass(frozen=True, slots=True)
class Export:
    """Let peers read the request's blocks under `migration_id`, open the way to the target, and tell of progress;
    answer `Exported` or `NotExported`."""

    migration_id: str
    request_id: str
    target: Incarnation


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The blocks may no longer be read; the request goes on."""

    migration_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Do:
    """An instruction of one migration."""

    migration_id: str
    instruction: SourceInstruction


@dataclass(frozen=True, slots=True)
class Abort:
    """The abort that had to wait while the request was paused."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AskDecode:
    """Ask the scheduler who decodes this request; answer `DecodeChosen`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class MigrationEnded:
    """An order is done with. `order_id` is None for a try to transfer a prefill, `migration_id` empty if no migration
    began."""

    order_id: int | None
    migration_id: str
    request_id: str
    target_id: str
    outcome: MigrationOutcome


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A prefill has been transferred, or never will be."""

    request_id: str
    target_id: str
    result: TransferResult
    reason: str = ""
    since_first_token_ms: float | None = None
    """None: its first token was not out yet."""


@dataclass(frozen=True, slots=True)
class WakeAfter:
    """Send a `Tick` after so long."""

    delay_ms: float


SourceManagerInstruction: TypeAlias = (
    Export | Withdraw | Do | Abort | AskDecode | MigrationEnded | TransferEnded | WakeAfter
)
