"""Says what failed as soon as it fails, and leaves what became of each test for `scripts/run_tests.py`.

The file of `--outcomes` holds JSON objects, written as tests begin and end: `test` (its id), `outcome` (running,
passed, failed or skipped), `seconds`, `late` (the wait that ran out, if nothing else was wrong) and `found` (what a
seed found that must be mended but fails no run). The last one of a test counts; what still runs there was running at
the end.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests.in_time import is_late

RUNNING: Final = "running"
LATE, FOUND = "late", "found"
"""Among the properties of a test's report."""

MOST_SHOWN: Final = 4000
"""Characters of what a failed test has printed or logged; the end says all of it."""
MAY_BE_MISSING: Final = re.compile(
    "|".join(
        (
            "PENSTOCK_DATA",  # published traces and measurements are not in this repository
            "NVIDIA GPU",  # tests/cuda, and a benchmark
            "make test-console",  # Chromium and what drives it have a command of their own
        )
    )
)
"""Reasons for which a test may be skipped where CI=true. A tool that is missing there for any other is a failure."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="write what became of each test to this file, as JSON lines")


class Outcomes:
    """Takes in the reports of a run; with pytest-xdist in the controller, to which all of them come."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file whose tests cannot even be found counts as a test that failed."""
        if report.failed and report.nodeid not in self._tests:  # each process of pytest-xdist looks for all tests
            self._test(report.nodeid)["outcome"] = "failed"
            self._write(report.nodeid)
            self._print(f"\nFAILED NOW {report.nodeid} (collection)\n{report.longreprtext}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A run that is ended in the midst says by this what it was at."""
        self._write(nodeid, RUNNING)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up a test's set-up, call and teardown; print a failure at once."""
        said = dict(report.user_properties)
        test = self._test(report.nodeid)
        test["seconds"] += report.duration
        test[LATE], test[FOUND] = said.get(LATE, test[LATE]), said.get(FOUND, test[FOUND])
        if report.failed or (report.skipped and test["outcome"] != "failed"):
            test["outcome"] = report.outcome
        if report.failed or report.when == "teardown":
            self._write(report.nodeid)
        if report.failed:
            self._print(f"\nFAILED NOW {report.nodeid} ({report.when})\n{report.longreprtext}")
            for title, text in report.sections:
                self._print(f"--- {title}\n{text[-MOST_SHOWN:]}")

    def _test(self, node_id: str) -> dict[str, Any]:
        new = {"test": node_id, "outcome": "passed", "seconds": 0.0, LATE: "", FOUND: ""}
        return self._tests.setdefault(node_id, new)

    def _write(self, node_id: str, outcome: str = "") -> None:
        if (path := self._config.getoption("--outcomes")) is not None:
            test = self._test(node_id)
            with path.open("a") as lines:
                lines.write(json.dumps({**test, "outcome": outcome or test["outcome"]}) + "\n")

    def _print(self, text: str) -> None:
        if terminal := self._config.pluginmanager.get_plugin("terminalreporter"):
            terminal.write_line(text, red=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not one of pytest-xdist's workers
        config.pluginmanager.register(Outcomes(config), "outcomes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note whether a failure is mere lateness, and let nothing be skipped in silence where CI=true."""
    error = call.excinfo.value if call.excinfo is not None else None
    if error is not None and not isinstance(error, pytest.skip.Exception):
        # A second failure, of the teardown, that is no lateness leaves none.
        so_far = dict(item.user_properties).get(LATE)
        late = is_late(error) and so_far != ""
        item.user_properties.append((LATE, f"{type(error).__name__}: {error}"[:500] if late else ""))
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true":
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not MAY_BE_MISSING.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}\nWhere CI=true nothing is missing that is not named in tests/outcomes.py."
    return report
