"""The scheduler's Prometheus metrics; the docs list what each one means (docs/operations.md)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

DECISION_BUCKETS_S = (20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3, 20e-3, 100e-3)


class SchedulerMetrics:
    """Counters and histograms, written by those who do what they count; see `GaugeCollector` for the state."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.placements = Counter(
            "penstock_scheduler_placements", "Requests placed", ["policy", "instance"], registry=registry
        )
        self.split_placements = Counter(
            "penstock_scheduler_split_placements",
            "Requests placed to be decoded elsewhere than they are prefilled, by where they are decoded",
            ["instance"],
            registry=registry,
        )
        self.refusals = Counter(
            "penstock_scheduler_refusals", "Requests that could not be placed", ["outcome"], registry=registry
        )
        self.decision_seconds = Histogram(
            "penstock_scheduler_decision_seconds",
            "Time of one placement decision",
            buckets=DECISION_BUCKETS_S,
            registry=registry,
        )
        self.bounces = Counter(
            "penstock_scheduler_bounces",
            "Requests that came back because more waited at their instance than was believed",
            ["instance"],
            registry=registry,
        )
        self.unseen_placement_seconds = Counter(
            "penstock_scheduler_unseen_placement_seconds",
            "How old other schedulers' placements were when they came: its rate is how many are unseen at a time",
            registry=registry,
        )
        self.fallbacks = Counter(
            "penstock_scheduler_fallbacks", "Times that the fallback policy stood in", registry=registry
        )
        self.forgotten = Counter(
            "penstock_scheduler_forgotten_requests",
            "Placed requests that no worker ever reported",
            registry=registry,
        )
        self.shared = Counter(
            "penstock_scheduler_shared_events",
            "Placements and endings told to other schedulers, and heard of them and counted or ignored",
            ["way"],
            registry=registry,
        )
        self.unshared = Counter(
            "penstock_scheduler_unshared_events", "Those that another scheduler could not be told", registry=registry
        )
        self.resyncs = Counter(
            "penstock_scheduler_watches", "Watches of a monitor begun, the first one included", registry=registry
        )


@dataclass(frozen=True, slots=True)
class Gauges:
    """The scheduler's state at one moment."""

    policy: str
    fallback: bool
    synced: bool
    instances: int
    placeable_instances: int
    unmonitored_instances: int
    indexed_blocks: int
    refused_blocks_total: int
    unreported_requests: int
    explanations: int
    pools: Mapping[str, str]
    """By instance; empty under a policy that keeps none."""


class GaugeCollector(Collector):
    """Reads the scheduler's state when Prometheus asks."""

    def __init__(self, read: Callable[[], Gauges], registry: CollectorRegistry) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Called by a scrape, on the thread of the metrics port."""
        gauges = self._read()
        policy = GaugeMetricFamily("penstock_scheduler_policy", "1 for the policy configured", labels=["policy"])
        policy.add_metric([gauges.policy], 1)
        yield policy
        for name, text, value in (
            ("fallback", "1 while the fallback policy stands in", gauges.fallback),
            ("synced", "1 while the cluster is known from a monitor", gauges.synced),
            ("instances", "Instances known", gauges.instances),
            ("placeable_instances", "Instances that take new requests", gauges.placeable_instances),
            ("indexed_blocks", "Distinct KV blocks in the prefix index", gauges.indexed_blocks),
            (
                "unmonitored_instances",
                "Instances placed on by their last known load: no monitor hears of them, but frontends do",
                gauges.unmonitored_instances,
            ),
            ("unreported_requests", "Requests placed that no report counts yet", gauges.unreported_requests),
            ("explanations", "Placements that can be explained", gauges.explanations),
        ):
            yield GaugeMetricFamily(f"penstock_scheduler_{name}", text, value=value)
        pool = GaugeMetricFamily(
            "penstock_scheduler_pool", "1 for the pool that the policy has the instance in", labels=["instance", "pool"]
        )
        for instance_id, name in gauges.pools.items():
            pool.add_metric([instance_id, name], 1)
        yield pool
        yield CounterMetricFamily(
            "penstock_scheduler_refused_blocks",
            "KV blocks that the full prefix index refused",
            value=gauges.refused_blocks_total,
        )
