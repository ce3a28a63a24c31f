"""The length predictor: tells workers how long their requests will run, by trained artefacts or by what it has learnt
from the requests that ended."""

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from mesh.role import RoleContext
from mesh.runtime import ThreadPool, Threads
from mesh.tasks import TaskSet
from penstock.v1 import predictor_pb2_grpc
from services.predictor.artefact_registry import ArtefactRegistry
from services.predictor.learnt_models import LearntModels
from services.predictor.metrics import ArtefactCollector, LearntCollector, PredictorMetrics
from services.predictor.service import PredictorService
from services.predictor.settings import PredictorSettings

IDLE_S: Final = 0.5
"""How often it is looked whether there is something to learn."""
SHORTEST_REST_S: Final = 0.001


class PredictorRole:
    """Serves the artefacts of its folders as they change, and learns of the models that have none."""

    name: ClassVar[str] = "predictor"

    def __init__(self, settings: PredictorSettings) -> None:
        self._settings = settings
        self._artefacts = ArtefactRegistry(settings.artefact)
        self._learnt = LearntModels(settings.learnt_dir) if settings.learn else None
        self._pool: ThreadPool | None = None
        self._tasks = TaskSet("predictor")
        self._watching: asyncio.Task[None] | None = None

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Load what is there and serve the contract."""
        runtime = context.runtime
        self._pool = runtime.threads.pool(1, "length-predictor")
        await runtime.threads.run(self._artefacts.reload)
        metrics = PredictorMetrics(context.registry)
        service = PredictorService(self._artefacts, self._learnt, metrics, self._pool, runtime.clock.now_s)
        ArtefactCollector(self._artefacts, context.registry)
        context.server.add(
            predictor_pb2_grpc.add_LengthPredictorServicer_to_server, service, "penstock.v1.LengthPredictor"
        )
        if self._artefacts.folders:
            self._watching = self._tasks.spawn(self._watch(runtime.threads), name="artefacts")
        if self._learnt is not None:
            LearntCollector(self._learnt, context.registry)
            self._tasks.spawn(self._learn(self._learnt, self._pool, runtime.clock.now_s), name="learning")
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
            if self._learnt is not None:
                await self._pool.run(self._learnt.save)
            self._pool.close()

    async def _learn(self, learnt: LearntModels, pool: ThreadPool, clock: Callable[[], float]) -> None:
        """Step by step, on the thread that predicts, so that a call waits for one step at most; and rests after each so
        long that the share of time is kept."""
        saved_s = clock()
        while True:
            started_s = clock()
            has_learnt = await pool.run(learnt.learn)
            took_s = clock() - started_s
            rest_s = took_s * (1 / self._settings.learn_share - 1)
            await asyncio.sleep(max(rest_s, SHORTEST_REST_S if has_learnt else IDLE_S))
            if clock() - saved_s >= self._settings.learnt_save_s:
                saved_s = clock()
                await pool.run(learnt.save)

    async def _watch(self, threads: Threads) -> None:
        while True:
            await asyncio.sleep(self._settings.artefact_poll_s)
            await threads.run(self._artefacts.reload)
