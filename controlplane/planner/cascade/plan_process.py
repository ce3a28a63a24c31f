"""Has plans of cascades made, away from the event loop."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from controlplane.model.cascade_goal import CascadeGoal
from controlplane.planner.own_process import OwnProcess
from controlplane.planning.cascade.plan import CascadePlan
from controlplane.planning.instance_profile import InstanceProfile

if TYPE_CHECKING:
    from simulator.cascade.curves import StoredCurve

MAX_TABLES = 20_000
"""Kept from one plan to the next; dropped all at once beyond."""


class PlanMaker(Protocol):
    """Makes plans one at a time, without holding up the event loop."""

    async def make(
        self, goal: CascadeGoal, workload: tuple[bytes, ...], profiles: Mapping[str, InstanceProfile]
    ) -> CascadePlan:
        """Raises `PlanInfeasible`, `ConfigurationError`, `TraceError`; `DeadlineExceeded` where it takes too long, and
        `PeerUnavailable` if what makes it dies."""

    def stop(self) -> None:
        """Make no more; a plan that is being made is lost."""


class PlanProcess:
    """A `PlanMaker`, in a process of its own."""

    def __init__(self, seed: int, deadline_s: float) -> None:
        self._seed = seed
        self._process = OwnProcess(
            deadline_s,
            "plan",
            "plan for fewer GPUs or fewer shapes of replicas, or give it longer (penstock serve planner "
            "--plan-deadline-s)",
        )
        self._tables: tuple[StoredCurve, ...] = ()

    async def make(
        self, goal: CascadeGoal, workload: tuple[bytes, ...], profiles: Mapping[str, InstanceProfile]
    ) -> CascadePlan:
        from simulator.cascade.make_plan import make_plan  # the simulator: half a second, which only plans need

        made = await self._process.call(make_plan, goal, workload, self._tables, dict(profiles), self._seed)
        self._tables = made.tables if len(made.tables) <= MAX_TABLES else ()
        return made.plan

    def stop(self) -> None:
        """End the process; a plan that is being made is lost."""
        self._process.stop()
