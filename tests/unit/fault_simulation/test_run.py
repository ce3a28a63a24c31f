"""One simulation from its seed, and the timeline that it comes from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fault_simulation.run import run_seed
from fault_simulation.timeline import draw, read_timeline

ROOT = Path(__file__).resolve().parents[3]
SEED = 6


def test_a_timeline_survives_being_written_down() -> None:
    for seed in range(50):
        timeline = draw(seed)
        assert read_timeline(timeline.to_json()) == timeline


@pytest.mark.process
def test_the_same_seed_does_the_same_in_any_process() -> None:
    first = run_seed(SEED)
    assert run_seed(SEED).digest == first.digest
    assert run_seed(SEED + 1).digest != first.digest
    code = f"from fault_simulation.run import run_seed; print(run_seed({SEED}).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": f"{ROOT}:{ROOT / 'generated'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == first.digest
