"""CPU of the frontend process per request and per streamed chunk, and where it goes.

    python -m benchmarks.frontend_cpu [--rounds 5] [--json OUT]

The frontend runs in a process of its own between fake workers (one token a request and step, 100 steps/s) and a
fake scheduler, which speak the real protocol from another process; this one is the client. The CPU is the frontend
process's, user and system, over a whole run, less what it uses when idle. Requests ask for one token; 8 are under
way at any moment, or a single one, which shows what waking up for each message costs. The hops are the same
functions called in a loop in this process; what remains of a request or a chunk is HTTP, gRPC and the event loop.
Prompts and answers are English (`benchmarks.english`).
"""

import asyncio
import itertools
import json
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import english
from benchmarks.frontend_hops import chunk_hops, request_hops
from benchmarks.process_cpu import process_cpu_s
from mesh.membership import Member
from mesh.runtime import SystemClock
from penstock.v1 import request_pb2
from services.frontend.text.model_text import ModelText
from tests.unit.services.frontend.checkpoints import LLAMA_3_REGEX, write_checkpoint
from tests.unit.services.frontend.fakes import FakeScheduler, FakeWorker, always, tokens
from tests.unit.services.frontend.mesh_of_fakes import frontend_between

STREAMS = 32
STEP_S = 0.01
ANSWER_CHARACTERS = 8000
IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How many rounds, requests and tokens are measured: full, or a tiny run for the tests."""

    rounds: int
    """Of each measurement, one more before them to warm up."""
    requests: int
    """In a round, of each kind; each kind's own number is the most."""
    stream_tokens: int
    """Tokens of each stream in a round."""
    workers: tuple[int, ...]
    """Each number of workers that streams come from in turn."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request: its length, how much of it the frontend has seen before, and the target for its CPU time."""

    name: str
    characters: int
    shared_characters: int
    """Of them, how many all prompts begin with."""
    requests: int
    at_once: int
    target_us: float | None


REQUEST_CASES = (
    Case("request, 1k characters, all new", 1_000, 0, 600, 8, 900),
    Case("request, 1k characters, all new, one at a time", 1_000, 0, 200, 1, None),
    Case("request, 32k characters, 31k seen before", 32_000, 31_000, 200, 8, 6_000),
    Case("request, 32k characters, all new", 32_000, 0, 100, 8, None),
)
CHUNK_TARGET_US = 70.0


@dataclass(frozen=True, slots=True)
class Figure:
    """CPU time of one kind of work, with its target."""

    name: str
    cpu_us: float
    """Median of the rounds."""
    rounds_us: list[float]
    target_us: float | None


# ---- the other processes


def serve_peers(pipe: Connection, workers: int, model_path: str) -> None:
    """Fake workers and a scheduler; sends what they announce, ends when told anything."""

    async def serve() -> None:
        model = ModelText.load(Path(model_path), SystemClock().unix_s)
        answer = model.chunked.encode(english.text(ANSWER_CHARACTERS, random.Random(0)))

        def script(request: request_pb2.GenerateRequest) -> list[request_pb2.TokenDelta]:
            told = itertools.islice(itertools.cycle(answer), request.sampling.max_tokens)
            return tokens(*([token_id] for token_id in told))

        fakes = [FakeWorker(script, f"worker-{i}", step_s=STEP_S) for i in range(workers)]
        turns = iter(range(10**9))
        scheduler = FakeScheduler(lambda place: always(f"worker-{next(turns) % workers}")(place))
        peers: list[FakeWorker | FakeScheduler] = [*fakes, scheduler]
        for peer in peers:
            await peer.start()
        members = [fake.member(model_path, max_model_len_tokens="100000") for fake in fakes]
        pipe.send([*members, scheduler.member])
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        for peer in peers:
            await peer.stop()

    uvloop.run(serve())


