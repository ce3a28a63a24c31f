"""The planner's gRPC methods."""

from typing import Any

import grpc

from mesh.errors import StoreError
from mesh.store.interface import StateStore
from penstock.v1 import planner_pb2, planner_pb2_grpc

PLAN_KEY = "/penstock/plan"


class PlannerService(planner_pb2_grpc.PlannerServicer):
    """Shows the plan that stands in the state store; empty while there is none."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    async def GetPlan(self, request: planner_pb2.GetPlanRequest, context: Any) -> planner_pb2.GetPlanResponse:
        """The plan in force."""
        try:
            entry = await self._store.get(PLAN_KEY)
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise AssertionError("abort raises") from None
        if entry is None:
            return planner_pb2.GetPlanResponse()
        return planner_pb2.GetPlanResponse(revision=entry.mod_revision, plan_json=entry.value.decode())
