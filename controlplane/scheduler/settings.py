"""What the scheduler can be told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from controlplane.policies.registry import DEFAULT_POLICY
from mesh.errors import ConfigurationError

_MORE_THAN_NOTHING = ("monitor_silence_s", "max_indexed_blocks", "record_mib", "migration_deadline_s")


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Policy, times and bounds of the global scheduler."""

    policy: str = DEFAULT_POLICY
    """Placement policy while the state store names none."""
    monitor_silence_s: float = 2.0
    """Seconds without a word from the monitor after which the fallback policy places."""
    max_indexed_blocks: int = 2_000_000
    """Distinct KV blocks in the prefix index, about 24 bytes of memory each; what comes beyond is refused."""
    max_explanations: int = 10_000
    """Placements that can be explained; older ones are forgotten."""
    max_explanation_mib: int = 64
    """Memory for explanations, which grows with the number of instances."""
    record: Path | None = None
    """File for all that the scheduler is told and decides, from its start; see `penstock decisions`."""
    record_mib: int = 256
    """Size at which the recording ends."""
    rescheduler: Literal["off", "current", "predicted", "trajectories"] = "off"
    """What running requests are moved by while the state store names nothing: their load now, the predicted one, or the
    time that a move saves everybody."""
    rescheduler_in_flight: int = 8
    """Migrations that the rescheduler may have under way."""
    migration_deadline_s: float = 60.0
    """Seconds after which a migration that the rescheduler has ordered is withdrawn."""

    def __post_init__(self) -> None:
        """Raises `ConfigurationError` for settings by which the monitor would never be heard, or nothing be kept."""
        for name in _MORE_THAN_NOTHING:
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name):g}")
