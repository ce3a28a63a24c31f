import os
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from simulator.reproductions.parallel import run_jobs

HANG_S = 30.0


def _square(number: int) -> int:
    return number * number


def _pid(_: int) -> int:
    return os.getpid()


def _fail() -> int:
    raise ValueError("this one cannot be done")


@pytest.mark.process
@pytest.mark.parametrize("processes", [1, 2])
def test_results_keep_the_order_and_progress_tells_of_each(processes: int) -> None:
    heard: list[tuple[str, int, int]] = []
    jobs = {f"job {n}": partial(_square, n) for n in range(5)}
    results = run_jobs(jobs, processes, lambda *news: heard.append(news))
    assert list(results.items()) == [(f"job {n}", n * n) for n in range(5)]
    assert sorted(name for name, _, _ in heard) == sorted(jobs)
    assert [(done, total) for _, done, total in heard] == [(n + 1, 5) for n in range(5)]


@pytest.mark.process
def test_at_most_so_many_processes_and_none_of_them_this_one() -> None:
    pids = set(run_jobs({str(n): partial(_pid, n) for n in range(6)}, 2).values())
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids


@pytest.mark.process
@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_comes_out(processes: int) -> None:
    with pytest.raises(ValueError, match="cannot be done"):
        run_jobs({"good": partial(_square, 2), "bad": _fail}, processes)


def _hold_open(fifo: Path, number: int) -> None:
    with fifo.open("w") as pipe:
        pipe.write(str(number))
        pipe.flush()
        signal.pause()


def _run_for_ever(fifo: Path) -> None:
    run_jobs({str(n): partial(_hold_open, fifo, n) for n in range(2)}, 2)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel has to tell")
def test_jobs_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    code = f"from pathlib import Path; from {__name__} import _run_for_ever; _run_for_ever(Path({str(fifo)!r}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as run, fifo.open() as held:
        assert {held.read(1), held.read(1)} == {"0", "1"}, "both jobs run"
        run.kill()
        assert select.select([held], [], [], HANG_S)[0], "a job goes on"
        assert held.read() == "", "the end of the pipe: nobody holds it any more"
