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
    """Requests that leave at once (CascadeInfer, section 5), and as many more whose prefill is followed."""
    arriving: int = 16
    """Requests that arrive at once. Their memory is reserved; how many transfers run is the KV agent's bound."""
    queued: int = 256
    """Orders that wait for their turn; one more is refused."""
    migration_s: float = 120.0
    """For one migration once it is offered, the wait for the end of its prompt included."""
    hand_over_tries: int = 4
    """How often a decode instance is asked to take a request that it refuses for now."""
    hand_over_retry_s: float = 0.1
    """Before the second try; twice as long before each further one."""
    tombstones: int = 1024
    """Ended migrations from elsewhere that are remembered; while all are young, no other is taken."""
    tombstone_s: float = 10.0
    """How long one is young: many times as long as a source asks for its end."""
    unsent_messages: int = 1024
    """Waiting for one peer; what does not fit is lost, as the protocol allows."""
