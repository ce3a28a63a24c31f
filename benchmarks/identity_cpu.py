"""CPU of a whole mesh per request, with mutual TLS between its processes and without.

    python -m benchmarks.identity_cpu [--streams unix] [--rounds 5] [--requests 200] [--json OUT]

Two meshes of simulated engines run side by side, one of them `--insecure`, and take turns. Their streams go as on one
host (`unix`: no TLS on those), as between hosts (`tcp`), or over gRPC. The CPU is that of all their
processes but the client, user and system, less what they use when idle. Requests are chats in English whose answers are
streamed, eight under way at any moment.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks import english
from benchmarks.process_cpu import process_cpu_s
from tests.mesh.running_mesh import RunningMesh

AT_ONCE = 8
CHARACTERS = 1_000
ANSWER_TOKENS = 16
IDLE_S = 2.0
CARRIERS = {"grpc": "0", "tcp": "tcp", "unix": "1"}
"""By name: PENSTOCK_FRAMED_STREAMS of a mesh."""
LIMIT = 1.1
"""At most so many times the CPU of a mesh without identities."""
MODEL = "demo-large"


@dataclass(frozen=True, slots=True)
class Figure:
    """CPU microseconds per request of one mesh's processes of a role, the median of the rounds."""

    role: str
    insecure_us: float
    mutual_tls_us: float

    @property
    def ratio(self) -> float:
        """Of the two."""
        return self.mutual_tls_us / self.insecure_us


@contextmanager
def a_mesh(folder: Path, *, asks_who: bool, environment: dict[str, str] | None = None) -> Iterator[RunningMesh]:
    folder.mkdir()
    simulated = ("--engine", "simulated", "--workers", "2")
    mesh = RunningMesh(folder, *simulated, environment=environment, asks_who=asks_who)
    try:
        mesh.wait_until_serving(120)
        yield mesh
    finally:
        mesh.stop()


def roles_of(mesh: RunningMesh) -> dict[str, list[int]]:
    """The process ids of each role."""
    pids: dict[str, list[int]] = {}
    for each in mesh.status()["roles"]:
        pids.setdefault(each["role"], []).append(int(each["attributes"]["pid"]))
    return pids


def cpu_s(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Of each role so far."""
    return {role: sum(map(process_cpu_s, members)) for role, members in pids.items()}


async def ask(url: str, texts: list[str], tokens: int) -> None:
    """All requests, a new one whenever another is answered."""
    left = iter(texts)

    async def one_after_another(client: httpx.AsyncClient) -> None:
        for text in left:
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}
            answer = await client.post("/v1/chat/completions", json={**body, "stream": True, "ignore_eos": True})
            answer.raise_for_status()

    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(AT_ONCE)))


def a_round(
    mesh: RunningMesh, pids: Mapping[str, list[int]], texts: list[str], tokens: int = ANSWER_TOKENS
) -> dict[str, float]:
    """CPU microseconds per request of each role, and of all of them."""
    before, began_s = cpu_s(pids), time.monotonic()
    time.sleep(IDLE_S)
    idle, idle_s = cpu_s(pids), time.monotonic() - began_s
    began_s = time.monotonic()
    asyncio.run(ask(mesh.url, texts, tokens))
    took_s, after = time.monotonic() - began_s, cpu_s(pids)
    spent = {
        role: (after[role] - idle[role] - (idle[role] - before[role]) * took_s / idle_s) * 1e6 / len(texts)
        for role in pids
    }
    return spent | {"all": sum(spent.values())}


@click.command()
@click.option(
    "--streams", type=click.Choice(list(CARRIERS)), default="unix", show_default=True, help="What carries them."
)
@click.option("--rounds", default=5, show_default=True, help="Of each mesh, one more before them to warm up.")
@click.option("--requests", default=200, show_default=True, help="In a round.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(streams: str, rounds: int, requests: int, json_path: Path | None) -> None:
    """Measure a mesh's CPU per request with and without identities."""
    environment = {"PENSTOCK_FRAMED_STREAMS": CARRIERS[streams]}
    prompts = english.prompts(CHARACTERS, 0, seed=1)
    measured: list[list[dict[str, float]]] = [[], []]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        meshes = [
            stack.enter_context(a_mesh(Path(folder) / str(asks), asks_who=asks, environment=environment))
            for asks in (False, True)
        ]
        processes = [roles_of(mesh) for mesh in meshes]
        for _ in range(rounds + 1):
            texts = [next(prompts) for _ in range(requests)]
            for mesh, pids, spent in zip(meshes, processes, measured, strict=True):
                spent.append(a_round(mesh, pids, texts))
    medians = [{role: statistics.median(each[role] for each in spent[1:]) for role in spent[0]} for spent in measured]
    figures = [Figure(role, medians[0][role], medians[1][role]) for role in ("frontend", "scheduler", "worker", "all")]
    click.echo(
        f"CPU us per request of {CHARACTERS} characters, {ANSWER_TOKENS} tokens, streams by {streams}, "
        f"median of {rounds} rounds"
    )
    for figure in figures:
        click.echo(
            f"{figure.role:10} insecure {figure.insecure_us:7.0f}  mutual TLS {figure.mutual_tls_us:7.0f}  "
            f"{figure.ratio:.2f} times (at most {LIMIT:g} wanted)"
        )
    if json_path:
        content: dict[str, Any] = {"streams": streams, "rounds": rounds, "requests": requests}
        content["figures"] = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
        json_path.write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
