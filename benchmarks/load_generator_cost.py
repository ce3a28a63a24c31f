"""CPU that the load generator of `penstock bench` spends per request and per streamed chunk, beside httpx.

    python -m benchmarks.load_generator_cost

A process of its own streams paced events (32 streams x 100/s); both clients read them in turn, in this
process, whose CPU time is the figure. Chunks sent as fast as possible would coalesce in the reads and look
several times cheaper than they are.
"""

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable
from statistics import median

import httpx
import uvloop

from services.cli.replay.completions import CompletionForm, complete
from services.cli.replay.pool import ConnectionPool, parse_endpoint
from simulator.traces.prompt import TokenRange
from simulator.traces.request import TraceRequest

STREAMS = 32
CHUNKS_PER_S = 100
LONG_CHUNKS = 200
REQUESTS_PER_STREAM = 20
PROMPT_TOKENS = 1000
ROUNDS = 5

EVENT = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"word","logprobs":null,"finish_reason":null}]}\n\n'  # noqa: E501 - as it is on the wire
USAGE = b'data: {"id":"cmpl-1","choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":%d,"total_tokens":1}}\n\n'

OneRequest = Callable[[int], Awaitable[None]]


async def serve() -> None:
    """Answer every POST with max_tokens paced events; print the port."""

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
                writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            last = USAGE % body["max_tokens"] + b"data: [DONE]\n\n"
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def cpu_s(one_request: OneRequest, output_tokens: int, requests_per_stream: int) -> float:
    """CPU seconds of this process for all streams together."""

    async def stream() -> None:
        for _ in range(requests_per_stream):
            await one_request(output_tokens)

    before_s = _own_cpu_s()
    await asyncio.gather(*(stream() for _ in range(STREAMS)))
    return _own_cpu_s() - before_s


async def measure(one_request: OneRequest) -> tuple[float, float]:
    """Microseconds of CPU per request of one chunk, and per further chunk."""
    await cpu_s(one_request, 1, 2)
    per_request_us, per_chunk_us = [], []
    for _ in range(ROUNDS):
        short_s = await cpu_s(one_request, 1, REQUESTS_PER_STREAM)
        request_s = short_s / (STREAMS * REQUESTS_PER_STREAM)
        long_s = await cpu_s(one_request, LONG_CHUNKS, 1)
        per_request_us.append(request_s * 1e6)
        per_chunk_us.append((long_s / STREAMS - request_s) / (LONG_CHUNKS - 1) * 1e6)
    return median(per_request_us), median(per_chunk_us)


async def penstock_client(url: str) -> tuple[float, float]:
    """The load generator itself, prompt generation included."""
    pool = ConnectionPool(parse_endpoint(url))
    form = CompletionForm(pool.endpoint, "m", TokenRange(3, 500), seed=0)
    now_s = asyncio.get_running_loop().time

    async def one_request(output_tokens: int) -> None:
        encoded = form.encode(0, TraceRequest(0.0, PROMPT_TOKENS, output_tokens))
        outcome, _ = await complete(pool, encoded, now_s(), now_s, 60.0)
        assert not outcome.error, outcome.error

    try:
        return await measure(one_request)
    finally:
        pool.close()


async def httpx_client(url: str) -> tuple[float, float]:
    """What one would write with httpx: the same body, each event decoded with json."""
    limits = httpx.Limits(max_connections=STREAMS, max_keepalive_connections=STREAMS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:

        async def one_request(output_tokens: int) -> None:
            body = {"model": "m", "prompt": list(range(PROMPT_TOKENS)), "max_tokens": output_tokens, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        json.loads(line[6:])

        return await measure(one_request)


def main() -> None:
    """Start the server, run both clients against it, print a table."""
    command = [sys.executable, "-m", "benchmarks.load_generator_cost", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        try:
            results = {name: uvloop.run(client(url)) for name, client in CLIENTS.items()}
        finally:
            server.terminate()
    print("| client | CPU us per request | CPU us per chunk |\n|---|---|---|")
    for name, (request_us, chunk_us) in results.items():
        print(f"| {name} | {request_us:.0f} | {chunk_us:.1f} |")
    ours, theirs = results["penstock bench"], results["httpx"]
    print(f"| ratio | {theirs[0] / ours[0]:.1f} | {theirs[1] / ours[1]:.1f} |")


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


CLIENTS = {"penstock bench": penstock_client, "httpx": httpx_client}

if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        uvloop.run(serve())
    else:
        main()
