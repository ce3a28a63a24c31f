"""Puts the parts of prediction together for one worker."""

from pathlib import Path

from engine_worker.checkpoint_fingerprint import checkpoint_fingerprint
from engine_worker.engines.interface import Engine
from engine_worker.instance import Instance
from engine_worker.prediction.loop import PredictionLoop
from engine_worker.prediction.metrics import PredictionCollector
from engine_worker.prediction.predictor_link import PredictorLink
from engine_worker.prediction.service import LengthPredictionService
from engine_worker.prediction.state import PredictionState
from engine_worker.settings import WorkerSettings
from mesh.role import RoleContext
from penstock.v1 import predictor_pb2_grpc


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
