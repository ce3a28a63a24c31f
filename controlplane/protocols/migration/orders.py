"""What a source manager keeps of each order to move a request, and of each prefill that is to be transferred."""

from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.protocols.migration.limits import MigrationLimits
from controlplane.protocols.migration.source import Progress, SourceMigration
from controlplane.protocols.migration.source_events import Ending
from mesh.errors import IllegalTransition


class Slot(StrEnum):
    """What a migration occupies one of until its end."""

    DECODING = "decoding"
    PREFILLING = "prefilling"
    """It follows the prefill, however long that takes, and keeps nobody waiting who decodes already."""


@dataclass(slots=True, eq=False)
class Order:
    """An order that waits or is under way. A transfer gives one for each try."""

    number: int
    """In the order in which they came."""
    order_id: int | None
    request_id: str
    target_id: str
    limits: MigrationLimits
    slot: Slot
    """The kind that it waits for, or has."""
    migration_id: str = ""
    """Empty while it waits."""
    machine: SourceMigration | None = None
    submitted_tokens: int = 0
    progress: Progress = field(default_factory=lambda: Progress(0, decoding=False))
    offered_ms: float | None = None
    paused_ms: float | None = None
    """Since when it stands still."""
    blocks: int = 0
    ending: Ending = Ending.FAILED
    abort_waits: bool = False


class TransferState(StrEnum):
    """Where the transfer of a prefill stands."""

    PREFILLING = "prefilling"
    """The scheduler will be asked after the first token."""
    ASKING = "asking"
    MOVING = "moving"
    """An order of its own waits or is under way."""
    REFUSED = "refused"
    """The next try is due at `retry_at_ms`."""


TRANSITIONS: dict[TransferState, frozenset[TransferState]] = {
    TransferState.PREFILLING: frozenset({TransferState.ASKING, TransferState.MOVING}),
    TransferState.ASKING: frozenset({TransferState.MOVING}),
    TransferState.MOVING: frozenset({TransferState.REFUSED}),
    TransferState.REFUSED: frozenset({TransferState.MOVING}),
}


@dataclass(slots=True, eq=False)
class Transfer:
    """A request that is prefilled here and to be decoded elsewhere, until that has been settled."""

    request_id: str
    target_id: str
    state: TransferState = TransferState.PREFILLING
    tries: int = 0
    first_token_ms: float | None = None
    retry_at_ms: float = 0.0

    def become(self, state: TransferState) -> None:
        """Change state. Raises `IllegalTransition`."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"the transfer of request {self.request_id} cannot go from {self.state} to {state}")
        self.state = state
