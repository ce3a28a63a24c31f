"""The length predictor's gRPC methods while no artefact is loaded."""

from typing import Any

import grpc

from penstock.v1 import predictor_pb2, predictor_pb2_grpc

FALLBACK = "no prediction: requests stay on the instance on which they were placed"


class PredictorService(predictor_pb2_grpc.LengthPredictorServicer):
    """Says that there is no predictor, instead of guessing."""

    async def Predict(self, request: predictor_pb2.PredictRequest, context: Any) -> predictor_pb2.PredictResponse:
        """Refuses: there is no artefact."""
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"no length predictor is loaded for the model {request.model!r}; callers go on with: {FALLBACK}",
        )
        raise AssertionError("abort raises")

    async def GetArtefact(
        self, request: predictor_pb2.GetArtefactRequest, context: Any
    ) -> predictor_pb2.GetArtefactResponse:
        """None, and what the mesh does without one."""
        return predictor_pb2.GetArtefactResponse(artefact="", fallback=FALLBACK)
