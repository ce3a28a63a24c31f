"""The length predictor: serves trained artefacts to workers, which send it hidden states."""

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from mesh.role import RoleContext
from mesh.runtime import ThreadPool, Threads
from mesh.tasks import TaskSet
from penstock.v1 import predictor_pb2_grpc
from services.predictor.artefact_registry import ArtefactRegistry
from services.predictor.metrics import ArtefactCollector, PredictorMetrics
from services.predictor.service import PredictorService
from services.predictor.settings import PredictorSettings


class PredictorRole:
    """Serves the artefacts of its folders as they change; without one it refuses to predict."""

    name: ClassVar[str] = "predictor"

    def __init__(self, settings: PredictorSettings) -> None:
        self._settings = settings
        self._artefacts = ArtefactRegistry(settings.artefact)
        self._pool: ThreadPool | None = None
        self._tasks = TaskSet("predictor")
        self._watching: asyncio.Task[None] | None = None

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Load what is there and serve the contract."""
        runtime = context.runtime
        self._pool = runtime.threads.pool(1, "length-predictor")
        await runtime.threads.run(self._artefacts.reload)
        service = PredictorService(self._artefacts, PredictorMetrics(context.registry), self._pool, runtime.clock.now_s)
        ArtefactCollector(self._artefacts, context.registry)
        context.server.add(
            predictor_pb2_grpc.add_LengthPredictorServicer_to_server, service, "penstock.v1.LengthPredictor"
        )
        if self._artefacts.folders:
            self._watching = self._tasks.spawn(self._watch(runtime.threads), name="artefacts")
        return {}

    async def failed(self) -> None:
        """A folder that cannot be read is shown, and what was loaded before goes on to be served; but raises what ended
        the watch, without which nothing new would be taken up."""
        await (self._watching if self._watching is not None else asyncio.Event().wait())

    async def drain(self) -> None:
        """Returns at once: every call is answered immediately."""

    async def stop(self) -> None:
        """Stop watching the folders, and end the thread that computes predictions."""
        await self._tasks.cancel()
        if self._pool is not None:
            self._pool.close()

    async def _watch(self, threads: Threads) -> None:
        while True:
            await asyncio.sleep(self._settings.artefact_poll_s)
            await threads.run(self._artefacts.reload)
