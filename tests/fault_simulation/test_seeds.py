"""Whole meshes under faults drawn from seeds, and the timelines that once failed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from fault_simulation.draws import draw
from fault_simulation.run import run_seed, run_timeline
from fault_simulation.shrink import shrink
from fault_simulation.timeline import read_timeline
from tests.in_time import eventually
from tests.outcomes import FOUND

TIMELINES = Path(__file__).parent / "found"
SEEDS = range(100)
"""Other meshes for each change of what the processes say to each other. `make fuzz SEEDS=...` tries thousands."""
MOST_RUNS = 30
"""To make a find small, a second or two each."""


@pytest.mark.seeds
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed(seed: int, record_property: Callable[[str, object], None]) -> None:
    """Nothing is lost, doubled, wrong or without an end. What merely lasts too long is a find, and fails no run."""
    outcome = run_seed(seed)
    unsafe = [violation for violation in outcome.violations if not violation.is_lateness]
    assert not unsafe, "\n".join((f"penstock fuzz --seed {seed}:", *map(str, unsafe)))
    if outcome.violations:
        smallest = shrink(draw(seed), lambda timeline: bool(run_timeline(timeline).kinds & outcome.kinds), MOST_RUNS)
        record_property(FOUND, f"{outcome.violations[0]}\n{msgspec.json.encode(smallest).decode()}")


@pytest.mark.seeds
@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(TIMELINES.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_stays_mended(path: Path) -> None:
    outcome = run_timeline(read_timeline(path.read_bytes()))
    assert not outcome.violations, "\n".join(map(str, outcome.violations))


@pytest.mark.process
@pytest.mark.slow
def test_no_simulation_outlives_its_command() -> None:
    command = (sys.executable, "-m", "services.cli.main", "fuzz", "--seeds", "0:1000", "--jobs", "1")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        parent = psutil.Process(running.pid)
        eventually(lambda: len(parent.children()) >= 2, 60.0, "a simulating process beside the resource tracker")
        children = parent.children()
        running.kill()
    eventually(lambda: not any(_is_running(child) for child in children), 60.0, "the children have ended")


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
