"""The planner role."""

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from controlplane.planner.service import PlannerService
from controlplane.planner.settings import PlannerSettings
from mesh.role import RoleContext
from penstock.v1 import planner_pb2_grpc


class PlannerRole:
    """Serves the plan that stands in the state store."""

    name: ClassVar[str] = "planner"

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Serve the contract."""
        context.server.add(
            planner_pb2_grpc.add_PlannerServicer_to_server, PlannerService(context.store), "penstock.v1.Planner"
        )
        return {}

    async def failed(self) -> None:
        """Never: nothing runs in the background."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Nothing to wait for: every answer is immediate."""

    async def stop(self) -> None:
        """Nothing to free."""
