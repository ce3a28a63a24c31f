import json
from pathlib import Path

from click.testing import CliRunner

from services.cli.compare import command as compare
from services.cli.simulate import command as simulate

SMALL = ("--trace", "synthetic", "--clip", "0:10", "--instances", "3", "--seed", "4")
POLICIES = ("lmetric", "linear:lambda=0.5")


def test_each_column_is_the_report_of_its_own_simulation(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    chosen = [word for policy in POLICIES for word in ("--policy", policy)]
    result = CliRunner().invoke(compare, [*SMALL, *chosen, "--processes", "2", "--json", str(out), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    reports = json.loads(out.read_text())["reports"]
    assert tuple(reports) == POLICIES
    for policy in POLICIES:
        alone = CliRunner().invoke(simulate, [*SMALL, "--policy", policy, "--json", "-"])
        assert json.loads(alone.stdout) == reports[policy]
    assert plot.read_bytes().startswith(b"\x89PNG")
