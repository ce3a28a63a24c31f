"""What installed packages add: found by their metadata, imported when asked for, and never at the cost of others."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, DistributionFinder, EntryPoint, MetadataPathFinder
from itertools import count
from pathlib import Path

import pytest

from mesh.errors import ConfigurationError
from mesh.plugins import PluginFailure, PluginRegistry

_modules = count()


@dataclass(frozen=True)
class Thing:
    word: str


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lays a package down as an installer does: a module on the path, and its metadata beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def lay_down(package: str, code: str, *entries: str) -> None:
        module = f"{package.replace('-', '_')}_{next(_modules)}"  # Python imports a name once
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{package.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = "".join(f"{entry} = {module}:THING\n" for entry in entries)
        (info / "entry_points.txt").write_text(f"[penstock.things]\n{lines}")

    return lay_down


@pytest.fixture
def things(tmp_path: Path) -> PluginRegistry[Thing]:
    def find(group: str) -> Iterable[EntryPoint]:
        found: Iterable[Distribution] = MetadataPathFinder.find_distributions(
            DistributionFinder.Context(path=[str(tmp_path)])
        )
        return [entry for each in found for entry in each.entry_points if entry.group == group]

    return PluginRegistry("penstock.things", "thing", Thing, {"ours": Thing("ours"), "alike": Thing("alike")}, find)


GOOD = "from tests.unit.mesh.test_plugins import Thing\nTHING = Thing('theirs')\n"


def test_what_packages_add_stands_beside_our_own(install: Callable[..., None], things: PluginRegistry[Thing]) -> None:
    install("their-package", GOOD, "theirs", "also_theirs")
    assert things.names == ("ours", "alike", "also_theirs", "theirs")
    assert things.usable() == things.names
    assert (things.get("ours").word, things.get("theirs").word) == ("ours", "theirs")
    assert (things.source("ours"), things.source("theirs")) == ("penstock", "their-package 1.2")
    assert things.failures() == ()


def test_an_unknown_name_is_refused_with_those_that_there_are(
    install: Callable[..., None], things: PluginRegistry[Thing]
) -> None:
    install("their-package", GOOD, "theirs")
    with pytest.raises(ConfigurationError, match=r"no thing 'x'; choose one of: ours, alike, theirs"):
        things.get("x")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module", "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('not here')", "raised SystemExit: not here"),
        ("OTHER = 1", "raised AttributeError"),
        ("THING = 'a word'", "is of type str, not Thing; see docs/plugins.md"),
    ],
)
def test_a_broken_package_is_told_of_and_costs_nobody_else(
    install: Callable[..., None],
    things: PluginRegistry[Thing],
    caplog: pytest.LogCaptureFixture,
    code: str,
    reason: str,
) -> None:
    install("broken", code, "rotten")
    install("their-package", GOOD, "theirs")
    assert things.names == ("ours", "alike", "rotten", "theirs"), "nothing is imported for the names"
    assert things.usable() == ("ours", "alike", "theirs")
    (failure,) = things.failures()
    assert (failure.name, failure.source) == ("rotten", "broken 1.2")
    assert reason in failure.reason
    with pytest.raises(ConfigurationError, match=r"the thing 'rotten' of broken 1\.2 cannot be used") as refused:
        things.get("rotten")
    assert reason in str(refused.value)
    with caplog.at_level(logging.ERROR):
        things.report_failures()
    assert [record.__dict__["plugin"] for record in caplog.records if record.levelno == logging.ERROR] == ["rotten"]


def test_a_name_of_ours_stays_ours(install: Callable[..., None], things: PluginRegistry[Thing]) -> None:
    install("their-package", GOOD, "alike")
    assert things.get("alike").word == "alike"
    assert things.names == ("ours", "alike")
    reason = "Penstock has a thing of that name; the package must rename it"
    assert things.failures() == (PluginFailure("alike", "their-package 1.2", reason),)


def test_of_two_packages_with_one_name_neither_is_used(
    install: Callable[..., None], things: PluginRegistry[Thing]
) -> None:
    install("first", GOOD, "theirs")
    install("second", GOOD, "theirs")
    with pytest.raises(ConfigurationError, match=r"first 1\.2 and second 1\.2 cannot be used: several packages"):
        things.get("theirs")
    assert things.usable() == ("ours", "alike")
