"""What a worker shows about migrations."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

Direction = Literal["out", "in"]

_MIGRATION_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_PAUSED_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class MigrationMetrics:
    """Counters of ended migrations."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "penstock_worker_migrations",
            "Ended migrations: moved, kept or lost (out); committed or discarded (in)",
            ["direction", "outcome"],
            registry=registry,
        )
        self._blocks = Counter(
            "penstock_worker_migrated_kv_blocks", "KV blocks of requests that moved", ["direction"], registry=registry
        )
        self._bytes = Counter(
            "penstock_worker_migrated_kv_bytes", "KV of requests that moved", ["direction"], registry=registry
        )
        self._seconds = Histogram(
            "penstock_worker_migration_seconds",
            "From a migration's offer to its end, however it ended",
            ["direction", "outcome"],
            buckets=_MIGRATION_SECONDS,
            registry=registry,
        )
        self._paused = Histogram(
            "penstock_worker_migration_paused_seconds",
            "How long a request that moved, or nearly did, stood still here",
            buckets=_PAUSED_SECONDS,
            registry=registry,
        )

        self.transfers = Counter(
            "penstock_worker_transfers",
            "Requests prefilled here for another instance: moved, failed (decoded here) or skipped (ended before)",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("moved", "failed", "skipped"):
            self.transfers.labels(outcome)
        self.transfer_seconds = Histogram(
            "penstock_worker_transfer_seconds",
            "From a request's first token here to its decode instance's owning it",
            buckets=_MIGRATION_SECONDS,
            registry=registry,
        )

    def ended(self, direction: Direction, outcome: str, blocks: int, kv_bytes: int, seconds: float) -> None:
        """A migration has ended after so long, with so many blocks copied."""
        self._ended.labels(direction, outcome).inc()
        self._blocks.labels(direction).inc(blocks)
        self._bytes.labels(direction).inc(kv_bytes)
        self._seconds.labels(direction, outcome).observe(seconds)

    def paused(self, seconds: float) -> None:
        """A request stood still."""
        self._paused.observe(seconds)
