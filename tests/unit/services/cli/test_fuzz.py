"""`penstock fuzz`: where it leaves the timelines of failures."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from fault_simulation.timeline import Timeline, Topology, read_timeline
from services.cli.fuzz import EXIT_FAILED, command

UNSERVED = Timeline(1, Topology(phases=()), (), ())
"""Without a worker no new request is served."""


@pytest.mark.slow
def test_a_failure_is_saved_to_a_folder_that_is_made_for_it(tmp_path: Path) -> None:
    timeline, folder = tmp_path / "timeline.json", tmp_path / "new" / "found"
    timeline.write_text(UNSERVED.to_json())
    result = CliRunner().invoke(command, ["--timeline", str(timeline), "--no-shrink", "--save", str(folder)])
    assert result.exit_code == EXIT_FAILED, result.output
    assert read_timeline((folder / "seed_1.json").read_bytes()) == UNSERVED


def test_a_folder_that_cannot_be_made_is_said_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(command, ["--seed", "0", "--save", str(tmp_path / "file" / "found")])
    assert result.exit_code == 2
    assert "cannot make" in result.output
