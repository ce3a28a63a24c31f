"""Installs the example of docs/plugins.md as pip installs packages, without a network."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "plugin"
PENSTOCK = (sys.executable, "-m", "services.cli.main")


def installed_example(folder: Path) -> dict[str, str]:
    """An environment in which the example is installed, and a package that cannot be imported."""
    target, source = folder / "installed", folder / "source"
    source.mkdir()
    packages = (str(_copied(source)), str(_broken(source)))
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    subprocess.run((*pip, "--target", str(target), *packages), check=True, timeout=120)
    path = os.pathsep.join([str(ROOT), str(ROOT / "generated"), str(target), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def _copied(source: Path) -> Path:
    """A build leaves files beside what it builds."""
    copy = source / "example"
    copy.mkdir()
    for name in ("pyproject.toml", "penstock_example.py"):
        (copy / name).write_bytes((EXAMPLE / name).read_bytes())
    return copy


def _broken(source: Path) -> Path:
    broken = source / "broken"
    broken.mkdir()
    (broken / "broken_package.py").write_text("import no_such_module\n")
    (broken / "pyproject.toml").write_text(
        """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "broken-package"
version = "2.0"
[project.entry-points."penstock.policies"]
rotten = "broken_package:POLICY"
[tool.setuptools]
py-modules = ["broken_package"]
"""
    )
    return broken
