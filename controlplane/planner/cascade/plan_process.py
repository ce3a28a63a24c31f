"""Has plans made in a process of their own: they take seconds of CPU, during which calls must still be answered."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from controlplane.model.cascade_goal import CascadeGoal
from controlplane.planning.cascade.plan import CascadePlan
from controlplane.planning.instance_profile import InstanceProfile
from mesh.errors import DeadlineExceeded, PeerUnavailable

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
    """A `PlanMaker`. Starts its process with the first plan, and another after one that had to be ended."""

    def __init__(self, seed: int, deadline_s: float) -> None:
        self._seed = seed
        self._deadline_s = deadline_s
        self._pool: ProcessPoolExecutor | None = None
        self._pid = 0
        """Of the process in the pool, once it has told."""
        self._tables: tuple[StoredCurve, ...] = ()

    async def make(
        self, goal: CascadeGoal, workload: tuple[bytes, ...], profiles: Mapping[str, InstanceProfile]
    ) -> CascadePlan:
        """See `PlanMaker`."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._made(goal, workload, profiles)
        except TimeoutError:
            self.stop()
            raise DeadlineExceeded(
                f"no plan was made within {self._deadline_s:g} s, and its process was ended: plan for fewer GPUs or "
                "fewer shapes of replicas, or give it longer (penstock serve planner --plan-deadline-s)"
            ) from None
        except BrokenExecutor as error:
            self._pid = 0  # that is gone, and may be another's by now
            self.stop()
            raise PeerUnavailable(
                f"the process that makes plans has died, the next plan gets another: {error}"
            ) from error

    async def _made(
        self, goal: CascadeGoal, workload: tuple[bytes, ...], profiles: Mapping[str, InstanceProfile]
    ) -> CascadePlan:
        from simulator.cascade.make_plan import make_plan  # the simulator: half a second, which only plans need

        loop = asyncio.get_running_loop()
        if self._pool is None:
            # spawn: a fork would copy the threads and sockets of gRPC.
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            self._pid = await loop.run_in_executor(self._pool, os.getpid)
        made = await loop.run_in_executor(
            self._pool, make_plan, goal, workload, self._tables, dict(profiles), self._seed
        )
        self._tables = made.tables if len(made.tables) <= MAX_TABLES else ()
        return made.plan

    def stop(self) -> None:
        """End the process; a plan that is being made is lost."""
        pool, self._pool = self._pool, None
        pid, self._pid = self._pid, 0
        if pool is None:
            return
        pool.shutdown(wait=False, cancel_futures=True)
        if pid:
            # The pool itself would wait for what the process is at, and so would the end of this one.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
