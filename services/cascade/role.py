"""The cascade role."""

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from mesh.role import RoleContext
from penstock.v1 import cascade_pb2_grpc
from services.cascade.service import CascadeService
from services.cascade.settings import CascadeSettings


class CascadeRole:
    """Serves the cascade's contract; without a judge it refuses to judge."""

    name: ClassVar[str] = "cascade"

    def __init__(self, settings: CascadeSettings) -> None:
        self._settings = settings

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Serve the contract."""
        context.server.add(cascade_pb2_grpc.add_CascadeServicer_to_server, CascadeService(), "penstock.v1.Cascade")
        return {}

    async def failed(self) -> None:
        """Never: nothing runs in the background."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Nothing to wait for: every answer is immediate."""

    async def stop(self) -> None:
        """Nothing to free."""
