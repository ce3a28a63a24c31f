"""What the cascade router shows Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SCORE_BUCKETS = tuple(range(0, 101, 10))
_SECONDS_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class CascadeMetrics:
    """Of one process."""

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
            "Judgements for which the first judge gave no score: another one, or none, stood in",
            ("cascade",),
            registry=registry,
        )
        self.unjudged = Counter(
            "penstock_cascade_unjudged_total", "Answers that no judge scored", ("cascade",), registry=registry
        )
        self.judging = Gauge("penstock_cascade_judging", "Answers being judged", registry=registry)