def serve_frontend(pipe: Connection, members: list[Member]) -> None:
    """The measured process; sends its HTTP port, ends when told anything."""

    async def serve() -> None:
        async with frontend_between(members) as url:
            pipe.send(int(url.rpartition(":")[2]))
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    uvloop.run(serve())


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Any]]:
    """A process of its own: its id, and what it sends once it is ready."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=target, args=(there, *arguments))
    child.start()
    there.close()  # so that the end of the process is the end of the pipe
    try:
        assert child.pid is not None, "it was started"
        yield child.pid, here.recv()
    finally:
        here.send("end")
        child.join(timeout=10)
        child.kill()


# ---- the client


class Connections:
    """As many HTTP connections as there are requests at once, used again and again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, body: dict[str, Any]) -> bytes:
        """The answer's body; raises if its status is not 200."""
        if not self._idle:
            self._idle.append(await asyncio.open_connection("127.0.0.1", self._port, limit=2**20))
        reader, writer = connection = self._idle.pop()
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        headers = await reader.readuntil(b"\r\n\r\n")
        if b"content-length: " in headers:
            answer = await reader.readexactly(int(headers.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        else:
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        if not headers.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the frontend refused: {headers!r} {answer!r}")
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def body(text: str, max_tokens: int, stream: bool) -> dict[str, Any]:
    """The JSON body of a chat request."""
    messages = [{"role": "user", "content": text}]
    return {"model": "demo", "messages": messages, "max_tokens": max_tokens, "stream": stream}


async def run_requests(port: int, texts: list[str], at_once: int) -> None:
    """All requests, a new one whenever another is answered."""
    connections, left = Connections(port), iter(texts)

    async def ask() -> None:
        for text in left:
            await connections.post(body(text, 1, stream=False))

    await asyncio.gather(*(ask() for _ in range(at_once)))
    connections.close()


async def run_streams(port: int, stream_tokens: int) -> None:
    """All streams at once, from the first token to the last."""
    connections = Connections(port)
    texts = english.prompts(100, 0, seed=1)
    asked = [connections.post(body(next(texts), stream_tokens, stream=True)) for _ in range(STREAMS)]
    for answer in await asyncio.gather(*asked):
        if answer.count(b"data: ") < stream_tokens:
            raise RuntimeError(f"only {answer.count(b'data: ')} events: the frontend was too slow to be measured")
    connections.close()


# ---- the measurement


def measure(frontend: int, work: Callable[[], Any], idle_per_s: float) -> float:
    """CPU seconds that the frontend's process spends on `work`, the idle part of it taken off."""

    async def timed() -> float:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        await work()
        return loop.time() - start_s

    before_s = process_cpu_s(frontend)
    elapsed_s = uvloop.run(timed())
    return process_cpu_s(frontend) - before_s - idle_per_s * elapsed_s


def figures(model_path: str, effort: Effort) -> Iterator[Figure]:
    """All that is measured from outside."""
    idle_per_s = 0.0
    for number, workers in enumerate(effort.workers):
        with (
            process(serve_peers, workers, model_path) as (_, members),
            process(serve_frontend, members) as (frontend, port),
        ):
            if not number:
                idle_per_s = measure(frontend, lambda: asyncio.sleep(IDLE_S), 0.0) / IDLE_S
                yield Figure("idle, per second", 1e6 * idle_per_s, [1e6 * idle_per_s], None)
                yield from request_figures(frontend, port, idle_per_s, effort)
            streams = partial(run_streams, port, effort.stream_tokens)
            chunks = STREAMS * effort.stream_tokens
            taken = [1e6 * measure(frontend, streams, idle_per_s) / chunks for _ in range(effort.rounds + 1)]
            yield _figure(f"chunk, {STREAMS} streams x 100/s, {workers} worker(s)", taken, CHUNK_TARGET_US)


def request_figures(frontend: int, port: int, idle_per_s: float, effort: Effort) -> Iterator[Figure]:
    """CPU time of a request, for each of `REQUEST_CASES`."""
    for case in REQUEST_CASES:
        requests = min(case.requests, effort.requests)
        source = english.prompts(case.characters, case.shared_characters, seed=0)
        taken = []
        for _ in range(effort.rounds + 1):
            run = partial(run_requests, port, list(itertools.islice(source, requests)), case.at_once)
            taken.append(1e6 * measure(frontend, run, idle_per_s) / requests)
        yield _figure(case.name, taken, case.target_us)


def _figure(name: str, taken_us: list[float], target_us: float | None) -> Figure:
    """The first round has warmed up."""
    return Figure(name, statistics.median(taken_us[1:]), taken_us[1:], target_us)


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds of each measurement.")
@click.option("--requests", default=600, show_default=True, help="At most, in a round of each kind.")
@click.option("--stream-tokens", default=300, show_default=True, help="Of each stream in a round.")
@click.option("--workers", multiple=True, default=(1, 4), show_default=True, help="That streams come from; repeat.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to a file.")
def main(json_path: Path | None, **effort: Any) -> None:
    """Measure and print a table."""
    with tempfile.TemporaryDirectory() as directory:
        model_path = write_checkpoint(Path(directory), english.tokenizer(LLAMA_3_REGEX))
        model = ModelText.load(model_path, SystemClock().unix_s)
        several = [case for case in REQUEST_CASES if case.at_once > 1]
        hops = {
            **{case.name: request_hops(model, case.characters, case.shared_characters) for case in several},
            "chunk": chunk_hops(model, STREAMS),
        }
        measured = list(figures(str(model_path), Effort(**effort)))
    _print(measured, hops)
    if json_path is not None:
        content = {"figures": [asdict(figure) for figure in measured], "hops_us": hops}
        json_path.write_text(json.dumps(content, indent=2) + "\n")


def _print(measured: list[Figure], hops: dict[str, dict[str, float]]) -> None:
    table = Table("frontend process", "CPU us, median", "lowest", "highest", "target (with the scheduler)")
    for figure in measured:
        target = "" if figure.target_us is None else f"{figure.target_us:.0f}"
        low, high = min(figure.rounds_us), max(figure.rounds_us)
        table.add_row(figure.name, f"{figure.cpu_us:.1f}", f"{low:.1f}", f"{high:.1f}", target)
    console = Console()
    console.print(table)
    for name, parts in hops.items():
        breakdown = Table(f"hops of a {name}", "CPU us")
        for hop, taken_us in parts.items():
            breakdown.add_row(hop, f"{taken_us:.1f}")
        console.print(breakdown)


if __name__ == "__main__":
    main()
