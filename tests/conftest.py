"""Hypothesis profiles, and a word on what a run leaves out."""

import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.certain import CertainGuard
from tests.examples import QUICK_EXAMPLES

pytest_plugins = ["tests.outcomes"]

# A busy machine is no failure: neither a slow example nor slow drawing of examples.
BUSY: Final[dict[str, Any]] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples on every machine: what fails in CI fails here. `make quick` draws new ones each time.
settings.register_profile("whole", derandomize=True, database=None, **BUSY)
settings.load_profile("whole")  # unless the command line names another one
settings.register_profile("thorough", **BUSY)
settings.register_profile("quick", max_examples=QUICK_EXAMPLES, **BUSY)
settings.register_profile(  # the same examples for every mutant; that one fails is enough, which is the simplest is not
    "mutants", max_examples=15, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("process", "slow", "vllm", "etcd", "docker", "ray", "kubernetes", "data")
"""Markers by which runs leave tests out; the first that a test has tells its kind."""

PROCESSES = ("tests/mesh/", "tests/console/", "tests/kv/", "tests/vllm/", "tests/benchmarks/test_benchmarks_run")
"""Where every test starts processes, `IN_PROCESS` left out."""
IN_PROCESS = "tests/mesh/store/"

NEEDS_TORCH = (
    "tests/unit/demo/test_checkpoints.py",
    "tests/unit/demo/test_train.py",
    "tests/unit/services/predictor/test_training.py",
)
"""Importing it takes two seconds of CPU, before any test is chosen."""

MAX_CPU_S = 1.0
"""Of a test that is not marked as one of `KINDS`, under the quick profile; more is said at the end of the run. Well
above what `slow` begins with (see pyproject.toml): a busy machine takes more CPU for the same."""
CPU_S = "cpu_s"
"""Of a test's call, among its report's properties."""

SHARE_ENGINES: Final = frozenset(
    f"tests/vllm/test_{name}.py"
    for name in ("migration", "moved_sampling", "parameters", "prefix_pull", "structured_outputs")
)
"""Files whose tests take `sides` of tests/vllm/conftest.py: one process runs them all, or each process starts both
engines."""

LONGEST: Final = "tests/vllm/"
"""Few tests of minutes each. They come first: by xdist's own order, that of the number of tests in a file, one process
would be at the last of them long after the other one is through."""

GUARD: Final = CertainGuard()

_left_out = pytest.StashKey[Counter[str]]()
_left_out_files = pytest.StashKey[list[str]]()


def is_of_this_test(record: logging.LogRecord) -> bool:
    """Not what gRPC's poller, which all loops of a process share, still has for the loop of a test that is over."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed")


logging.getLogger("asyncio").addFilter(is_of_this_test)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_left_out] = Counter()
    config.stash[_left_out_files] = []


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Look for no garbage among modules: that takes two fifths of the CPU that importing them takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Let no fixture of a certain test do what the test must not, and no test be the operator of another one's mesh."""
    if connection := sys.modules.get("services.cli.connection"):
        connection.AS_OPERATOR.use("")
    with _promise_of(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note what it takes of the CPU, and hold a certain test to what makes it certain."""
    began_s = time.process_time()
    try:
        with _promise_of(item):
            return (yield)
    finally:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            item.user_properties.append((CPU_S, time.process_time() - began_s))


def _promise_of(item: pytest.Item) -> AbstractContextManager[None]:
    return nullcontext() if item.get_closest_marker("live") else GUARD.watching(item.name)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The quick profile does not even import what it would leave out, unless it is named on the command line."""
    is_quick = settings.get_current_profile_name() == "quick" and config.args_source is not config.ArgsSource.ARGS
    if not is_quick or not collection_path.is_file():
        return None
    place = collection_path.relative_to(ROOT).as_posix()
    if not place.startswith(NEEDS_TORCH) and not _starts_processes(place):
        return None
    if collection_path.name.startswith("test_"):
        config.stash[_left_out_files].append(place)
    return True


def _starts_processes(place: str) -> bool:
    return place.startswith(PROCESSES) and not place.startswith(IN_PROCESS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _starts_processes(item.path.relative_to(ROOT).as_posix()):
            item.add_marker(pytest.mark.process)
        if item.get_closest_marker("process"):
            item.add_marker(pytest.mark.live)
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        kind = next((kind for kind in KINDS if item.get_closest_marker(kind)), "other")
        item.config.stash[_left_out][kind] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file goes to one process of pytest-xdist, and so do all of `SHARE_ENGINES`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByEngines(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "sides" if file in SHARE_ENGINES else file

    return ByEngines(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist: every worker collects, its controller nothing
        session.config.workeroutput["left_out"] = dict(session.config.stash[_left_out])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    left_out = getattr(node, "workeroutput", {}).get("left_out", {})
    node.config.stash[_left_out] = Counter(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if settings.get_current_profile_name() == "quick":
        for cpu_s, name in _too_slow(terminalreporter):
            terminalreporter.write_line(
                f"took {cpu_s:.1f} s of CPU: {name}; mark it slow, or make it quick", yellow=True
            )
    left_out = config.stash[_left_out]
    if left_out:
        kinds = ", ".join(f"{count} {kind}" for kind, count in left_out.most_common())
        if files := config.stash[_left_out_files]:
            kinds += f", and {len(files)} files that start processes or need torch"
        terminalreporter.write_line(
            f"left out: {kinds} (`make test` runs most; CONTRIBUTING.md says what runs the others)"
        )


def _too_slow(terminalreporter: pytest.TerminalReporter) -> list[tuple[float, str]]:
    """Tests for which `make quick` is no longer quick, the slowest first."""
    reports = (report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, ()))
    took = [(cpu_s, report.nodeid) for report in reports for name, cpu_s in report.user_properties if name == CPU_S]
    return sorted((each for each in took if each[0] > MAX_CPU_S), reverse=True)
