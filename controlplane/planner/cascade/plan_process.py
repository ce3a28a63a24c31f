"""Has plans made in a process of their own: they take seconds of CPU, during which calls must still be answered."""

import asyncio
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import TYPE_CHECKING

from controlplane.model.cascade_goal import CascadeGoal
from controlplane.planning.cascade.plan import CascadePlan
from controlplane.planning.instance_profile import InstanceProfile

if TYPE_CHECKING:
    from simulator.cascade.curves import StoredCurve

MAX_TABLES = 20_000
"""Kept from one plan to the next; dropped all at once beyond."""


class PlanProcess:
    """Starts its process with the first plan."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pool: ProcessPoolExecutor | None = None
        self._tables: tuple[StoredCurve, ...] = ()

    async def make(
        self, goal: CascadeGoal, workload: tuple[bytes, ...], profiles: Mapping[str, InstanceProfile]
    ) -> CascadePlan:
        """Raises `PlanInfeasible`, `ConfigurationError`, `TraceError`; `BrokenExecutor` if the process dies."""
        from simulator.cascade.make_plan import make_plan  # the simulator: half a second, which only plans need

        if self._pool is None:
            # spawn: a fork would copy the threads and sockets of gRPC.
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        loop = asyncio.get_running_loop()
        try:
            made = await loop.run_in_executor(
                self._pool, make_plan, goal, workload, self._tables, dict(profiles), self._seed
            )
        except BrokenExecutor:
            self._pool = None  # it was killed; the next plan gets another
            raise
        self._tables = made.tables if len(made.tables) <= MAX_TABLES else ()
        return made.plan

    def stop(self) -> None:
        """End the process; a plan that is being made is lost."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
