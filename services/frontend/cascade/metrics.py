"""What the frontend counts of cascades: `penstock_frontend_cascade_...`. Tiers are labelled by their model's name."""

from prometheus_client import CollectorRegistry, Counter, Histogram

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ANSWER_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class CascadeMetrics:
    """A client's own times are under the cascade's name among those of the models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"penstock_frontend_cascade_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            labels = ("cascade", "tier")
            return Histogram(f"penstock_frontend_cascade_{name}", text, labels, buckets=buckets, registry=registry)

        self.answers = counter(
            "answers", "Answers that cascades gave, by tier and reason", "cascade", "tier", "because"
        )
        self.escalations = counter(
            "escalations",
            "Requests that went on to a further tier, by that tier and reason",
            "cascade",
            "tier",
            "because",
        )
        self.broken_off = counter(
            "broken_off", "Answers that failed after their client had begun to get them", "cascade", "tier"
        )
        self.unjudged = counter("unjudged", "Answers of tiers that nobody could judge", "cascade")
        self.untold = counter(
            "untold", "Requests missing from the samples of the workload: no cascade router took them", "cascade"
        )
        self.tier_ttft = histogram("tier_ttft_seconds", "From a tier's being asked to its first token", _TTFT_BUCKETS_S)
        self.tier_seconds = histogram(
            "tier_seconds", "From a tier's being asked to the end of its whole answer", _ANSWER_BUCKETS_S
        )
