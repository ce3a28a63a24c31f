"""What the documentation shows exists: commands with their options, linked files, placement policies."""

import re
from pathlib import Path

import click
import msgspec
import pytest

from controlplane.policies.registry import OWN_POLICIES
from services.cli.main import penstock

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "demo").glob("*.md"), *ROOT.glob("benchmarks/*.md")]
)

_COMMAND = re.compile(r"(?:^\s*(?:\S*/)?|`|\s{2,}|PENSTOCK_\S+=\S+ )penstock (?P<words>[a-z][^`#]*)")
_OPTION = re.compile(r"^[\[(]*(?P<name>--[a-z0-9]+(?:-[a-z0-9]+)*)(?P<more>-?\.\.\.)?(?:[\s=|,.;:)\]]|$)")
_LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")


def _shown_commands(page: Path) -> list[list[str]]:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [match["words"].split() for line in text.splitlines() for match in _COMMAND.finditer(line)]


def _find(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words begin with, and the words behind it."""
    command: click.Command = penstock
    while words and isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0].rstrip(".,;:"))
        if found is None:
            break
        command, words = found, words[1:]
    return command, words


def _options(command: click.Command, rest: list[str]) -> set[str]:
    """Of the command; where a placeholder such as ROLE stands for its subcommands, of all of them."""
    names = {"--help"}
    if isinstance(command, click.Group) and rest and rest[0].isupper():
        context = click.Context(command)
        subcommands = [command.get_command(context, name) for name in command.list_commands(context)]
        return names.union(*(_options(found, []) for found in subcommands if found is not None))
    for parameter in command.params:
        names |= {*parameter.opts, *parameter.secondary_opts}
    return names


def _unknown_options(words: list[str]) -> list[str]:
    command, rest = _find(words)
    shown = [match for word in rest if (match := _OPTION.match(word))]
    known = _options(command, rest)
    return [
        match["name"]
        for match in shown
        if not (any(name.startswith(match["name"]) for name in known) if match["more"] else match["name"] in known)
    ]


def test_commands_are_found() -> None:
    shown = [words for page in PAGES for words in _shown_commands(page)]
    assert len(shown) > 100
    assert _unknown_options(["simulate", "--trace", "T", "--no-such-option"]) == ["--no-such-option"]
    assert _unknown_options(["serve", "ROLE", "--member-id", "m", "--odd"]) == ["--odd"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_shown_exist(page: Path) -> None:
    assert not {words[0] for words in _shown_commands(page) if _find(words)[0] is penstock}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_shown_have_the_options_shown(page: Path) -> None:
    wrong = {" ".join(words): unknown for words in _shown_commands(page) if (unknown := _unknown_options(words))}
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    targets = {match["target"] for match in _LINK.finditer(page.read_text(encoding="utf-8"))}
    local = {target for target in targets if "://" not in target}
    assert not {target for target in local if not (page.parent / target).exists()}


def test_paths_that_contributors_are_shown_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = {match["path"] for match in re.finditer(r"`(?P<path>[a-z_]+/[\w/.]*)`", text)}
    folders = (ROOT, ROOT / "services" / "frontend", ROOT / "engine_worker", ROOT / "controlplane")
    generated = {"generated/"}
    assert len(shown) > 40
    assert not {path for path in shown - generated if not any((folder / path).exists() for folder in folders)}


def test_the_code_of_plugins_is_that_of_the_example() -> None:
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", (ROOT / "docs" / "plugins.md").read_text("utf-8"), re.DOTALL)
    files = [path for path in (ROOT / "docs" / "examples" / "plugin").rglob("*.*") if path.suffix in (".py", ".toml")]
    code = "\n".join(path.read_text("utf-8") for path in files)
    assert len(blocks) == 3
    assert not [part for block in blocks for part in block.strip().split("\n\n\n") if part not in code]


def _policy_rows() -> dict[str, dict[str, float]]:
    """The parameters with defaults that docs/policies.md shows, by policy."""
    text = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = re.finditer(r"^\| `(?P<name>\w+)`[^|]*\|[^|]*\|(?P<parameters>[^|]*)\|", text, re.MULTILINE)
    return {
        row["name"]: {name: float(value) for name, value in re.findall(r"`(\w+)` ([\d.]+)", row["parameters"])}
        for row in rows
    }


def test_every_policy_has_a_row() -> None:
    assert _policy_rows().keys() == OWN_POLICIES.keys()


@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_a_policy_has_the_defaults_shown(policy: str) -> None:
    defaults = msgspec.to_builtins(OWN_POLICIES[policy].parameters())
    shown = _policy_rows()[policy]
    assert shown == {name: value for name, value in defaults.items() if name in shown}


def test_the_glossary_has_each_word_once_in_alphabetical_order() -> None:
    glossary = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## Glossary\n")[2]
    words = re.findall(r"^\| ([a-z][a-z ]+?) \| \S", glossary, flags=re.MULTILINE)[1:]
    assert len(words) > 20
    assert words == sorted(set(words)), "each word once, in alphabetical order"


def test_the_page_of_the_endpoint_lists_every_parameter() -> None:
    from services.frontend.requests.schema import ChatCompletionRequest, CompletionRequest

    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    table = page[page.index("| parameter |") : page.index("## Ids and traces")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([a-z_]+)`", row)]
    fields = {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert sorted(listed) == sorted(fields)
