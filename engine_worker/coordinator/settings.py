"""Bounds of all migrations of a worker."""

from dataclasses import dataclass, field

from controlplane.protocols.migration.limits import MigrationLimits


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """The defaults suit one machine and a fast network alike; all times are in the limits' milliseconds or seconds."""

    limits: MigrationLimits = field(default_factory=MigrationLimits)
    """Of a live migration."""
    stop_and_copy_limits: MigrationLimits = field(
        default_factory=lambda: MigrationLimits(max_rounds=0, hand_over_ms=20_000.0)
    )
    """Of one that copies everything while the request stands still."""
    parallel: int = 3
    """At once, in each direction (CascadeInfer, section 5)."""
    queued: int = 256
    """Orders that wait for their turn; one more is refused."""
    migration_s: float = 120.0
    """For one migration once its turn has come, the wait for the end of its prompt included."""
    tombstones: int = 1024
    """Ended migrations from elsewhere that are remembered; while all are young, no other is taken."""
    tombstone_s: float = 10.0
    """How long one is young: many times as long as a source asks for its end."""
    unsent_messages: int = 1024
    """Waiting for one peer; what does not fit is lost, as the protocol allows."""
