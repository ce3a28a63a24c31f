"""Bounds of one migration, and of all migrations of an instance."""

from dataclasses import dataclass, field

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """How long and how often; all times in milliseconds."""

    offer_ms: float = 1_000.0
    """Without an answer to the offer by then, nothing happens."""
    round_ms: float = 10_000.0
    """For one round of pre-copy; prefill chunks that are still to come do not count."""
    commit_ms: float = 500.0
    """How long the request may stay paused before the source tries to take it back."""
    take_back_ms: float = 1_000.0
    """How long the source then waits for the target's answer before it gives the request up."""
    resend_ms: float = 100.0
    """An unanswered message is sent again after this."""
    max_rounds: int = 8
    """After so many rounds of a request that decodes it is paused however much is left."""
    last_round_blocks: int = 2
    """The request is paused once no more than this many blocks are left to copy."""
    idle_ms: float = 30_000.0
    """A target that hears nothing for this long while it waits for the source drops the request."""

    @property
    def verdict_ms(self) -> float:
        """How long the source stays paused at most."""
        return self.commit_ms + self.take_back_ms


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Bounds of all migrations of one instance, live and simulated. They suit one machine and a fast network alike."""

    live: MigrationLimits = field(default_factory=MigrationLimits)
    """Of a request that decodes while its blocks are copied."""
    stop_and_copy: MigrationLimits = field(default_factory=lambda: MigrationLimits(max_rounds=0, commit_ms=20_000.0))
    """Of one that stands still while everything is copied."""
    transfer: MigrationLimits = field(default_factory=MigrationLimits)
    """Of the transfer of a finished prefill. With the limits of stop_and_copy it pauses the request with its first
    token, as classic disaggregation does, instead of decoding at the source while blocks are copied."""
    parallel: int = 3
    """Requests that leave at once (CascadeInfer, section 5), and as many more whose prefill is followed."""
    arriving: int = 16
    """Requests that arrive at once. Their memory is reserved; how many are copied at a time is the KV agent's bound."""
    queued: int = 256
    """Orders that wait for a slot; one more is refused. Transfers of prefills do not count: the requests bound them."""
    migration_ms: float = 120_000.0
    """For one migration once it is offered, the wait for the end of its prompt included."""
    transfer_tries: int = 4
    """How often a decode instance is asked to take a request that it refuses for now."""
    transfer_retry_ms: float = 100.0
    """Before the second try; twice as long before each further one."""
    remembered: int = 1024
    """Ended migrations from elsewhere that the target still answers for; while all are young, no other is taken."""
    remember_ms: float = 10_000.0
    """How long one is young: many times as long as a source asks how it ended."""

    def __post_init__(self) -> None:
        if min(self.parallel, self.arriving, self.transfer_tries, self.remembered) < 1:
            raise ConfigurationError(f"parallel, arriving, transfer_tries and remembered must be 1 or more, got {self}")
        if min(self.queued, self.migration_ms, self.transfer_retry_ms, self.remember_ms) < 0:
            raise ConfigurationError(f"queued and the times of migrations must not be negative, got {self}")

    def retry_after_ms(self, tries: int) -> float:
        """The pause after a transfer was refused for the `tries`-th time."""
        factor: float = 2.0 ** (tries - 1)
        return self.transfer_retry_ms * factor
