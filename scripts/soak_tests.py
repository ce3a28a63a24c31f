"""Repeats the live tests, beside processes that take all the CPU they get, and says how often each test failed.

    python scripts/soak_tests.py [--runs 10] [--busy 2] [--json FILE] [PYTEST ARGUMENT ...]

No test is tried again here: what `make test` would call FLAKY is a failure by lateness alone, and counted as such.
Arguments narrow the tests, as they do for pytest.

Exit status: 0 no test failed in any run, 1 some did, 130 interrupted.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.run_tests import ELSEWHERE, INTERRUPTED, NONE_CHOSEN, PARTS, run_pytest

LIVE: Final = next(part for part in PARTS if part.name == "live")
SPIN: Final = "while True: pass"


@dataclass(slots=True)
class Soak:
    """What the runs have shown so far."""

    runs: int = 0
    tests: int = 0
    """In the last run."""
    wrong: Counter[str] = field(default_factory=Counter)
    """By test: runs in which it failed by more than lateness."""
    late: Counter[str] = field(default_factory=Counter)
    """By test: runs in which it failed by lateness alone."""
    broken: list[str] = field(default_factory=list)
    """Runs that pytest did not bring to an end."""

    def add(self, status: int, tests: Sequence[Mapping[str, Any]], *, is_narrowed: bool) -> None:
        """Take in a run: pytest's exit status and what it said of each test."""
        self.runs += 1
        self.tests = len(tests)
        for test in tests:
            if test["outcome"] in ("failed", "running"):
                (self.late if test["late"] else self.wrong)[test["test"]] += 1
        if status not in (0, 1) and not (status == NONE_CHOSEN and is_narrowed):
            self.broken.append(f"run {self.runs}: pytest ended with {status}")

    @property
    def has_failed(self) -> bool:
        return bool(self.wrong or self.late or self.broken)

    def counts(self) -> dict[str, Any]:
        """What `--json` writes: by test, the runs in which it failed."""
        return {
            "runs": self.runs,
            "tests": self.tests,
            "wrong": dict(self.wrong),
            "late": dict(self.late),
            "broken": self.broken,
        }

    def lines(self) -> Iterable[str]:
        """The tests that failed, the most frequent first, and a verdict."""
        yield from self.broken
        for test, count in (self.wrong + self.late).most_common():
            late = f", {self.late[test]} of them by lateness alone" if self.late[test] else ""
            yield f"{count} of {self.runs} failed{late}: {test}"
        failures = self.wrong.total() + self.late.total()
        yield f"{self.runs} runs of {self.tests} live tests: {failures} failed ({self.late.total()} by lateness alone)"


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes take all the CPU they get, until the end of the block."""
    with ExitStack() as running:
        for _ in range(count):
            process = running.enter_context(subprocess.Popen((sys.executable, "-c", SPIN)))
            running.callback(process.kill)
        yield


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=2, help="processes that take all the CPU they get")
    parser.add_argument("--json", type=Path, help="write the counts to this file as well")
    options, narrowing = parser.parse_known_args(words)
    soak = Soak()
    try:
        with busy_processes(options.busy):
            for _ in range(options.runs):
                began_s = time.monotonic()
                chosen = ("-m", f"({LIVE.chosen}) and {ELSEWHERE}", *narrowing)
                # Beside busy processes the tests get their share of the machine only.
                limit_s = LIVE.limit_s * (1 + options.busy)
                soak.add(*run_pytest((*LIVE.arguments, *chosen), limit_s), is_narrowed=bool(narrowing))
                print(f"--- run {soak.runs} of {options.runs}: {time.monotonic() - began_s:.0f} s", flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        for line in soak.lines():
            print(line)
        if options.json is not None:
            options.json.write_text(json.dumps(soak.counts(), indent=2) + "\n")
    return int(soak.has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
