"""What a worker shows about stages."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class StageMetrics:
    """Deals of this worker as a sender, and where its range ends."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.deals = Counter(
            "penstock_worker_stage_deals",
            "Requests offered to other instances: moved or kept",
            ["outcome"],
            registry=registry,
        )
        self.boundary_tokens = Gauge(
            "penstock_worker_stage_boundary_tokens",
            "Longest sequence of this instance's stage; infinite in the last one and without stages",
            registry=registry,
        )
        self.stage = Gauge(
            "penstock_worker_stage", "Stage of this instance, counted from 0; -1 without stages", registry=registry
        )
        self.lost_peers = Counter(
            "penstock_worker_stage_lost_peers", "Streams to other workers that ended", registry=registry
        )
        self.boundary_tokens.set(float("inf"))
        self.stage.set(-1)
