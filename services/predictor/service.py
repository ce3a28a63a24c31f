"""The length predictor's gRPC methods."""

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from controlplane.prediction.length_features import features
from mesh.errors import ConfigurationError
from mesh.runtime import ThreadPool
from penstock.v1 import predictor_pb2, predictor_pb2_grpc
from services.predictor.artefact import Artefact
from services.predictor.artefact_registry import FALLBACK, ArtefactRegistry, WatchedFolder
from services.predictor.metrics import PredictorMetrics

MAX_REQUESTS = 4096
_STATE_BYTES = 4


class PredictorService(predictor_pb2_grpc.LengthPredictorServicer):
    """Answers with the artefact of the caller's very model, or refuses; it never guesses."""

    def __init__(
        self, artefacts: ArtefactRegistry, metrics: PredictorMetrics, pool: ThreadPool, clock: Callable[[], float]
    ) -> None:
        """`pool` runs the network, so that the event loop goes on."""
        self._artefacts = artefacts
        self._metrics = metrics
        self._pool = pool
        self._clock = clock

    async def Predict(self, request: predictor_pb2.PredictRequest, context: Any) -> predictor_pb2.PredictResponse:
        """Remaining tokens of a batch of requests, from their hidden states."""
        if reason := _malformed(request):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        try:
            artefact = self._artefacts.find(request.model, request.model_fingerprint, request.hidden_size)
        except ConfigurationError as error:
            self._metrics.refused.inc()
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"{error}; callers go on with their fallback, {FALLBACK}"
            )
            raise AssertionError("abort raises") from error
        started_s = self._clock()
        remaining = await self._pool.run(_predict, artefact, request)
        self._metrics.seconds.observe(self._clock() - started_s)
        self._metrics.requests.observe(len(request.request_ids))
        return predictor_pb2.PredictResponse(remaining_tokens=remaining.tolist(), artefact=artefact.name)

    async def GetArtefact(
        self, request: predictor_pb2.GetArtefactRequest, context: Any
    ) -> predictor_pb2.GetArtefactResponse:
        """What is in force, what is not and why, and what the mesh does without."""
        folders = self._artefacts.folders
        names = (folder.artefact.name for folder in folders if folder.artefact is not None)
        return predictor_pb2.GetArtefactResponse(
            artefact=",".join(names), fallback=FALLBACK, folders=[_folder_message(folder) for folder in folders]
        )


def _malformed(request: predictor_pb2.PredictRequest) -> str:
    rows = len(request.request_ids)
    if not 0 < rows <= MAX_REQUESTS:
        return f"a batch has 1 to {MAX_REQUESTS} requests, not {rows}"
    if len(request.generated_tokens) != rows or len(request.prompt_tokens) != rows:
        return f"{rows} requests need as many generated_tokens and prompt_tokens"
    if len(request.hidden_states) != rows * request.hidden_size * _STATE_BYTES:
        return (
            f"{rows} states of width {request.hidden_size} take {rows * request.hidden_size * _STATE_BYTES} bytes, got "
            f"{len(request.hidden_states)}"
        )
    return ""


def _predict(artefact: Artefact, request: predictor_pb2.PredictRequest) -> NDArray[np.float32]:
    states = np.frombuffer(request.hidden_states, "<f4").reshape(len(request.request_ids), request.hidden_size)
    rows = features(
        artefact.metadata.inputs,
        states,
        np.array(request.prompt_tokens, np.int32),
        np.array(request.generated_tokens, np.int32),
    )
    return artefact.network.remaining_tokens(rows)


def _folder_message(folder: WatchedFolder) -> predictor_pb2.ArtefactFolder:
    message = predictor_pb2.ArtefactFolder(folder=str(folder.path), refused=folder.refused)
    if folder.artefact is not None:
        metadata = folder.artefact.metadata
        message.artefact = folder.artefact.name
        message.model = metadata.model
        message.model_fingerprint = metadata.model_fingerprint
        message.hidden_size = metadata.hidden_size
        message.inputs = metadata.inputs
        message.test_mae_tokens = metadata.mae_tokens["test"]
    return message
