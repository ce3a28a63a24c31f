"""`make test` itself: what is wrong turns it red within its part, and what is merely late is tried once more."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fault_simulation.invariants import Violation
from mesh.errors import DeadlineExceeded
from scripts import run_tests, soak_tests
from tests.conftest import GUARD
from tests.in_time import NotInTime, eventually, is_late, still, within

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import subprocess
import pytest
from tests.in_time import NotInTime, eventually

def test_right(): pass

def test_wrong(): assert "token" == "another"

def test_late(): eventually(lambda: False, 0.0, "the stream has begun")

@pytest.fixture
def leaves_something():
    yield
    raise AssertionError("a request was left")

def test_late_and_wrong(leaves_something): raise NotInTime("the stream has begun")

def test_without_a_tool(): pytest.skip("there is no etcd")

def test_without_traces(): pytest.skip("PENSTOCK_DATA names none")

def test_a_find(record_property): record_property("found", "a stream that lasts too long")
"""


async def set_a_timer() -> None:
    asyncio.get_running_loop().call_later(60.0, print).cancel()


async def open_a_channel() -> None:
    async with grpc.aio.insecure_channel("localhost:1"):
        pass


def bind() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))


@pytest.mark.live
@pytest.mark.parametrize(
    "uncertain",
    [
        bind,
        lambda: time.sleep(0.001),
        lambda: subprocess.run("true", check=True),
        lambda: asyncio.run(set_a_timer()),
        lambda: asyncio.run(open_a_channel()),
    ],
    ids=["socket", "sleep", "process", "timer", "channel"],
)
def test_a_certain_test_that_waits_for_others_fails(uncertain: Callable[[], Any]) -> None:
    with pytest.raises(pytest.fail.Exception, match="Mark it `live`"), GUARD.watching("a test"):
        uncertain()


@pytest.mark.live
def test_the_first_plot_on_a_machine_may_list_its_fonts() -> None:
    listing = compile("subprocess.run('true', check=True)", "lib/matplotlib/font_manager.py", "exec")
    with GUARD.watching("a test"):
        exec(listing, {"subprocess": subprocess})


def test_what_a_certain_test_raises_itself_goes_first() -> None:
    with pytest.raises(ValueError, match="its own"), GUARD.watching("a test"):
        raise ValueError("its own")


def test_a_wait_that_runs_out_is_late_and_what_is_wrong_is_not() -> None:
    with pytest.raises(NotInTime, match="not within 0 s: 3 streams are left"):
        eventually(list, 0.0, lambda: "3 streams are left")
    with pytest.raises(NotInTime):
        within(2.0, 1.0, "a move")
    with pytest.raises(NotInTime):
        still(False, "it runs")
    within(0.5, 1.0, "a move")
    still(True, "it runs")
    assert eventually(lambda: "this", 0.0, "that") == "this"
    late = [NotInTime("x"), TimeoutError(), DeadlineExceeded("x"), subprocess.TimeoutExpired("penstock", 60)]
    assert all(map(is_late, late))
    assert is_late(ExceptionGroup("both", [TimeoutError(), NotInTime("x")]))
    assert not is_late(ExceptionGroup("both", [TimeoutError(), AssertionError("wrong")]))
    assert not is_late(AssertionError("not in time"))
    refused, unheard = (
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        for details in ("Connection refused", "connect() timed out")
    )
    assert [is_late(refused), is_late(unheard)] == [False, True]


def test_lateness_is_told_from_broken_promises() -> None:
    kinds = ("gave up early", "wrong answer", "two owners", "endless request", "finding: an exception")
    assert [Violation(kind, 0.0, "x", "").is_lateness for kind in kinds] == [True, False, False, False, False]


def outcome(test: str, outcome: str = "passed", late: str = "", found: str = "") -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "seconds": 1.0, "late": late, "found": found}


def run_part(
    monkeypatch: pytest.MonkeyPatch, part: str, tests: list[dict[str, Any]], *, alone: bool = True
) -> tuple[run_tests.Run, list[str]]:
    """What a part with these outcomes makes of a run, and which tests were tried again."""
    tried: list[str] = []

    def answer(arguments: Sequence[str], limit_s: float) -> tuple[int, list[dict[str, Any]]]:
        if "-m" in arguments:
            return int(any(test["outcome"] == "failed" for test in tests)), tests
        tried.append(arguments[-1])
        return (0 if alone else 1), []

    monkeypatch.setattr(run_tests, "run_pytest", answer)
    run = run_tests.Run()
    chosen = next(each for each in run_tests.PARTS if each.name == part)
    run_tests._run_part(chosen, ("tests/somewhere",), run)
    return run, tried


def test_a_late_live_test_is_tried_once_more_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run, tried = run_part(monkeypatch, "live", [outcome("a"), outcome("b", "failed", "NotInTime: slow")])
    assert (run.failures, run.flaky, tried) == ([], ["FLAKY b: NotInTime: slow"], ["b"])
    assert list(run_tests._summary(run))[-1].startswith("2 passed, 1 flaky in ")


