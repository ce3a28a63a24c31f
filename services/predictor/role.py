"""The length predictor role."""

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from mesh.role import RoleContext
from penstock.v1 import predictor_pb2_grpc
from services.predictor.service import PredictorService
from services.predictor.settings import PredictorSettings


class PredictorRole:
    """Serves the predictor's contract; without an artefact it refuses to predict."""

    name: ClassVar[str] = "predictor"

    def __init__(self, settings: PredictorSettings) -> None:
        self._settings = settings

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Serve the contract."""
        context.server.add(
            predictor_pb2_grpc.add_LengthPredictorServicer_to_server, PredictorService(), "penstock.v1.LengthPredictor"
        )
        return {}

    async def failed(self) -> None:
        """Never: nothing runs in the background."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Nothing to wait for: every answer is immediate."""

    async def stop(self) -> None:
        """Nothing to free."""
