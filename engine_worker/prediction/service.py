"""The state of a worker's predictions over gRPC."""

from typing import Any

from engine_worker.prediction.state import PredictionState
from penstock.v1 import predictor_pb2, predictor_pb2_grpc


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
        )
