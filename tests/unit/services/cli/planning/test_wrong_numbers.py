"""A plan is not searched for with a target that is no number."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.planning.command import command


@pytest.mark.parametrize("option", ["--quality", "--latency-s", "--rate", "--judge-s"])
def test_nan_is_refused(tmp_path: Path, option: str) -> None:
    workload = tmp_path / "workload.jsonl"
    workload.touch()
    tier = ("--tier", "a=Qwen3-32B@H100")
    result = CliRunner().invoke(command, ["cascade", "--workload", str(workload), "--gpus", "8", *tier, option, "nan"])
    assert result.exit_code == 2
    assert "not a finite number" in result.output
