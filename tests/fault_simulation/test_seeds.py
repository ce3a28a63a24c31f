"""Whole meshes under faults drawn from seeds, and the timelines that once failed."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fault_simulation.run import run_seeds, run_timeline
from fault_simulation.timeline import read_timeline
from tests.mesh.running_mesh import eventually

FOUND = Path(__file__).parent / "found"
SEEDS = range(80)
JOBS = 2


@pytest.mark.process
def test_seeds() -> None:
    failed = [outcome for outcome in run_seeds(SEEDS, JOBS) if outcome.violations]
    assert not failed, "\n".join(
        f"seed {outcome.seed} (penstock fuzz --seed {outcome.seed}): {violation}"
        for outcome in failed
        for violation in outcome.violations
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOUND.glob("*.json")), ids=lambda path: path.stem)
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
