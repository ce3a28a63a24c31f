"""Runs all checks and tests in four parts, and says at the end what failed, why, and where the time went.

    python scripts/run_tests.py [PYTEST ARGUMENT ...]

The parts are those of docs/testing.md: style and types, certain tests, seeds, live tests. Every part runs, whatever
became of those before it. A live test that failed by lateness alone is tried once more, alone in a new process, at most
`MOST_RETRIES` in a run; if it passes then, it is FLAKY. Arguments narrow the tests of the last three parts, as they do
for pytest, and lift the floor under their number.

Exit status: 0 everything passed, 1 something failed, 130 interrupted.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
ELSEWHERE: Final = "not clients and not docker and not ray and not kubernetes and not ranks and not browser"
"""Tests with a command of their own (CONTRIBUTING.md)."""
MOST_RETRIES: Final = 3
SHOWN_SLOWEST: Final = 20
NONE_CHOSEN: Final = 5
"""pytest's exit status."""
INTERRUPTED: Final = 130
ENDING_S: Final = 60.0
"""For pytest to say what it knows, once its part has taken too long."""
RETRY_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that run together."""

    name: str
    chosen: str
    """A marker expression."""
    arguments: tuple[str, ...]
    limit_s: float
    floor: int
    """So many pass at least: tests that are no longer found are missed."""


PARTS: Final = (
    Part("certain", "not live and not seeds", ("-n", "2", "--dist", "loadfile", "--timeout", "120"), 1500.0, 4500),
    Part("seeds", "seeds", ("-n", "2", "--dist", "load", "--timeout", "300"), 1200.0, 100),
    Part("live", "live", ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--timeout", "600"), 3600.0, 1700),
)
STYLE: Final = ("lint", "types", "docs")
"""Targets of make."""


@dataclass(slots=True)
class Run:
    """What is known of a run so far."""

    failures: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    tests: list[dict[str, Any]] = field(default_factory=list)

    def passed(self) -> int:
        """Tests, those among them that passed when they were tried again."""
        return len([test for test in self.tests if test["outcome"] == "passed"]) + len(self.flaky)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    run = Run()
    try:
        began_s = time.monotonic()
        for target in STYLE:
            if subprocess.run(("make", "--no-print-directory", target), cwd=ROOT, check=False).returncode:
                run.failures.append(f"make {target}")
        run.seconds["style and types"] = time.monotonic() - began_s
        for part in PARTS:
            _run_part(part, arguments, run)
    except KeyboardInterrupt:
        run.failures.append("interrupted")
    for line in _summary(run):
        print(line)
    sys.stdout.flush()
    return INTERRUPTED if "interrupted" in run.failures else bool(run.failures)


def _run_part(part: Part, arguments: Sequence[str], run: Run) -> None:
    print(f"\n--- {part.name} tests", flush=True)
    began_s = time.monotonic()
    status, tests = run_pytest((*part.arguments, "-m", f"({part.chosen}) and {ELSEWHERE}", *arguments), part.limit_s)
    run.tests += tests
    run.found += [f"FOUND {test['test']}: {test['found']}" for test in tests if test["found"]]
    failed = [test for test in tests if test["outcome"] == "failed"]
    late = [test for test in failed if test["late"]] if part.name == "live" else []
    tried_again = late if len(late) <= MOST_RETRIES else []
    if late and not tried_again:
        run.failures.append(f"{part.name}: {len(late)} tests were late, and at most {MOST_RETRIES} are tried again")
    for test in failed:
        if test not in tried_again or not _passes_alone(test["test"]):
            run.failures.append(f"FAILED {test['test']}{' ' + test['late'] if test['late'] else ''}")
        else:
            run.flaky.append(f"FLAKY {test['test']}: {test['late']}")
    run.failures += [f"FAILED {test['test']} was running at the end" for test in tests if test["outcome"] == "running"]
    if status not in (0, 1, *([NONE_CHOSEN] if arguments else [])):
        run.failures.append(f"{part.name}: pytest ended with {status}")
    elif status and not failed:
        run.failures.append(f"{part.name}: pytest ended with {status} and named no test")
    passed = sum(test["outcome"] == "passed" for test in tests)
    if passed < part.floor and not arguments:
        run.failures.append(f"{part.name}: {passed} tests passed, and {part.floor} are the least there should be")
    run.seconds[part.name] = time.monotonic() - began_s


def _passes_alone(test: str) -> bool:
    print(f"\n--- {test} was late; once more, alone", flush=True)
    status, _ = run_pytest(("--timeout", "300", test), RETRY_S)
    return status == 0


def run_pytest(arguments: Sequence[str], limit_s: float) -> tuple[int, list[dict[str, Any]]]:
    """Its exit status and what it says of each test; a run that is ended has a status of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # The tests' own folders lie in a short path, since that of a Unix socket has 107 characters at most.
        outcomes, tests = Path(folder) / "outcomes", Path(folder) / "t"
        told = ("--outcomes", str(outcomes), "--basetemp", str(tests))
        command = (sys.executable, "-m", "pytest", "-q", *told, *arguments)
        # Some machines forbid it: then every process that a test starts compiles all modules again, 3 s of CPU each.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as running:
            try:
                status = running.wait(limit_s)
            except subprocess.TimeoutExpired:
                print(f"--- not at an end after {limit_s:g} s", flush=True)
                status = _end(running) or 1
            except KeyboardInterrupt:
                _end(running)
                raise
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    told = [json.loads(line) for line in lines]
    return status, list({test["test"]: test for test in told}.values())


def _end(running: "subprocess.Popen[bytes]") -> int:
    """As Ctrl-C does, and then all that is left of its process group."""
    running.send_signal(signal.SIGINT)
    try:
        return running.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)


def _summary(run: Run) -> Iterable[str]:
    """The last lines: the verdict last, in the form that pytest ends with."""
    yield "\n--- slowest"
    for test in sorted(run.tests, key=lambda test: -test["seconds"])[:SHOWN_SLOWEST]:
        yield f"{test['seconds']:7.1f} s {test['test']}"
    yield "--- parts"
    for name, seconds in run.seconds.items():
        yield f"{seconds:7.1f} s {name}"
    yield from run.found
    yield from run.flaky
    yield from run.failures
    skipped = sum(test["outcome"] == "skipped" for test in run.tests)
    counts = {"failed": len(run.failures), "passed": run.passed(), "skipped": skipped}
    more = {"flaky": len(run.flaky), "found": len(run.found)}
    told = [f"{count} {what}" for what, count in (counts | more).items() if count]
    yield f"{', '.join(told)} in {sum(run.seconds.values()):.2f}s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
