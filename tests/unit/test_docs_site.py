"""The documentation site has every page once, its commands are ones that the real command line takes, and it builds."""

import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from services.cli.main import penstock
from tests.shown_commands import COMMAND_LINES, PAGES, ROOT

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
README_LINES = 80
"""Two screens. What does not fit belongs onto a page of docs/."""


def _pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for _, target in entry.items():
            if isinstance(target, str):
                yield target
            else:
                yield from _pages_of(target)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = list(_pages_of(SITE["nav"]))
    docs = ROOT / "docs"
    here = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert len(pages) == len(set(pages))
    assert not here - set(pages), "put each new page of docs/ into `nav` of mkdocs.yml, beside what it belongs to"
    elsewhere = {page for page in pages if page not in here and not page.startswith("reference/")}
    assert elsewhere == {"index.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "demo/README.md"}


def test_the_readme_fits_two_screens() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= README_LINES, "move what is not for a newcomer into docs/"
    assert any(line.startswith("![") and "docs/images/console" in line for line in lines)
    assert "    make up" in "\n".join(lines)
    assert "    make test" in "\n".join(lines)


def _parse(words: list[str]) -> None:
    """As `penstock` parses them; files that are not there are none of its business."""
    context = click.Context(penstock, info_name="penstock")
    command: click.Command = penstock
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, words[0]
        command, words = found, words[1:]
        if isinstance(command, click.Group):
            taken = next((at for at, word in enumerate(words) if word in command.list_commands(context)), None)
            if taken is not None:
                words = words[taken:]
    try:
        command.make_context(str(command.name), words)
    except click.exceptions.Exit:
        return  # --help
    except click.UsageError as error:
        if "does not exist" not in str(error):
            raise AssertionError(f"{command.name}: {error.format_message()}") from error


def test_command_lines_are_found_and_wrong_ones_are_told() -> None:
    assert len(COMMAND_LINES) > 120
    for wrong in ("up --prefill", "up --engine simulated --workers many", "migrate R", "policy round_robin --to x"):
        with pytest.raises(AssertionError):
            _parse(wrong.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_are_taken_by_the_command(page: Path) -> None:
    for line in [line for at, line in COMMAND_LINES if at == page]:
        _parse(shlex.split(line))


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs is not installed (make docs)")
def test_the_site_builds_without_a_dead_link(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
