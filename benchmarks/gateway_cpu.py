"""CPU of the gateway process per request and per streamed piece of an answer.

    python -m benchmarks.gateway_cpu [--rounds 5] [--json OUT]

The gateway runs in a process of its own, with a fake scheduler in the same process, which answers at once. This one
speaks for Envoy: all streams on one connection, 8 requests under way at any moment, each a conversation in English
(`benchmarks.english`) that nobody has seen before, with an answer of one piece. Pieces are events of 160 bytes on 32
streams. The CPU is the gateway process's, user and system, over a whole run.
"""

import asyncio
import json
import random
import statistics
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import grpc
import uvloop

from benchmarks import english
from benchmarks.frontend_cpu import process
from benchmarks.process_cpu import process_cpu_s
from penstock.v1 import ext_proc_pb2_grpc
from tests.unit.services.frontend.checkpoints import LLAMA_3_REGEX, write_checkpoint
from tests.unit.services.frontend.gateway.gateway_of_fakes import Asked, attached, gateway_of_fakes

AT_ONCE = 8
STREAMS = 32
LENGTHS_CHARACTERS = (1_000, 32_000)
PIECE = b"data: " + json.dumps({"id": "x", "choices": [{"index": 0, "delta": {"content": " w"}}]}).encode().ljust(152)


def serve_gateway(pipe: Connection, model_path: str) -> None:
    """The measured process; sends its gRPC address, ends when told anything."""

    async def serve() -> None:
        members = [attached(Path(model_path), f"server-{i}", f"http://10.0.0.{i}:8000", 100_000) for i in range(2)]
        async with gateway_of_fakes(*members) as gateway:
            pipe.send(gateway.server.address)
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    uvloop.run(serve())


class Envoy:
    """The client's end."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self._stub = ext_proc_pb2_grpc.ExternalProcessorStub(self.channel)  # type: ignore[no-untyped-call]

    async def send(self, text: str) -> Asked:
        """A request, on its way to its endpoint."""
        asked = Asked(self._stub.Process())
        await asked.headers("/v1/chat/completions")
        await asked.body({"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 1})
        assert (await asked.destination())[0]
        await asked.read()
        return asked

    async def requests(self, texts: list[str]) -> None:
        """All of them, a new one whenever another is answered."""
        left = iter(texts)

        async def ask() -> None:
            for text in left:
                asked = await self.send(text)
                await asked.answer(b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}')
                await asked.read()
                await asked.read()
                await asked.call.done_writing()
                with suppress(grpc.aio.AioRpcError):
                    await asked.call.read()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(ask())

    async def pieces(self, streams: list[Asked], count: int) -> None:
        """So many pieces on each stream."""

        async def stream(asked: Asked) -> None:
            for _ in range(count):
                await asked.say(response_body={"body": PIECE})
                await asked.call.read()

        async with asyncio.TaskGroup() as tasks:
            for asked in streams:
                tasks.create_task(stream(asked))


async def measure(address: str, pid: int, rounds: int, requests: int, pieces: int) -> dict[str, list[float]]:
    """Microseconds of CPU, by name; a round that warms up is left out."""
    envoy, rng = Envoy(address), random.Random(0)
    figures: dict[str, list[float]] = {}
    for characters in LENGTHS_CHARACTERS:
        name = f"request, {characters // 1000}k characters, all new"
        for _ in range(rounds + 1):
            texts = [english.text(characters, rng) for _ in range(requests)]
            before_s = process_cpu_s(pid)
            await envoy.requests(texts)
            figures.setdefault(name, []).append(1e6 * (process_cpu_s(pid) - before_s) / requests)
    streams = [await envoy.send("x") for _ in range(STREAMS)]
    for asked in streams:
        await asked.answer()
        await asked.read()
    for _ in range(rounds + 1):
        before_s = process_cpu_s(pid)
        await envoy.pieces(streams, pieces)
        figures.setdefault(f"piece, {STREAMS} streams", []).append(
            1e6 * (process_cpu_s(pid) - before_s) / (STREAMS * pieces)
        )
    await envoy.channel.close()
    return {name: rounds_us[1:] for name, rounds_us in figures.items()}


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--requests", default=200, show_default=True)
@click.option("--pieces", default=200, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(rounds: int, requests: int, pieces: int, json_path: Path | None) -> None:
    """Print the figures, and write them as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), tokenizer=english.tokenizer(LLAMA_3_REGEX))
        with process(serve_gateway, str(path)) as (pid, address):
            measured = uvloop.run(measure(address, pid, rounds, requests, pieces))
    figures: dict[str, Any] = {
        name: {"cpu_us": statistics.median(each), "rounds_us": each} for name, each in measured.items()
    }
    for name, figure in figures.items():
        low, high = min(figure["rounds_us"]), max(figure["rounds_us"])
        print(f"{name}: {figure['cpu_us']:.0f} us of CPU ({low:.0f} to {high:.0f})")
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
