"""Several simulations at once, each in a process of its own."""

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from ctypes import c_longlong
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from services.cli.simulation.plan import SimulationPlan, planned_requests, simulate
from services.cli.simulation.run import SimulationRun

REFRESH_S = 0.25

_ended: "list[Synchronized[Any]]" = []
"""In a child process: how many requests have ended, by simulation. Shared memory comes in at the start only."""


def simulate_in_parallel(
    plans: Mapping[str, SimulationPlan], processes: int, on_progress: Callable[[str, int], None]
) -> dict[str, SimulationRun]:
    """Runs by name, in the order of `plans`; at most `processes` run at the same time."""
    # Not fork: the terminal's progress bar has a thread.
    context = multiprocessing.get_context("spawn")
    counters = [context.Value(c_longlong) for _ in plans]
    with ProcessPoolExecutor(processes, context, initializer=_adopt, initargs=(counters,)) as pool:
        futures = {name: pool.submit(_simulate, plan, number) for number, (name, plan) in enumerate(plans.items())}
        pending: set[Future[SimulationRun]] = set(futures.values())
        while pending:
            pending = wait(pending, timeout=REFRESH_S).not_done
            for name, counter in zip(plans, counters, strict=True):
                on_progress(name, counter.value)
        return {name: future.result() for name, future in futures.items()}


def _adopt(counters: "list[Synchronized[Any]]") -> None:
    _ended.extend(counters)


def _simulate(plan: SimulationPlan, number: int) -> SimulationRun:
    # The trace is read here again: that takes less than to send its requests over.
    requests, _ = planned_requests(plan)

    def note(ended: int) -> None:
        _ended[number].value = ended

    return simulate(plan, requests, note)
