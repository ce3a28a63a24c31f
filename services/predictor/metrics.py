"""Prometheus metrics of the length predictor."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.predictor.artefact_registry import ArtefactRegistry
from services.predictor.learnt_models import LearntModels

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class PredictorMetrics:
    """Prometheus metrics of calls to the predictor: time, size of a batch, refusals."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "penstock_predictor_batch_seconds", "Time in the network per call", buckets=_SECONDS, registry=registry
        )
        self.requests = Histogram(
            "penstock_predictor_batch_requests", "Requests per call", buckets=_REQUESTS, registry=registry
        )
        self.refused = Counter(
            "penstock_predictor_refused_calls", "Calls that no artefact could answer", registry=registry
        )


class ArtefactCollector(Collector):
    """The artefacts in force as Prometheus metrics, read at each scrape."""

    def __init__(self, artefacts: ArtefactRegistry, registry: CollectorRegistry) -> None:
        self._artefacts = artefacts
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        in_force = GaugeMetricFamily(
            "penstock_predictor_artefact", "1 for each artefact in force", labels=("model", "version")
        )
        error = GaugeMetricFamily(
            "penstock_predictor_artefact_mae_tokens", "Its error on held-out requests when trained", labels=("model",)
        )
        refused = GaugeMetricFamily(
            "penstock_predictor_folder_refused", "1 if what lies in the folder is not in force", labels=("folder",)
        )
        for folder in self._artefacts.folders:
            refused.add_metric((str(folder.path),), float(bool(folder.refused)))
            if folder.artefact is not None:
                metadata = folder.artefact.metadata
                in_force.add_metric((metadata.model, metadata.version), 1.0)
                error.add_metric((metadata.model,), metadata.mae_tokens["test"])
        yield from (in_force, error, refused)
        yield CounterMetricFamily("penstock_predictor_swaps", "Artefacts taken up", self._artefacts.swaps_total)
        yield CounterMetricFamily("penstock_predictor_refusals", "Artefacts refused", self._artefacts.refusals_total)


class LearntCollector(Collector):
    """What is learnt of each model's lengths, read at each scrape."""

    def __init__(self, learnt: LearntModels, registry: CollectorRegistry) -> None:
        self._learnt = learnt
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        gauges = (
            ("ended_requests", "Requests that were learnt from", "ended_requests"),
            ("is_network", "1 where the network answers, 0 while the residual life does", "is_learnt"),
            ("mae_tokens", "Mean absolute error of the network on the latest requests", "mae_tokens"),
            ("residual_mae_tokens", "The same of the residual life", "residual_mae_tokens"),
            ("coverage", "Share of the latest lengths within the range that was said", "coverage"),
            ("steps_due", "Steps of learning that wait for CPU time", "steps_due"),
        )
        standings = self._learnt.standings()
        for name, text, field in gauges:
            gauge = GaugeMetricFamily(f"penstock_predictor_learnt_{name}", text, labels=("model", "hidden_size"))
            for model, standing in standings.items():
                gauge.add_metric((model.model, str(model.hidden_size)), float(getattr(standing, field)))
            yield gauge
        yield CounterMetricFamily(
            "penstock_predictor_length_drifts", "Times that ranges suddenly missed", self._learnt.drifts_total
        )
