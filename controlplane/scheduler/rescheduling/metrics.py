"""The rescheduler's Prometheus metrics; docs/rescheduling.md lists them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controlplane.policies.rescheduling.migrations import OrderOutcome

DECISION_BUCKETS_S = (1e-4, 5e-4, 1e-3, 5e-3, 20e-3, 100e-3, 500e-3)
MOVE_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 20.0, 60.0)


class ReschedulerMetrics:
    """Written by the rescheduling service, of this scheduler's decisions and orders only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.migrations = Counter(
            "penstock_rescheduler_migrations", "Migrations ordered, by their end", ["outcome"], registry=registry
        )
        self.decision_seconds = Histogram(
            "penstock_rescheduler_decision_seconds",
            "Time of one model's decision",
            buckets=DECISION_BUCKETS_S,
            registry=registry,
        )
        self.move_seconds = Histogram(
            "penstock_rescheduler_migration_seconds",
            "From an order to its end",
            buckets=MOVE_BUCKETS_S,
            registry=registry,
        )
        self.in_flight = Gauge("penstock_rescheduler_in_flight", "Migrations under way", registry=registry)
        self.mode = Gauge("penstock_rescheduler_mode", "1 for the mode configured", ["mode"], registry=registry)
        self.fallback = Gauge(
            "penstock_rescheduler_fallback", "1 while another mode stands in", ["model"], registry=registry
        )
        self.in_charge = Gauge(
            "penstock_rescheduler_in_charge", "1 in the one scheduler that moves requests", registry=registry
        )
        self.mean_tokens = Gauge(
            "penstock_rescheduler_mean_tokens", "Mean token load of the instances", ["model"], registry=registry
        )
        self.variance = Gauge(
            "penstock_rescheduler_variance", "Variance of the token loads", ["model"], registry=registry
        )
        self.expected_variance = Gauge(
            "penstock_rescheduler_expected_variance",
            "Variance of the token loads now and over the horizon, weighted",
            ["model"],
            registry=registry,
        )
        for outcome in (OrderOutcome.MOVED, OrderOutcome.STAYED):
            self.migrations.labels(outcome)
        self.idle = Counter(
            "penstock_rescheduler_idle_intervals",
            "Without an order, by the reason",
            ["model", "reason"],
            registry=registry,
        )
        self.excluded = Gauge(
            "penstock_rescheduler_excluded_instances", "Instances that cannot be seen", ["model"], registry=registry
        )

    def forget_balance(self, model: str) -> None:
        """Of a model without instances that can be compared."""
        for gauge in (self.mean_tokens, self.variance, self.expected_variance):
            gauge.remove(model)

    def forget_balances(self) -> None:
        """Loads that nobody looks at any more."""
        for gauge in (self.mean_tokens, self.variance, self.expected_variance, self.excluded):
            gauge.clear()
