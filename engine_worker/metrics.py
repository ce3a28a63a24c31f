"""Prometheus metrics of a worker."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from controlplane.model.instance import LoadReport
from engine_worker.deltas import FailureCode
from engine_worker.kv.transfer import AgentStatus
from mesh.vllm_metrics import renamed

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_MESSAGE_BYTES = (64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)

VLLM_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "running_requests": "num_requests_running",
        "queued_requests": "num_requests_waiting",
        "kv_usage_ratio": "kv_cache_usage_perc",
        "preemptions": "num_preemptions",
    }
)
"""Those of the engine's numbers that vLLM has a name for."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """Values that are read at the moment at which Prometheus scrapes."""

    model: str
    load: LoadReport
    kv_blocks: int
    cached_blocks: int
    streams: int
    hung: bool
    host_blocks: int
    disk_blocks: int
    host_evictions: int
    host_corrupt: int
    """Of the store in the host's memory; 0 where there is none."""
    disk_evictions: int
    disk_corrupt: int
    """Of that on disk."""
    is_immovable: bool
    transfers: AgentStatus | None
    """Of the KV transfer agent; None where there is none, or none has answered."""


class WorkerMetrics:
    """Counters of the worker shell; the engine's own numbers come from its load (`GaugeCollector`)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.steps = Counter("penstock_worker_steps", "Engine steps that brought output", registry=registry)
        self.step_seconds = Histogram(
            "penstock_worker_step_seconds",
            "Duration of the engine steps that brought output",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self.message_bytes = Histogram(
            "penstock_worker_stream_message_bytes",
            "Size of the messages to frontends",
            buckets=_MESSAGE_BYTES,
            registry=registry,
        )
        self.failures = Counter(
            "penstock_worker_failures", "Requests ended by the worker, not its engine", ["code"], registry=registry
        )
        self.bounces = Counter(
            "penstock_worker_bounces",
            "Requests given back because more waited here than was believed",
            registry=registry,
        )
        self.cut_streams = Counter(
            "penstock_worker_cut_streams", "Frontends cut off because they did not read", registry=registry
        )
        self.orphaned = Counter(
            "penstock_worker_orphaned_requests",
            "Requests that ran on without their frontend or client",
            registry=registry,
        )
        self.adopted = Counter(
            "penstock_worker_adopted_requests",
            "Requests that another frontend went on with",
            registry=registry,
        )
        self.expired_orphans = Counter(
            "penstock_worker_expired_orphans", "Requests given up because no frontend came for them", registry=registry
        )
        self.stray_deltas = Counter(
            "penstock_worker_stray_deltas", "Engine output for requests that are not here", registry=registry
        )
        self.refused_orders = Counter(
            "penstock_worker_refused_orders", "Orders of leaders that had been replaced", ["duty"], registry=registry
        )
        self.report_failures = Counter(
            "penstock_worker_report_failures", "Report streams to a monitor that broke", registry=registry
        )

    def count_failure(self, code: FailureCode) -> None:
        """The worker has ended a request. One that was bounced has not failed: it is placed again."""
        if code is FailureCode.BOUNCED:
            self.bounces.inc()
        else:
            self.failures.labels(code).inc()


class GaugeCollector(Collector):
    """Reads the worker's present state when Prometheus asks, so that no step pays for it."""

    def __init__(self, read: Callable[[], Gauges], registry: CollectorRegistry) -> None:
        """`read` is called from the metrics port's thread."""
        self._read = read
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Nothing ahead of time: registration must not read a worker that is not there yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        load = now.load
        gauges: list[tuple[str, str, float]] = [
            ("running_requests", "Requests in the engine's batch", load.running_requests),
            ("queued_requests", "Requests that wait for the engine", load.queued_requests),
            ("queued_prefill_tokens", "Prompt tokens still to be computed", load.queued_prefill_tokens),
            ("running_tokens", "Context tokens of the running requests", load.running_tokens),
            ("decoding_requests", "Running requests whose prompt is computed", load.decoding_requests),
            ("token_interval_seconds", "Mean time between tokens of decoding requests", load.token_interval_ms / 1000),
            ("kv_usage_ratio", "Share of the KV blocks in use", load.kv_blocks_used / max(1, now.kv_blocks)),
            ("cached_blocks", "Blocks in the prefix cache", now.cached_blocks),
            ("host_blocks", "Blocks in the store in the host's memory", now.host_blocks),
            ("disk_blocks", "Blocks in the store on the host's disk", now.disk_blocks),
            ("streams", "Connected frontends", now.streams),
            ("hung", "1 while the engine has requests and makes no step", float(now.hung)),
            ("transfer_obstacle", "1 while no request can be moved to or from here", float(now.is_immovable)),
        ]
        counters: list[tuple[str, str, float]] = [
            ("generated_tokens", "Tokens generated", load.generated_tokens_total),
            ("prefilled_tokens", "Prompt tokens computed", load.prefilled_tokens_total),
            ("preemptions", "Requests put back for want of KV blocks", load.preemptions_total),
            ("finished_requests", "Requests that ended in the engine", load.finished_requests_total),
            ("engine_hit_tokens", "Prompt tokens found in the prefix cache", load.engine_hit_tokens_total),
            ("host_hit_tokens", "Prompt tokens loaded from the host's memory", load.host_hit_tokens_total),
            ("disk_hit_tokens", "Prompt tokens loaded from the host's disk", load.disk_hit_tokens_total),
            ("host_evictions", "Blocks that went from the host's store, by any instance", now.host_evictions),
            ("host_corrupt_blocks", "Blocks of the host's store that were not what was written", now.host_corrupt),
            ("disk_evictions", "Blocks that went from the store on disk, by any instance", now.disk_evictions),
            ("disk_corrupt_blocks", "Blocks on disk that were not what was written", now.disk_corrupt),
        ]
        if (agent := now.transfers) is not None:
            counters.append(("reopened_kv_agents", "Times the KV agent was opened anew", agent.reopened_total))
            counters.append(("rejected_kv_calls", "KV asked for without a transfer's token", agent.rejected_total))
        for name, text, value in gauges:
            yield from self._named(GaugeMetricFamily(f"penstock_worker_{name}", text, value), name, now.model)
        for name, text, total in counters:
            yield from self._named(CounterMetricFamily(f"penstock_worker_{name}", text, total), name, now.model)

    def _named(self, family: Metric, name: str, model: str) -> Iterator[Metric]:
        """Under our name, and under vLLM's if it has one."""
        yield family
        if name in VLLM_NAMES:
            yield renamed(family, VLLM_NAMES[name], {"model_name": model})
