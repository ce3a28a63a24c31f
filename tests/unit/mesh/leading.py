"""A leadership as a test says."""

from dataclasses import dataclass, field


@dataclass
class Leading:
    """Leads unless told otherwise."""

    is_leading: bool = True
    epoch: int = 1
    refusals: list[int] = field(default_factory=list)

    def refused(self, epoch: int) -> None:
        """As `Lead.refused`."""
        self.refusals.append(epoch)
