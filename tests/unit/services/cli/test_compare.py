import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.compare import command as compare
from services.cli.simulate import command as simulate

SMALL = ("--trace", "synthetic", "--clip", "0:10", "--instances", "3", "--seed", "4")
POLICIES = ("lmetric", "linear:lambda=0.5")


@pytest.mark.process
def test_each_column_is_the_report_of_its_own_simulation(tmp_path: Path) -> None:
    out, plot, page = (tmp_path / name for name in ("out.json", "out.png", "out.html"))
    chosen = [word for policy in POLICIES for word in ("--policy", policy)]
    outputs = ("--json", str(out), "--plot", str(plot), "--console", str(page))
    result = CliRunner().invoke(compare, [*SMALL, *chosen, "--processes", "2", *outputs])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    reports, loads = document["reports"], document["loads"]
    assert tuple(reports) == tuple(loads) == POLICIES
    assert 0 < document["offered_req_s"] < document["fluid_bound_req_s"]
    assert all(load["preemptions"] == 0 and load["imbalance"] > 0 for load in loads.values())
    assert all(report["throughput_req_s"] <= document["fluid_bound_req_s"] for report in reports.values())
    assert "of what any schedule could serve" in result.stderr
    assert "imbalance of load" in result.stdout
    for policy in POLICIES:
        alone = CliRunner().invoke(simulate, [*SMALL, "--policy", policy, "--json", "-"])
        assert json.loads(alone.stdout) == reports[policy]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert page.read_bytes().startswith(b"<!doctype html>")


@pytest.mark.process
def test_parameters_are_set_for_one_policy() -> None:
    command = [*SMALL, "--policy", "linear", "--policy", "lmetric", "--processes", "1", "--json", "-"]
    plain = CliRunner().invoke(compare, command)
    changed = CliRunner().invoke(compare, [*command, "--set", "linear:lambda=0"])
    assert changed.exit_code == plain.exit_code == 0, changed.output
    before, after = (json.loads(result.stdout)["reports"] for result in (plain, changed))
    assert before["linear"] != after["linear"]
    assert before["lmetric"] == after["lmetric"]


@pytest.mark.parametrize("setting", ["lambda=0.5", "dynamo:weight=1"])
def test_a_setting_for_no_policy_that_runs_is_a_usage_error(setting: str) -> None:
    result = CliRunner().invoke(compare, [*SMALL, "--policy", "linear", "--set", setting])
    assert result.exit_code == 2
    assert "POLICY:PARAMETER=VALUE" in result.output
