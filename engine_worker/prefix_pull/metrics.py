"""What a worker shows about prefix pulls."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from controlplane.protocols.prefix_pull.target import PullOutcome

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class PullMetrics:
    """Counters of ended pulls and holds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pulls = Counter(
            "penstock_prefix_pulls",
            "Pulls of cached prefixes to here that ended: pulled, or refused, late, failed (all computed), cancelled",
            ["outcome"],
            registry=registry,
        )
        self.seconds = Histogram(
            "penstock_prefix_pull_seconds",
            "From the order of a pull to its end, however it ended",
            ["outcome"],
            buckets=_SECONDS,
            registry=registry,
        )
        for outcome in PullOutcome:
            self.pulls.labels(outcome.value)
        self.bytes = Counter("penstock_prefix_pulled_bytes", "KV that was pulled to here", registry=registry)
        self.tokens = Counter("penstock_prefix_pulled_tokens", "Tokens whose KV was pulled to here", registry=registry)
        self.holds = Counter(
            "penstock_prefix_holds", "Prefixes that were held here while others pulled them", registry=registry
        )
        self.refused_holds = Counter(
            "penstock_prefix_refused_holds", "Prefixes that others asked for and did not get", registry=registry
        )
