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


@pytest.mark.parametrize("value", ["-1", "65536", "x"])
def test_a_port_is_a_port(value: str) -> None:
    @dataclass(frozen=True, slots=True)
    class Listening:
        http_port: int = 0

    @click.command()
    @settings_options(Listening)
    def command(**_: Any) -> None:
        pass

    assert CliRunner().invoke(command, ["--http-port", value]).exit_code == 2
    assert CliRunner().invoke(command, ["--http-port", "65535"]).exit_code == 0


@pytest.mark.parametrize(("option", "value"), [("--ratio", "nan"), ("--ratio", "inf"), ("--ratio", "-1")])
def test_what_measures_is_finite_and_not_negative(option: str, value: str) -> None:
    assert parse("--name", "x", option, value).exit_code == 2
    assert parse("--name", "x", "--depth", "-1").exit_code == 2
