"""What every migration of a worker works with."""

from collections.abc import Callable
from dataclasses import dataclass

from engine_worker.coordinator.metrics import MigrationMetrics
from engine_worker.coordinator.settings import CoordinatorSettings
from engine_worker.engines.movable import MovableEngine
from engine_worker.instance import Instance
from mesh.tasks import TaskSet


@dataclass(frozen=True, slots=True)
class Workplace:
    """One per worker."""

    instance: Instance
    engine: MovableEngine
    settings: CoordinatorSettings
    metrics: MigrationMetrics
    tasks: TaskSet
    clock: Callable[[], float]
    """Seconds, that of the instance."""

    @property
    def now_ms(self) -> float:
        """For the protocol."""
        return 1000 * self.clock()
