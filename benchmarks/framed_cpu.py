"""CPU of a whole mesh per request and per streamed chunk, by what carries its streams.

    python -m benchmarks.framed_cpu [--carrier grpc --carrier tcp ...] [--rounds 5] [--requests 100] [--json OUT]

Meshes of simulated engines with identities run beside each other and take turns: streams over gRPC with mutual TLS, in
frames over TCP with mutual TLS, as between hosts, and in frames on unix sockets. Chats in English of 1,000 characters,
eight under way at any moment, are answered with 1 token and with 16, streamed. The CPU is that of the processes of a
role, user and system, less what they use when idle. A chunk is a fifteenth of what the 15 tokens more cost.
"""

import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from benchmarks import english
from benchmarks.identity_cpu import CARRIERS, CHARACTERS, a_mesh, a_round, roles_of

TOKENS = (1, 16)
ROLES = ("frontend", "scheduler", "worker", "monitor", "all")


@click.command()
@click.option(
    "--carrier",
    "carriers",
    type=click.Choice(list(CARRIERS)),
    multiple=True,
    default=tuple(CARRIERS),
    help="A mesh whose streams go so, beside the one of gRPC; default: each.",
)
@click.option("--rounds", default=5, show_default=True, help="Of each mesh, one more before them to warm up.")
@click.option("--requests", default=100, show_default=True, help="In a round.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(carriers: tuple[str, ...], rounds: int, requests: int, json_path: Path | None) -> None:
    """Measure a mesh's CPU per request by what carries its streams."""
    prompts = english.prompts(CHARACTERS, 0, seed=1)
    measured: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        meshes = {
            name: stack.enter_context(
                a_mesh(Path(folder) / name, asks_who=True, environment={"PENSTOCK_FRAMED_STREAMS": switch})
            )
            for name, switch in CARRIERS.items()
            if name in ("grpc", *carriers)
        }
        for name, mesh in meshes.items():
            frontend = mesh.status()["frontends"][0]
            carried = {each["transport"] for each in (*frontend["workers"], *frontend["schedulers"])}
            assert carried == {name}, f"streams that were to go by {name} go by {carried}"
        processes = {name: roles_of(mesh) for name, mesh in meshes.items()}
        for _ in range(rounds + 1):
            for tokens in TOKENS:
                texts = [next(prompts) for _ in range(requests)]
                for name, mesh in meshes.items():
                    spent = a_round(mesh, processes[name], texts, tokens)
                    measured.setdefault((name, tokens), []).append(spent)
    figures = {
        f"{role}, {tokens} tokens": {
            name: statistics.median(each[role] for each in measured[name, tokens][1:]) for name in meshes
        }
        for tokens in TOKENS
        for role in ROLES
    }
    few, many = TOKENS
    for role in ROLES:
        less, more = (figures[f"{role}, {tokens} tokens"] for tokens in TOKENS)
        figures[f"{role}, chunk"] = {name: (more[name] - less[name]) / (many - few) for name in meshes}
    click.echo(f"CPU us per request of {CHARACTERS} characters, and per chunk; median of {rounds} rounds of {requests}")
    for what, each in figures.items():
        click.echo(f"{what:22} " + "  ".join(_shown(name, each) for name in each))
    if json_path:
        json_path.write_text(json.dumps({"rounds": rounds, "requests": requests, "figures": figures}, indent=2))


def _shown(name: str, each: dict[str, float]) -> str:
    """With its share of what gRPC costs."""
    share = "" if name == "grpc" else f" ({each[name] / each['grpc']:.2f})"
    return f"{name} {each[name]:7.0f}{share}"


if __name__ == "__main__":
    main()
