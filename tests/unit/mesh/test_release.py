"""What says which release this is."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from mesh.release import COMMIT_FILE, commit, commit_of_checkout, version

ROOT = Path(__file__).resolve().parents[3]


def test_the_version_stands_in_one_place_and_the_chart_agrees() -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "penstock" / "Chart.yaml").read_text("utf-8"))
    assert (chart["version"], chart["appVersion"]) == (written, written)
    assert version() == written


def test_a_wheel_says_the_commit_that_it_was_built_from(tmp_path: Path) -> None:
    (tmp_path / COMMIT_FILE).write_text("0123456789ab\n")
    assert commit(tmp_path) == "0123456789ab"


@pytest.mark.live
def test_git_tells_the_commit_of_a_checkout_and_that_it_was_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@e")
        done = subprocess.run(
            ["git", *who, "-C", str(tmp_path), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "a")
    head = git("rev-parse", "HEAD")[:12]
    assert commit_of_checkout(tmp_path) == head
    (tmp_path / "file").write_text("b")
    assert commit_of_checkout(tmp_path) == f"{head}-dirty"


def test_outside_of_a_checkout_nobody_knows(tmp_path: Path) -> None:
    assert commit_of_checkout(tmp_path) == ""
    assert commit(tmp_path / "mesh") == ""
