"""Cascade plans and capacities as a planner has them made, without a process to make them in."""

import random
from collections.abc import Mapping
from typing import Final

from controlplane.model.cascade_goal import CascadeGoal
from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.planning.autoscale.profiled_capacity import CapacityCase
from controlplane.planning.cascade.plan import CascadePlan
from controlplane.planning.instance_profile import InstanceProfile
from mesh.errors import PeerUnavailable
from mesh.runtime import Clock

SHORTEST_PLANNING_S: Final = 0.5
LONGEST_PLANNING_S: Final = 20.0
CAPACITY_S: Final = 10.0
CAPACITY_REQUESTS: Final = 200
"""Fewer than a planner's: they cost real CPU."""


class SimulatedPlanMaker:
    """A `controlplane.planner.cascade.plan_process.PlanMaker`: takes a drawn time, then the plan is made at once. That
    costs real seconds of CPU, so goals are for few seeds."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._is_stopped = False

    async def make(
        self, goal: CascadeGoal, workload: tuple[bytes, ...], profiles: Mapping[str, InstanceProfile]
    ) -> CascadePlan:
        # Half a second of imports, which no seed without goals is to pay for.
        from simulator.cascade.make_plan import make_plan

        await self._clock.sleep(self._rng.uniform(SHORTEST_PLANNING_S, LONGEST_PLANNING_S))
        if self._is_stopped:
            raise PeerUnavailable("what makes plans was stopped")
        return make_plan(goal, workload, (), dict(profiles)).plan

    def stop(self) -> None:
        """Make no more."""
        self._is_stopped = True


class SimulatedCapacityMaker:
    """A `controlplane.planner.autoscale.capacity_process.CapacityMaker`, likewise."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_stopped = False

    async def curve(self, case: CapacityCase) -> CapacityCurve:
        from simulator.autoscale.profiled import profiled_curve  # as above

        await self._clock.sleep(CAPACITY_S)
        if self._is_stopped:
            raise PeerUnavailable("what works out capacities was stopped")
        return profiled_curve(case, 0, CAPACITY_REQUESTS)

    def stop(self) -> None:
        """Make no more."""
        self._is_stopped = True
