"""Options that mean the same are called the same, whichever command has them."""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mesh.errors import ConfigurationError
from mesh.run_file import RunFile, write_run_file
from services.cli.bench import DEFAULT_URL, _endpoint
from services.cli.connection import DEFAULT_MESH, same_mesh
from services.cli.drain import left_line
from services.cli.main import penstock
from services.cli.supervisor.readiness import start_line

LIVING_PID = 1
WITHOUT_JSON = ("up", "serve", "predictor serve", "ca grpcurl")
"""They print what they do until they are ended, or words for another command."""


def _commands(group: click.Command = penstock, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(group, click.Group):
        yield " ".join(path), group
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield from _commands(found, (*path, name))


COMMANDS = dict(_commands())


def _options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("name", COMMANDS)
def test_who_asks_a_mesh_can_be_told_which_in_both_ways(name: str) -> None:
    options = _options(COMMANDS[name])
    assert "--store" not in options or "--mesh" in options
    if "--store" in options and not name.startswith(WITHOUT_JSON):
        assert "--json" in options


@pytest.mark.parametrize("name", COMMANDS)
def test_times_are_named_with_their_unit(name: str) -> None:
    assert not _options(COMMANDS[name]) & {"--timeout", "--deadline", "--delay", "--latency"}


def _parsed(*words: str) -> click.Context:
    """The context of the innermost command."""
    context: click.Context = click.Context(penstock, info_name="penstock")
    command: click.Command = penstock
    while isinstance(command, click.Group):
        names = command.list_commands(context)
        at = next(number for number, word in enumerate(words) if word in names)
        found = command.get_command(context, words[at])
        assert found is not None
        words = words[at + 1 :]
        context, command = found.make_context(str(found.name), list(words), parent=context), found
    return context


@pytest.mark.parametrize(
    ("words", "mesh", "store"),
    [
        ("cascade remove c", DEFAULT_MESH, None),
        ("cascade --mesh one remove c", "one", None),
        ("cascade remove c --mesh two", "two", None),
        ("cascade --mesh one --store penstock://h:1 remove c --mesh two", "two", "penstock://h:1"),
        ("profile --mesh one show", "one", None),
        ("lora list --mesh one", "one", None),
    ],
)
def test_a_mesh_named_before_a_subcommand_holds_for_it(words: str, mesh: str, store: str | None) -> None:
    context = _parsed(*words.split())
    assert (context.params["mesh"], context.params["store"]) == (mesh, store)


def test_hints_name_the_mesh_that_was_asked() -> None:
    assert same_mesh(None, DEFAULT_MESH) == ""
    assert same_mesh(None, "second") == " --mesh second"
    assert same_mesh("etcd://h:2379", "second") == " --store etcd://h:2379"


def test_bench_finds_the_endpoint_of_a_mesh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert _endpoint(DEFAULT_MESH) == DEFAULT_URL
    with pytest.raises(ConfigurationError, match="no mesh called 'second'"):
        _endpoint("second")
    write_run_file("second", RunFile(LIVING_PID, "penstock://127.0.0.1:1", "http://127.0.0.1:8123", "logs"))
    assert _endpoint("second") == "http://127.0.0.1:8123"


def test_a_drain_tells_what_is_left_and_for_how_long() -> None:
    assert left_line(8, 2, 6.0) == "2 of 8 requests are left after 6 s; about 2 s to go"
    assert left_line(8, 8, 4.0) == "8 of 8 requests are left after 4 s"
    assert left_line(8, 0, 4.0) == "0 of 8 requests are left after 4 s"


def test_a_start_tells_who_has_joined_and_when_it_is_given_up() -> None:
    assert start_line(1, 3, 5.2, 300.0) == (
        "1 of 3 instances have joined after 5 s; given up after 300 s (--ready-timeout-s)"
    )
    assert start_line(3, 3, 10.0, 300.0).startswith("all instances have joined after 10 s")
