"""CPU that the load generator of `penstock bench` spends per request and per streamed chunk, beside httpx.

    python -m benchmarks.load_generator_cost [--rounds 5] [--json OUT]

A process of its own streams paced events (32 streams x 100/s); both clients read them in turn, in this
process, whose CPU time is the figure. Chunks sent as fast as possible would coalesce in the reads and look
several times cheaper than they are.
"""

import asyncio
import json
import random
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import httpx
import uvloop

from benchmarks.english import text
from services.cli.replay.completions import CompletionForm, complete
from services.cli.replay.pool import ConnectionPool, parse_endpoint
from simulator.traces.prompt import TokenRange
from simulator.traces.request import TraceRequest

CHUNKS_PER_S = 100
PROMPT_TOKENS = 1000

EVENT = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":%b,"logprobs":null,"finish_reason":null}]}\n\n'  # noqa: E501 - as it is on the wire
USAGE = b'data: {"id":"cmpl-1","choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":%d,"total_tokens":1}}\n\n'

ANSWER_CHARACTERS = 8000


@dataclass(frozen=True, slots=True)
class Effort:
    """How many requests, chunks and rounds are measured: full, or a tiny run for the tests."""

    rounds: int
    streams: int
    requests: int
    """Of one chunk, by each stream in a round."""
    chunks: int
    """Of the long answer of each stream in a round."""


OneRequest = Callable[[int], Awaitable[None]]


async def serve() -> None:
    """Answer every POST with max_tokens paced events; print the port."""

    events = [EVENT % json.dumps(f" {word}").encode() for word in text(ANSWER_CHARACTERS, random.Random(0)).split()]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = json.loads(await reader.readexactly(int(length.split(b":")[1])))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for index in range(body["max_tokens"]):
                if index:
                    await asyncio.sleep(1 / CHUNKS_PER_S)
                event = events[index % len(events)]
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            last = USAGE % body["max_tokens"] + b"data: [DONE]\n\n"
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def cpu_s(one_request: OneRequest, streams: int, output_tokens: int, requests_per_stream: int) -> float:
    """CPU seconds of this process for all streams together."""

    async def stream() -> None:
        for _ in range(requests_per_stream):
            await one_request(output_tokens)

    before_s = _own_cpu_s()
    await asyncio.gather(*(stream() for _ in range(streams)))
    return _own_cpu_s() - before_s


async def measure(one_request: OneRequest, effort: Effort) -> tuple[float, float]:
    """Microseconds of CPU per request of one chunk, and per further chunk."""
    streams, chunks = effort.streams, effort.chunks
    await cpu_s(one_request, streams, 1, 2)
    per_request_us, per_chunk_us = [], []
    for _ in range(effort.rounds):
        request_s = await cpu_s(one_request, streams, 1, effort.requests) / (streams * effort.requests)
        long_s = await cpu_s(one_request, streams, chunks, 1)
        per_request_us.append(request_s * 1e6)
        per_chunk_us.append((long_s / streams - request_s) / (chunks - 1) * 1e6)
    return median(per_request_us), median(per_chunk_us)


async def penstock_client(url: str, effort: Effort) -> tuple[float, float]:
    """The load generator itself, prompt generation included."""
    pool = ConnectionPool(parse_endpoint(url))
    form = CompletionForm(pool.endpoint, "m", TokenRange(3, 500), seed=0)
    now_s = asyncio.get_running_loop().time

    async def one_request(output_tokens: int) -> None:
        encoded = form.encode(0, TraceRequest(0.0, PROMPT_TOKENS, output_tokens))
        outcome, _ = await complete(pool, encoded, now_s(), now_s, 60.0)
        assert not outcome.error, outcome.error

    try:
        return await measure(one_request, effort)
    finally:
        pool.close()


async def httpx_client(url: str, effort: Effort) -> tuple[float, float]:
    """A straightforward client with httpx: the same body, each event decoded with json."""
    limits = httpx.Limits(max_connections=effort.streams, max_keepalive_connections=effort.streams)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:

        async def one_request(output_tokens: int) -> None:
            body = {"model": "m", "prompt": list(range(PROMPT_TOKENS)), "max_tokens": output_tokens, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        json.loads(line[6:])

        return await measure(one_request, effort)


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--streams", default=32, show_default=True, help="Under way at once.")
@click.option("--requests", default=20, show_default=True, help="Of one chunk, by each stream in a round.")
@click.option("--chunks", default=200, show_default=True, type=click.IntRange(2), help="Of a long answer.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to a file.")
@click.option("--serve", "is_server", is_flag=True, hidden=True, help="Be the server; the benchmark starts it.")
def main(json_path: Path | None, is_server: bool, **effort: int) -> None:
    """Start the server, run both clients against it, print a table."""
    if is_server:
        uvloop.run(serve())
        return
    command = [sys.executable, "-m", "benchmarks.load_generator_cost", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        try:
            results = {name: uvloop.run(client(url, Effort(**effort))) for name, client in CLIENTS.items()}
        finally:
            server.terminate()
    print("| client | CPU us per request | CPU us per chunk |\n|---|---|---|")
    for name, (request_us, chunk_us) in results.items():
        print(f"| {name} | {request_us:.0f} | {chunk_us:.1f} |")
    ours, theirs = results["penstock bench"], results["httpx"]
    print(f"| ratio | {theirs[0] / ours[0]:.1f} | {theirs[1] / ours[1]:.1f} |")
    if json_path is not None:
        named = {name: {"us_per_request": each[0], "us_per_chunk": each[1]} for name, each in results.items()}
        json_path.write_text(json.dumps(named, indent=2) + "\n")


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


CLIENTS = {"penstock bench": penstock_client, "httpx": httpx_client}

if __name__ == "__main__":
    main()
