from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from services.cli.settings_options import settings_from, settings_options


@dataclass(frozen=True, slots=True)
class Inner:
    depth: int = 3
    """How deep."""


@dataclass(frozen=True, slots=True)
class Outer:
    name: str
    """What it is called."""
    verbose: bool = False
    ratio: float | None = None
    mode: Literal["fast", "slow"] = "fast"
    paths: tuple[Path, ...] = ()
    inner: Inner = field(default_factory=Inner)


def parse(*arguments: str) -> Any:
    seen: list[Outer] = []

    @click.command()
    @settings_options(Outer)
    def command(**options: Any) -> None:
        seen.append(settings_from(Outer, options))

    result = CliRunner().invoke(command, arguments)
    return seen[0] if seen else result


def test_defaults() -> None:
    assert parse("--name", "x") == Outer("x")


def test_every_kind_of_field() -> None:
    arguments = "--name x --verbose --ratio 0.5 --mode slow --paths a --paths b --depth 9".split()
    expected = Outer("x", True, 0.5, "slow", (Path("a"), Path("b")), Inner(9))
    assert parse(*arguments) == expected


@pytest.mark.parametrize("arguments", [(), ("--name", "x", "--mode", "odd"), ("--name", "x", "--depth", "deep")])
def test_wrong_use_is_refused(arguments: tuple[str, ...]) -> None:
    assert parse(*arguments).exit_code == 2


def test_help_comes_from_the_field() -> None:
    text = parse("--help").output
    assert "What it is called." in text
    assert "How deep." in text
