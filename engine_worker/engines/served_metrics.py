"""The interface of an engine that is a server of its own, whose metrics already have vLLM's names."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol, TypeGuard

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from engine_worker.engines.interface import Engine
from mesh.vllm_metrics import PREFIX

log = logging.getLogger(__name__)

PASSED_ON: Final = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "iteration_tokens_total",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "prompt_tokens_by_source",
        "prompt_tokens_cached_by_source",
        "cache_config_info",
    )
)
"""What a worker cannot measure from outside of a server. The requests of other clients of the server are in them."""


class ServedEngine(Engine, Protocol):
    """An engine behind a server that exports metrics."""

    @property
    def server_metrics(self) -> str:
        """What the server said last, in Prometheus's text format; empty before, and where it says nothing."""


def is_served(engine: Engine) -> TypeGuard[ServedEngine]:
    """Whether the engine is a server of its own."""
    return hasattr(type(engine), "server_metrics")


class ServerMetricsCollector(Collector):
    """Passes a server's metrics on, under the name that the mesh has for its model."""

    def __init__(self, read: Callable[[], str], model: str, registry: CollectorRegistry) -> None:
        """`read` is called from the metrics port's thread."""
        self._read = read
        self._model = model
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time."""
        return ()

    def collect(self) -> Iterator[Metric]:
        lines = [line for line in self._read().split("\n") if PREFIX in line]
        try:
            families = list(text_string_to_metric_families("\n".join(lines)))
        except ValueError as error:  # it is another's text, and costs the worker none of its own metrics
            log.warning("the attached server's metrics cannot be read", extra={"error": str(error)[:200]})
            return
        for family in families:
            if family.name not in PASSED_ON:
                continue
            family.samples = [
                sample._replace(labels={**sample.labels, "model_name": self._model})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield family
