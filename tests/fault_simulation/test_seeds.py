"""Whole meshes under faults drawn from seeds, and the timelines that once failed."""

from pathlib import Path

import pytest

from fault_simulation.run import run_seeds, run_timeline
from fault_simulation.timeline import read_timeline

FOUND = Path(__file__).parent / "found"
SEEDS = range(300)
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
