"""Prometheus metrics of the cascade router."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controlplane.model.cascade_record import CascadeRecord

_SCORE_BUCKETS = tuple(range(0, 101, 10))
_SECONDS_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class CascadeMetrics:
    """Prometheus metrics of one cascade router: scores, judging times, thresholds, samples and reports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.scores = Histogram(
            "penstock_cascade_score",
            "Scores that judges gave",
            ("cascade", "tier", "judge"),
            registry=registry,
            buckets=_SCORE_BUCKETS,
        )
        self.seconds = Histogram(
            "penstock_cascade_judge_seconds",
            "Time to judge an answer, judges that gave no score included",
            ("cascade",),
            registry=registry,
            buckets=_SECONDS_BUCKETS,
        )
        self.passed_over = Counter(
            "penstock_cascade_judge_passed_over_total",
            "Answers that the first judge gave no score for: another one stood in, or none",
            ("cascade",),
            registry=registry,
        )
        self.unjudged = Counter(
            "penstock_cascade_unjudged_total", "Answers that no judge gave a score for", ("cascade",), registry=registry
        )
        self.samples = Counter(
            "penstock_cascade_samples",
            "Requests that all tiers were asked: kept, incomplete as a tier has no instance, or left out as a "
            "tier or the first judge failed",
            ("cascade", "outcome"),
            registry=registry,
        )
        self.labels = Counter(
            "penstock_cascade_labels",
            "Sampled answers that were to be labelled: given a label, or missing one as the judge gave none",
            ("cascade", "label", "outcome"),
            registry=registry,
        )
        self.workloads = Counter(
            "penstock_cascade_workloads",
            "Sampled workloads: reported to the planner, or lost because none took it",
            ("cascade", "outcome"),
            registry=registry,
        )
        self.thresholds = Gauge(
            "penstock_cascade_threshold",
            "Score from which on a tier's answer is accepted; above 100: never",
            ("cascade", "tier"),
            registry=registry,
        )
        self.judging = Gauge("penstock_cascade_judging", "Answers being judged", registry=registry)

    def show_thresholds(self, records: Iterable[CascadeRecord]) -> None:
        """Set the gauges of the thresholds in force, and drop those of removed cascades."""
        self.thresholds.clear()
        for record in records:
            for tier, threshold in zip(record.tiers, record.thresholds, strict=False):
                self.thresholds.labels(record.name, tier).set(threshold)
