"""Without an artefact the predictor refuses, and says what callers do instead."""

import grpc
import pytest

from mesh.rpc.client import open_channel
from penstock.v1 import predictor_pb2, predictor_pb2_grpc
from services.predictor.role import PredictorRole
from services.predictor.settings import PredictorSettings
from tests.unit.controlplane.local_mesh import local_mesh


async def test_without_an_artefact_nothing_is_predicted() -> None:
    async with local_mesh() as mesh:
        predictor = await mesh.start(PredictorRole(PredictorSettings()), "predictor-0")
        async with open_channel(predictor.address) as channel:
            stub = predictor_pb2_grpc.LengthPredictorStub(channel)
            with pytest.raises(
                grpc.aio.AioRpcError, match="no length predictor is loaded for the model 'm'"
            ) as refused:
                await stub.Predict(predictor_pb2.PredictRequest(model="m"))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            answer = await stub.GetArtefact(predictor_pb2.GetArtefactRequest())
            assert answer.artefact == ""
            assert "no prediction" in answer.fallback
