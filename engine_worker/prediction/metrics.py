"""What a worker shows of its predictions on its metrics port."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine_worker.prediction.state import LengthSource, PredictionState


class PredictionCollector(Collector):
    """Reads the state when Prometheus asks."""

    def __init__(self, state: PredictionState, registry: CollectorRegistry) -> None:
        self._state = state
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        state = self._state
        source = GaugeMetricFamily(
            "penstock_worker_length_source", "1 for where remaining lengths come from now", labels=("source",)
        )
        for kind in LengthSource:
            source.add_metric((kind.value,), float(kind is state.source))
        yield source
        yield GaugeMetricFamily(
            "penstock_worker_prediction_latency_ms", "Last call to the length predictor", state.latency_ms
        )
        counters = (
            ("prediction_batches", "Steps whose hidden states were looked at", state.batches_total),
            ("predictions", "Remaining lengths predicted", state.predictions_total),
            ("fallback_predictions", "Remaining lengths by the fallback", state.fallback_predictions_total),
            ("prediction_failures", "Calls to the predictor without an answer", state.failures_total),
            ("prediction_batches_skipped", "Overtaken by newer ones", state.skipped_batches_total),
        )
        for name, text, total in counters:
            yield CounterMetricFamily(f"penstock_worker_{name}", text, total)
