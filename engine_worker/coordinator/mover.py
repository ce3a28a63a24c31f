"""The moving part of a worker: coordinator, its service, stages and the drain, put together for the role."""

import asyncio

from engine_worker.coordinator.coordinator import Coordinator
from engine_worker.coordinator.drain import evacuate
from engine_worker.coordinator.hand_overs import HandOvers
from engine_worker.coordinator.inquiry import DecodeInquiry
from engine_worker.coordinator.metrics import MigrationMetrics
from engine_worker.coordinator.outgoing import MigrationOutcome
from engine_worker.coordinator.service import MigrationService
from engine_worker.coordinator.settings import CoordinatorSettings
from engine_worker.coordinator.stages.coordinator import StageCoordinator
from engine_worker.coordinator.workplace import Workplace
from engine_worker.engines.movable import MovableEngine
from engine_worker.instance import Instance
from mesh.leadership_state import Fence
from mesh.role import RoleContext
from mesh.shutdown import ExitStatus
from mesh.tasks import TaskSet
from penstock.v1 import migration_pb2_grpc


class Mover:
    """Serves `penstock.v1.Migration` on the role's server and moves requests away."""

    def __init__(
        self,
        instance: Instance,
        engine: MovableEngine,
        context: RoleContext,
        fence: Fence,
    ) -> None:
        """`fence` knows the leaders whose orders and plans are taken."""
        self._instance = instance
        self._ending = context.shutdown
        self._transport = context.runtime.transport
        self._tasks = TaskSet("mover")
        self._evacuation: asyncio.Task[int] | None = None
        self._is_leaving = False
        settings, metrics = CoordinatorSettings(), MigrationMetrics(context.registry)
        workplace = Workplace(instance, engine, settings, metrics, TaskSet("coordinator"), context.runtime.clock.now_s)
        self.coordinator = Coordinator(workplace, context.directory, self._transport)
        self._inquiry = DecodeInquiry(context.directory, self._transport, fence)
        self._hand_overs = HandOvers(workplace, self.coordinator, self._inquiry)
        context.server.add(
            migration_pb2_grpc.add_MigrationServicer_to_server,
            MigrationService(instance, self.coordinator.arrivals, settings.unsent_messages),
            "penstock.v1.Migration",
        )
        self.stages = StageCoordinator(instance, self.coordinator, context, fence)
        self.stages.start()

    @property
    def hand_overs(self) -> int:
        """Requests that are to go to another instance after their first token."""
        return len(self._hand_overs)

    async def migrate(self, request_id: str, target_id: str, *, stop_and_copy: bool = False) -> MigrationOutcome:
        """See `Coordinator.migrate`."""
        return await self.coordinator.migrate(request_id, target_id, stop_and_copy=stop_and_copy)

    def hand_over(self, request_id: str, target_id: str) -> None:
        """See `HandOvers.order`."""
        self._hand_overs.order(request_id, target_id)

    def evacuate(self) -> None:
        """Begin to move all requests of a draining instance away, unless that goes on already."""
        if self._evacuation is None or self._evacuation.done():
            self._evacuation = self._tasks.spawn(
                evacuate(self._instance, self.coordinator, self._transport), name="evacuate"
            )

    def leave(self) -> None:
        """Move all requests away, then end the process. Once is enough, more is no harm."""
        if not self._is_leaving:
            self._is_leaving = True
            self.evacuate()
            self._tasks.spawn(self._leave(), name="leave")

    def tick(self) -> None:
        """Time has passed."""
        self.coordinator.tick()
        self.stages.tick()

    def validate(self) -> None:
        """Check what must hold between two events. Raises `InvariantBroken`."""
        self.stages.manager.validate()

    async def stop(self) -> None:
        """See `Coordinator.stop`."""
        await self.stages.stop()
        await self.coordinator.stop()
        await self._inquiry.close()
        await self._tasks.cancel()

    async def _leave(self) -> None:
        await self._instance.drained()
        self._ending.ask(ExitStatus.DRAINED)
