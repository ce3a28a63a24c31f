"""The example of docs/plugins.md, installed as pip installs packages: listed, simulated, and conforming."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.example_plugin import EXAMPLE, PENSTOCK, ROOT, installed_example

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return installed_example(tmp_path_factory.mktemp("plugin"))


def run(environment: dict[str, str], *command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_what_packages_add_is_listed_and_what_cannot_be_used_is_said(environment: dict[str, str]) -> None:
    result = run(environment, *PENSTOCK, "plugins", "--json")
    assert result.returncode == 1, "one cannot be used"
    listed = json.loads(result.stdout)
    added = {(each["kind"], each["name"]) for each in listed["plugins"] if each["source"] == "penstock-example 1.0"}
    assert added == {("placement policy", "fewest_tokens"), ("engine", "paced"), ("judge", "length")}
    assert [(each["name"], each["source"]) for each in listed["unusable"]] == [("rotten", "broken-package 2.0")]


def test_an_installed_policy_runs_in_a_simulation(environment: dict[str, str]) -> None:
    command = ("simulate", "--trace", "synthetic", "--clip", "0:5", "--instances", "2", "--json", "-")
    report = run(environment, *PENSTOCK, *command, "--policy", "fewest_tokens:prefill_weight=1.5")
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["policy"] == "fewest_tokens:prefill_weight=1.5"
    refused = run(environment, *PENSTOCK, *command, "--policy", "fewest_tokens:prefill_weight=-1")
    assert refused.returncode == 2
    assert "prefill_weight=2" in refused.stderr, "its parameters and their defaults are named"
    broken = run(environment, *PENSTOCK, *command, "--policy", "rotten")
    assert broken.returncode == 2
    assert "'rotten' of broken-package 2.0 cannot be used: importing broken_package:POLICY raised" in broken.stderr


def test_the_example_conforms(environment: dict[str, str]) -> None:
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE))
    result = run(environment, *pytest_, str(EXAMPLE / "tests"), cwd=EXAMPLE)
    assert result.returncode == 0, result.stdout
