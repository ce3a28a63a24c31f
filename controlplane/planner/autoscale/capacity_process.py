"""Has capacities worked out from profiles, away from the event loop."""

from typing import Final, Protocol

from controlplane.planner.own_process import OwnProcess
from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.planning.autoscale.profiled_capacity import CapacityCase

DEADLINE_S: Final = 300.0


class CapacityMaker(Protocol):
    """Works capacities out one at a time, without holding up the event loop."""

    async def curve(self, case: CapacityCase) -> CapacityCurve:
        """Raises `PlanInfeasible` and `ConfigurationError` for a case that has none; `DeadlineExceeded` where it takes
        too long, and `PeerUnavailable` if what makes it dies."""

    def stop(self) -> None:
        """Make no more; what is being worked out is lost."""


class CapacityProcess:
    """A `CapacityMaker`, in a process of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        advice = "what replicas are seen to sustain counts meanwhile; `penstock autoscale set --capacity` states it"
        self._process = OwnProcess(DEADLINE_S, "capacity", advice)

    async def curve(self, case: CapacityCase) -> CapacityCurve:
        from simulator.autoscale.profiled import profiled_curve  # the simulator: half a second

        return await self._process.call(profiled_curve, case, self._seed)

    def stop(self) -> None:
        self._process.stop()
