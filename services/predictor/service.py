"""The length predictor's gRPC methods."""

import math
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from controlplane.prediction.length_features import features
from controlplane.prediction.length_learner import running_requests
from controlplane.prediction.repetition import Repetition
from mesh.errors import ConfigurationError
from mesh.runtime import ThreadPool
from penstock.v1 import predictor_pb2, predictor_pb2_grpc
from services.predictor.artefact import Artefact
from services.predictor.artefact_registry import FALLBACK, ArtefactRegistry, WatchedFolder
from services.predictor.learnt_models import LearntModel, LearntModels
from services.predictor.metrics import PredictorMetrics

MAX_REQUESTS = 4096
MAX_HIDDEN_SIZE = 65536
_STATE_BYTES = 4


class PredictorService(predictor_pb2_grpc.LengthPredictorServicer):
    """Answers with the artefact of the caller's very model, else with what is learnt of it, or refuses."""

    def __init__(
        self,
        artefacts: ArtefactRegistry,
        learnt: LearntModels | None,
        metrics: PredictorMetrics,
        pool: ThreadPool,
        clock: Callable[[], float],
    ) -> None:
        """`pool`, of one thread, runs the networks, so that the event loop goes on. `learnt` None: nothing is
        learnt."""
        self._artefacts = artefacts
        self._learnt = learnt
        self._metrics = metrics
        self._pool = pool
        self._clock = clock

    async def Predict(self, request: predictor_pb2.PredictRequest, context: Any) -> predictor_pb2.PredictResponse:
        """Remaining tokens of a batch of requests, from their hidden states and what else is known of them."""
        if reason := _malformed(request):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        started_s = self._clock()
        try:
            answer = await self._answer(request)
        except ConfigurationError as error:
            self._metrics.refused.inc()
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"{error}; callers go on with their fallback, {FALLBACK}"
            )
            raise AssertionError("abort raises") from error
        self._metrics.seconds.observe(self._clock() - started_s)
        self._metrics.requests.observe(len(request.request_ids))
        return answer

    async def _answer(self, request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
        """Raises `ConfigurationError` where nobody may answer."""
        try:
            artefact = self._artefacts.find(request.model, request.model_fingerprint, request.hidden_size)
        except ConfigurationError:
            if self._learnt is None:
                raise
            return await self._pool.run(_predict_by_learnt, self._learnt, request)
        remaining = await self._pool.run(_predict, artefact, request)
        return predictor_pb2.PredictResponse(remaining_tokens=remaining.tolist(), artefact=artefact.name)

    async def GetArtefact(
        self, request: predictor_pb2.GetArtefactRequest, context: Any
    ) -> predictor_pb2.GetArtefactResponse:
        """What is in force, what is not and why, and what the mesh does without."""
        folders = self._artefacts.folders
        names = (folder.artefact.name for folder in folders if folder.artefact is not None)
        return predictor_pb2.GetArtefactResponse(
            artefact=",".join(names),
            fallback=FALLBACK,
            folders=[_folder_message(folder) for folder in folders],
            learns=self._learnt is not None,
            learnt=[] if self._learnt is None else await self._pool.run(_learnt_messages, self._learnt),
        )


def _malformed(request: predictor_pb2.PredictRequest) -> str:
    rows = len(request.request_ids)
    if not 0 < rows <= MAX_REQUESTS:
        return f"a batch has 1 to {MAX_REQUESTS} requests, not {rows}"
    if len(request.generated_tokens) != rows or len(request.prompt_tokens) != rows:
        return f"{rows} requests need as many generated_tokens and prompt_tokens"
    for column in (request.period_tokens, request.repeated_tokens, request.distinct_share):
        if len(column) not in (0, rows):
            return f"{rows} requests need as many period_tokens, repeated_tokens and distinct_share, or none"
    if len(request.ended_request_ids) != len(request.ended_output_tokens):
        return "ended_request_ids need as many ended_output_tokens"
    if len(request.ended_request_ids) > MAX_REQUESTS or request.hidden_size > MAX_HIDDEN_SIZE:
        return f"at most {MAX_REQUESTS} requests have ended since the last call, and states are {MAX_HIDDEN_SIZE} wide"
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


def _predict_by_learnt(learnt: LearntModels, request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
    """What is not known yet is not a number."""
    rows = len(request.request_ids)
    model = LearntModel(request.model, request.model_fingerprint, request.hidden_size)
    columns = (request.period_tokens, request.repeated_tokens, request.distinct_share)
    period, repeated, distinct = (np.array(column if column else [0] * rows, np.float32) for column in columns)
    requests = running_requests(
        request.request_ids,
        request.prompt_tokens,
        request.generated_tokens,
        np.frombuffer(request.hidden_states, "<f4").reshape(rows, request.hidden_size),
        Repetition(period.astype(np.int32), repeated.astype(np.int32), distinct).features(),
    )
    ended = list(zip(request.ended_request_ids, request.ended_output_tokens, strict=True))
    said = learnt.predict(model, requests, ended)
    unknown = [math.nan] * rows
    return predictor_pb2.PredictResponse(
        remaining_tokens=unknown if said is None else said.median.tolist(),
        low_tokens=unknown if said is None else said.low.tolist(),
        high_tokens=unknown if said is None else said.high.tolist(),
        artefact=model.name,
        is_learnt=True,
    )


def _learnt_messages(learnt: LearntModels) -> list[predictor_pb2.LearntLengths]:
    return [
        predictor_pb2.LearntLengths(
            model=model.model,
            model_fingerprint=model.fingerprint,
            hidden_size=model.hidden_size,
            ended_requests=standing.ended_requests,
            is_network=standing.is_learnt,
            mae_tokens=standing.mae_tokens,
            residual_mae_tokens=standing.residual_mae_tokens,
            coverage=standing.coverage,
            drifts=standing.drifts,
            steps_due=standing.steps_due,
        )
        for model, standing in learnt.standings().items()
    ]


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
