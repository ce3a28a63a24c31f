"""The decision that a running request is to live elsewhere."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MigrationOrder:
    """Move a running request; whoever gets it may find that the request has ended, moved or must stay."""

    request_id: str
    source_instance_id: str
    target_instance_id: str
    reason: str
    """For people: who decided, and by which numbers."""

    def __post_init__(self) -> None:
        if self.source_instance_id == self.target_instance_id:
            raise ValueError(f"{self}: a request is already where it is")
