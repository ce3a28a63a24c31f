"""Independent pieces of work in a bounded number of processes."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import TypeVar

from mesh.parent_death import end_with_parent

Result = TypeVar("Result")
OnDone = Callable[[str, int, int], None]
"""Hears the name of a job that is done, how many are done and how many there are."""


def run_jobs(
    jobs: Mapping[str, Callable[[], Result]], processes: int, on_done: OnDone | None = None
) -> dict[str, Result]:
    """What each job returns, in the order of `jobs`; at most `processes` run at the same time.

    A job travels to another process: a `functools.partial` of a module's function over plain values. Its result is a
    function of those values alone, so the number of processes changes no result. With one process, or one job, all
    runs in this process. The first job that raises ends all: its error comes out of here, what has not begun never
    begins.
    """
    if processes <= 1 or len(jobs) <= 1:
        return _one_by_one(jobs, on_done)
    # Not fork: the terminal's progress bar has a thread.
    context = multiprocessing.get_context("spawn")
    results: dict[str, Result] = {}
    pool = ProcessPoolExecutor(min(processes, len(jobs)), context, _end_with_parent, (os.getpid(),))
    try:
        names: dict[Future[Result], str] = {pool.submit(job): name for name, job in jobs.items()}
        pending = set(names)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                results[names[future]] = future.result()
                if on_done is not None:
                    on_done(names[future], len(results), len(jobs))
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: results[name] for name in jobs}


def _end_with_parent(parent_pid: int) -> None:
    """Jobs take minutes: those of a killed run would go on for nobody."""
    if sys.platform == "linux":
        end_with_parent(parent_pid)


def _one_by_one(jobs: Mapping[str, Callable[[], Result]], on_done: OnDone | None) -> dict[str, Result]:
    results: dict[str, Result] = {}
    for name, job in jobs.items():
        results[name] = job()
        if on_done is not None:
            on_done(name, len(results), len(jobs))
    return results
