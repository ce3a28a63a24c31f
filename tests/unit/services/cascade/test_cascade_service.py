"""Without a configured cascade nothing is judged."""

import grpc
import pytest

from mesh.rpc.client import open_channel
from penstock.v1 import cascade_pb2, cascade_pb2_grpc
from services.cascade.role import CascadeRole
from services.cascade.settings import CascadeSettings
from tests.unit.controlplane.local_mesh import local_mesh


async def test_without_a_judge_nothing_is_judged() -> None:
    async with local_mesh() as mesh:
        cascade = await mesh.start(CascadeRole(CascadeSettings()), "cascade-0")
        async with open_channel(cascade.address) as channel:
            stub = cascade_pb2_grpc.CascadeStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="no judge is configured") as refused:
                await stub.Judge(cascade_pb2.JudgeRequest(request_id="r", answer="4"))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            answer = await stub.GetThresholds(cascade_pb2.GetThresholdsRequest())
            assert (list(answer.tiers), list(answer.thresholds)) == ([], [])
