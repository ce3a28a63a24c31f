"""Puts the parts of prediction together for one worker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine_worker.checkpoint_fingerprint import checkpoint_fingerprint
from engine_worker.engines.interface import Engine
from engine_worker.instance import Instance
from engine_worker.prediction.loop import PredictionLoop
from engine_worker.prediction.predictor_link import PredictorLink
from engine_worker.prediction.state import LengthSource, PredictionState
from engine_worker.settings import WorkerSettings
from mesh.role import RoleContext
from penstock.v1 import predictor_pb2, predictor_pb2_grpc

# Metrics and gRPC state of the predictions.


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
        yield GaugeMetricFamily(
            "penstock_worker_looping_requests", "Requests whose answers go round in circles", len(state.looping)
        )
        counters = (
            ("loops", "Answers that began to go round in circles", state.loops_total),
            ("prediction_batches", "Steps whose hidden states were looked at", state.batches_total),
            ("predictions", "Remaining lengths predicted", state.predictions_total),
            ("fallback_predictions", "Remaining lengths by the fallback", state.fallback_predictions_total),
            ("prediction_failures", "Calls to the predictor without an answer", state.failures_total),
            ("prediction_batches_skipped", "Overtaken by newer ones", state.skipped_batches_total),
        )
        for name, text, total in counters:
            yield CounterMetricFamily(f"penstock_worker_{name}", text, total)


class LengthPredictionService(predictor_pb2_grpc.LengthPredictionServicer):
    """gRPC service penstock.v1.LengthPrediction: where this worker's length predictions come from, for `penstock
    status`."""

    def __init__(self, state: PredictionState) -> None:
        self._state = state

    async def GetState(
        self, request: predictor_pb2.GetPredictionStateRequest, context: Any
    ) -> predictor_pb2.GetPredictionStateResponse:
        """The source in force, why it is not a better one, and totals since the start."""
        state = self._state
        return predictor_pb2.GetPredictionStateResponse(
            source=state.source.value,
            artefact=state.artefact,
            reason=state.reason,
            every_steps=state.every_steps,
            batches=state.batches_total,
            predictions=state.predictions_total,
            fallback_predictions=state.fallback_predictions_total,
            failures=state.failures_total,
            skipped_batches=state.skipped_batches_total,
            latency_ms=state.latency_ms,
            looping_requests=len(state.looping),
            loops=state.loops_total,
        )


def predict_lengths(
    instance: Instance, engine: Engine, settings: WorkerSettings, context: RoleContext
) -> PredictionLoop:
    """The loop, not running yet, with its metrics and its gRPC service."""
    state = PredictionState(settings.predict_every_steps)
    description = instance.description
    link = PredictorLink(
        context.directory,
        description.instance_id,
        description.model,
        lambda: checkpoint_fingerprint(Path(description.model_path)),
        settings.predict_deadline_ms / 1000,
        context.runtime.transport,
        context.runtime.threads,
    )
    PredictionCollector(state, context.registry)
    context.server.add(
        predictor_pb2_grpc.add_LengthPredictionServicer_to_server,
        LengthPredictionService(state),
        "penstock.v1.LengthPrediction",
    )
    return PredictionLoop(
        engine, instance.table, link, state, description.max_model_len_tokens, context.runtime.clock.now_s
    )
