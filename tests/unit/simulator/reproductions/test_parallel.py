import os
from functools import partial

import pytest

from simulator.reproductions.parallel import run_jobs


def _square(number: int) -> int:
    return number * number


def _pid(_: int) -> int:
    return os.getpid()


def _fail() -> int:
    raise ValueError("this one cannot be done")


@pytest.mark.parametrize("processes", [1, 2])
def test_results_keep_the_order_and_progress_tells_of_each(processes: int) -> None:
    heard: list[tuple[str, int, int]] = []
    jobs = {f"job {n}": partial(_square, n) for n in range(5)}
    results = run_jobs(jobs, processes, lambda *news: heard.append(news))
    assert list(results.items()) == [(f"job {n}", n * n) for n in range(5)]
    assert sorted(name for name, _, _ in heard) == sorted(jobs)
    assert [(done, total) for _, done, total in heard] == [(n + 1, 5) for n in range(5)]


def test_at_most_so_many_processes_and_none_of_them_this_one() -> None:
    pids = set(run_jobs({str(n): partial(_pid, n) for n in range(6)}, 2).values())
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_comes_out(processes: int) -> None:
    with pytest.raises(ValueError, match="cannot be done"):
        run_jobs({"good": partial(_square, 2), "bad": _fail}, processes)
