"""`penstock simulate --rescheduler`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mesh.errors import ConfigurationError
from services.cli.simulate import command
from services.cli.simulation.rescheduling import ReschedulerChoice


def test_modes_and_parameters() -> None:
    assert ReschedulerChoice.parse("off").controllers(0) == ()
    for mode in ("current", "predicted", "trajectories", "oracle"):
        (controller,) = ReschedulerChoice.parse(f"{mode}:interval_s=0.5,theta=0.2").controllers(0)
        assert controller.interval_ms == 500
    for text, why in (
        ("best", "off, current, predicted, trajectories, oracle"),
        ("current:tetha=1", "theta=0.1"),
        ("current:x", "x"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            ReschedulerChoice.parse(text)


def test_a_simulation_with_a_rescheduler_serves_every_request(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "out.json"
    lines = [f"2023-11-16 18:00:{second:02}.0,64,{400 if second % 2 else 20}" for second in range(20)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    arguments = ["--trace", str(trace), "--instances", "2", "--policy", "round_robin", "--json", str(out)]
    for mode in ("off", "oracle"):
        result = CliRunner().invoke(command, [*arguments, "--rescheduler", mode])
        assert result.exit_code == 0, result.output
        report = json.loads(out.read_text())
        assert (report["requests"], report["errors"]) == (20, 0)
