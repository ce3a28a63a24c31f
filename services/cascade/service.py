"""The cascade router's gRPC methods while no cascade is configured."""

from typing import Any

import grpc

from penstock.v1 import cascade_pb2, cascade_pb2_grpc


class CascadeService(cascade_pb2_grpc.CascadeServicer):
    """Says that there is no judge and no tier, instead of accepting everything."""

    async def Judge(self, request: cascade_pb2.JudgeRequest, context: Any) -> cascade_pb2.JudgeResponse:
        """Refuses: there is no judge."""
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            "no judge is configured; ask for a model by its own name, its answers are not judged",
        )
        raise AssertionError("abort raises")

    async def GetThresholds(
        self, request: cascade_pb2.GetThresholdsRequest, context: Any
    ) -> cascade_pb2.GetThresholdsResponse:
        """No tiers, no thresholds."""
        return cascade_pb2.GetThresholdsResponse()