def test_one_that_is_late_again_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, tried = run_part(monkeypatch, "live", [outcome("b", "failed", "NotInTime: slow")], alone=False)
    assert (run.failures, tried) == (["FAILED b NotInTime: slow"], ["b"])


def test_what_is_wrong_is_never_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run, tried = run_part(monkeypatch, "live", [outcome("a", "failed"), outcome("b")])
    assert (run.failures, tried) == (["FAILED a"], [])


@pytest.mark.parametrize("part", ["certain", "seeds"])
def test_nothing_is_tried_again_in_the_certain_parts(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    run, tried = run_part(monkeypatch, part, [outcome("a", "failed", "TimeoutError: "), outcome("b")])
    assert (run.failures, tried) == (["FAILED a TimeoutError: "], [])


def test_more_late_tests_than_a_busy_machine_explains_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    late = [outcome(name, "failed", "NotInTime: slow") for name in "abcd"]
    run, tried = run_part(monkeypatch, "live", late)
    assert len(run.failures) == 5
    assert tried == []


def test_what_still_runs_when_a_part_is_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run, tried = run_part(monkeypatch, "live", [outcome("a"), outcome("b", "running")])
    assert (run.failures, tried) == (["FAILED b was running at the end"], [])


def test_a_find_is_told_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = run_part(monkeypatch, "seeds", [outcome("seed", found="gave up early")])
    assert (run.failures, run.found) == ([], ["FOUND seed: gave up early"])
    assert "FOUND seed: gave up early" in list(run_tests._summary(run))


def test_tests_that_are_no_longer_found_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "run_pytest", lambda arguments, limit_s: (0, [outcome("a")]))
    run = run_tests.Run()
    run_tests._run_part(run_tests.PARTS[0], (), run)
    assert run.failures == [f"certain: 1 tests passed, and {run_tests.PARTS[0].floor} are the least there should be"]


@pytest.mark.process
@pytest.mark.slow
def test_a_run_says_at_once_what_fails_and_leaves_what_became_of_each(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    outcomes = tmp_path / "outcomes"
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "-p", "tests.outcomes", "-c", str(tmp_path / "pytest.ini"),
         "--outcomes", str(outcomes), str(tmp_path)),
        cwd=ROOT, env={**os.environ, "CI": "true"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    became = {test["test"].rpartition("::")[2]: test for test in map(json.loads, outcomes.read_text().splitlines())}
    assert {name: (test["outcome"], test["late"]) for name, test in became.items()} == {
        "test_right": ("passed", ""),
        "test_wrong": ("failed", ""),
        "test_late": ("failed", "NotInTime: not within 0 s: the stream has begun"),
        "test_late_and_wrong": ("failed", ""),
        "test_without_a_tool": ("failed", ""),
        "test_without_traces": ("skipped", ""),
        "test_a_find": ("passed", ""),
    }, done.stdout
    assert became["test_a_find"]["found"] == "a stream that lasts too long"
    assert done.stdout.count("FAILED NOW") == 5, "one test fails in its call and in its teardown"


def test_a_soak_counts_what_failed_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = [
        [outcome("a"), outcome("b", "failed", "NotInTime: slow"), outcome("c", "failed")],
        [outcome("a"), outcome("b", "failed"), outcome("c")],
        [outcome("a"), outcome("b"), outcome("c")],
    ]
    left, asked = list(runs), list[Sequence[str]]()

    def answer(arguments: Sequence[str], limit_s: float) -> tuple[int, list[dict[str, Any]]]:
        asked.append(arguments)
        tests = left.pop(0)
        return int(any(test["outcome"] == "failed" for test in tests)), tests

    monkeypatch.setattr(soak_tests, "run_pytest", answer)
    counts = tmp_path / "counts.json"
    assert soak_tests.main(["--runs", "3", "--busy", "0", "--json", str(counts), "tests/somewhere"]) == 1
    told = json.loads(counts.read_text())
    assert (told["runs"], told["wrong"], told["late"]) == (3, {"b": 1, "c": 1}, {"b": 1})
    assert all(each[-1] == "tests/somewhere" for each in asked)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "2 of 3 failed, 1 of them by lateness alone: b",
        "1 of 3 failed: c",
        "3 runs of 3 live tests: 3 failed (1 by lateness alone)",
    ]
    left[:] = [runs[2]]
    assert soak_tests.main(["--runs", "1", "--busy", "0"]) == 0


def test_a_soak_that_pytest_does_not_end_has_failed() -> None:
    soak = soak_tests.Soak()
    soak.add(-9, [], is_narrowed=True)
    assert soak.has_failed
    assert next(iter(soak.lines())) == "run 1: pytest ended with -9"
