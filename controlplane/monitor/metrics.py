"""What Prometheus reads from the monitor, taken from the registry when it asks."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from controlplane.monitor.service import MonitorService

LOAD_GAUGES = {
    "running_requests": "Requests in the engine's batch",
    "queued_requests": "Requests waiting for their first step",
    "queued_prefill_tokens": "Prompt tokens still to be computed",
    "running_tokens": "Context tokens of running requests",
    "kv_blocks_used": "KV blocks that running requests hold",
    "decoding_requests": "Running requests whose prompt is computed",
    "token_interval_ms": "Mean milliseconds between two tokens of the decoding requests over the last seconds",
}
LOAD_COUNTERS = {
    "generated_tokens_total": "Tokens generated",
    "prefilled_tokens_total": "Prompt tokens computed",
    "preemptions_total": "Requests preempted for lack of KV blocks",
    "finished_requests_total": "Requests finished",
}


class MonitorCollector(Collector):
    """Load, cache size and age of every instance that reports."""

    def __init__(self, service: MonitorService, clock: Callable[[], float], registry: CollectorRegistry) -> None:
        self._service = service
        self._clock = clock
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Called by a scrape, on the thread of the metrics port; reads only."""
        instances = self._service.registry.instances()
        now_s = self._clock()

        def gauge(name: str, help_text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"penstock_monitor_instance_{name}", help_text, labels=["instance", "model"])

        age = gauge("load_age_seconds", "Seconds since the last load report")
        stale = gauge("stale", "1 while the load report is too old to be believed")
        cached = gauge("cached_blocks", "KV blocks in the prefix cache")
        loadable = gauge("host_blocks", "KV blocks that could be loaded from the memory of the host")
        gauges = {name: gauge(name, text) for name, text in LOAD_GAUGES.items()}
        counters = {
            name: CounterMetricFamily(
                f"penstock_monitor_instance_{name.removesuffix('_total')}", text, labels=["instance", "model"]
            )
            for name, text in LOAD_COUNTERS.items()
        }
        for instance in instances:
            labels = [instance.instance_id, instance.description.model]
            age.add_metric(labels, now_s - instance.load_s)
            stale.add_metric(labels, instance.stale)
            cached.add_metric(labels, len(instance.blocks))
            loadable.add_metric(labels, len(instance.host_blocks))
            for name, family in (gauges | counters).items():
                if instance.load is not None:
                    family.add_metric(labels, getattr(instance.load, name))
        yield from (age, stale, cached, *gauges.values(), *counters.values())
        yield GaugeMetricFamily("penstock_monitor_watchers", "Watch streams", value=len(self._service.watchers))
        yield CounterMetricFamily(
            "penstock_monitor_watchers_cut_off",
            "Watchers too slow to follow",
            value=self._service.watchers_cut_off_total,
        )
