"""CPU of the worker shell: what routing, encoding and sending tokens costs beside the engine.

A worker process drives a scripted engine (32 requests, 100 steps a second by default) and streams to a frontend in
another process; the CPU of the whole worker process is counted. Beside it in the same run: one request (tells the
cost of a step from that of a delta), none (the idle cost, taken off), and a bare gRPC stream that writes one ready
message of the same size at the same pace (the floor). Run:

    python -m benchmarks.worker_stream [--requests 32] [--steps-per-s 100] [--duration-s 10] [--json OUT]
"""

import asyncio
import multiprocessing
import time
import timeit
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import grpc
import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from controlplane.model.instance import InstanceDescription, KvBlocks, LoadReport
from controlplane.model.request import EngineRequest, SamplingParams, StepOutput, TokenDelta
from engine_worker import wire
from engine_worker.engines.interface import EngineLimits
from engine_worker.instance import Instance
from engine_worker.metrics import WorkerMetrics
from engine_worker.request_table import RequestTable
from engine_worker.service import WorkerService
from engine_worker.settings import WorkerSettings
from mesh.rpc.client import open_channel
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemThreads
from penstock.v1 import request_pb2, worker_pb2, worker_pb2_grpc

DESCRIPTION = InstanceDescription("worker-0", "0", "", "m", "", "scripted", 16, 4096, 8192, 256, 2048)
WARM_UP_S = 1.0


class ScriptedEngine:
    """One token for every request at a fixed pace; the deltas themselves are the only work it does."""

    def __init__(self, steps_per_s: float) -> None:
        self._pause_s = 1.0 / steps_per_s
        self._offsets: dict[str, int] = {}
        self.steps = 0

    async def start(self) -> EngineLimits:
        """Return the limits; nothing runs in the background."""
        return EngineLimits(16, 4096, 8192, 256, 2048)

    def submit(self, request: EngineRequest) -> None:
        """Bring a token of this request with every step from the next one on."""
        self._offsets[request.request_id] = 0

    def abort(self, request_id: str) -> None:
        """Stop sending tokens of this request."""
        self._offsets.pop(request_id, None)

    async def outputs(self) -> AsyncIterator[StepOutput]:
        """A step at each tick of the clock, as long as there are requests."""
        due_s = time.monotonic()
        while True:
            due_s += self._pause_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if not self._offsets:
                continue
            self.steps += 1
            step = StepOutput(tuple(TokenDelta(key, offset, (1234,)) for key, offset in self._offsets.items()))
            for key in self._offsets:
                self._offsets[key] += 1
            yield step

    def load(self) -> LoadReport:
        """All requests as running; nothing else is known."""
        return LoadReport(running_requests=len(self._offsets), step_ms=10.0, generated_tokens_total=self.steps)

    async def kv_blocks(self) -> AsyncIterator[KvBlocks]:
        """Never yields: there is no prefix cache."""
        return
        yield

    async def stop(self) -> None:
        """Holds nothing that would have to be stopped."""


def worker_main(pipe: Connection, steps_per_s: float, duration_s: float) -> None:
    """The worker process: sends its address, waits to be told that its frontend reads, and then sends (CPU seconds,
    steps) of the measured time."""
    uvloop.run(_work(pipe, steps_per_s, duration_s))


async def _work(pipe: Connection, steps_per_s: float, duration_s: float) -> None:
    engine = ScriptedEngine(steps_per_s)
    settings = WorkerSettings(model="m", model_path="")
    instance = Instance(engine, DESCRIPTION, settings, WorkerMetrics(CollectorRegistry()), time.monotonic)
    server = RpcServer(GrpcTransport())
    service = WorkerService(instance, time.monotonic, SystemThreads())
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service, "penstock.v1.Worker")
    output = asyncio.create_task(instance.run())
    pipe.send(await server.start())
    await asyncio.to_thread(pipe.recv)
    await asyncio.sleep(WARM_UP_S)
    cpu_s, steps = time.process_time(), engine.steps
    await asyncio.sleep(duration_s)
    pipe.send((time.process_time() - cpu_s, engine.steps - steps))
    output.cancel()
    await server.stop(0.5)


class BareService(worker_pb2_grpc.WorkerServicer):
    """Writes the same message at the same pace, and does nothing else."""

    def __init__(self, message: worker_pb2.WorkerMessage, steps_per_s: float) -> None:
        self._message = message
        self._pause_s = 1.0 / steps_per_s
        self.steps = 0

    async def Stream(self, inbound: Any, context: Any) -> None:
        """Answer the hello, then send steps until cancelled."""
        await anext(inbound)
        due_s = time.monotonic()
        while True:
            due_s += self._pause_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await context.write(self._message)
            self.steps += 1


def bare_main(pipe: Connection, steps_per_s: float, duration_s: float, requests: int) -> None:
    """The same as `worker_main` for the bare stream."""
    uvloop.run(_bare_work(pipe, steps_per_s, duration_s, requests))


async def _bare_work(pipe: Connection, steps_per_s: float, duration_s: float, requests: int) -> None:
    service = BareService(wire.step_message(_deltas(requests), {}), steps_per_s)
    server = RpcServer(GrpcTransport())
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service, "penstock.v1.Worker")
    pipe.send(await server.start())
    await asyncio.to_thread(pipe.recv)
    await asyncio.sleep(WARM_UP_S)
    cpu_s, steps = time.process_time(), service.steps
    await asyncio.sleep(duration_s)
    pipe.send((time.process_time() - cpu_s, service.steps - steps))
    await server.stop(0.5)


def _deltas(requests: int) -> list[TokenDelta]:
    return [TokenDelta(_request_id(number), 1000, (1234,)) for number in range(requests)]


async def _read(pipe: Connection, address: str, requests: int) -> None:
    """A frontend that reads until the worker goes; says through the pipe when the first message has come."""
    async with open_channel(GrpcTransport(), address) as channel:
        call: Any = worker_pb2_grpc.WorkerStub(channel).Stream()  # type: ignore[no-untyped-call]
        hello = worker_pb2.FrontendHello(frontend_id="benchmark")
        await call.write(worker_pb2.FrontendMessage(hello=hello))
        for number in range(requests):
            sampling = request_pb2.SamplingParams(max_tokens=10**6, top_p=1, repetition_penalty=1)
            generate = request_pb2.GenerateRequest(
                request_id=_request_id(number), prompt_token_ids=[1], model="m", sampling=sampling
            )
            await call.write(worker_pb2.FrontendMessage(generate=generate))
        await call.read()
        pipe.send("reads")
        try:
            while await call.read() is not grpc.aio.EOF:
                continue
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise


def _request_id(number: int) -> str:
    return f"chatcmpl-{number:032x}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """CPU of a server process, and how many steps it sent in that time."""

    cpu_s: float
    steps: int


def measure(target: Callable[..., None], requests: int, *arguments: float) -> Measurement:
    """Run `target(pipe, *arguments)` as the server of a frontend with `requests` requests."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    heard, says = context.Pipe(duplex=False)
    reader = context.Process(target=reader_main, args=(says, ours.recv(), requests))
    reader.start()
    says.close()
    ours.send(heard.recv())
    cpu_s, steps = ours.recv()
    process.join()
    reader.terminate()
    reader.join()
    return Measurement(cpu_s, steps)


def reader_main(pipe: Connection, address: str, requests: int) -> None:
    """The process in the frontend's place, which reads the streams."""
    uvloop.run(_read(pipe, address, requests))


def measure_parts(requests: int) -> dict[str, float]:
    """Microseconds per delta of the pure parts alone."""
    table = RequestTable()
    for number in range(requests):
        request = EngineRequest(_request_id(number), (1,), SamplingParams(max_tokens=10**6))
        table.admit(request, stream_id=1, frontend_id="f", now_s=0.0)
    empty = StepOutput(tuple(TokenDelta(_request_id(number), 0, ()) for number in range(requests)))
    deltas = _deltas(requests)
    message = wire.step_message(deltas, {})
    parts = {
        "route": lambda: table.route(empty),
        "encode": lambda: wire.step_message(deltas, {}),
        "size": message.ByteSize,
        "serialise": message.SerializeToString,
    }
    rounds = 500
    return {
        name: min(timeit.repeat(part, number=rounds, repeat=7)) / rounds / requests * 1e6
        for name, part in parts.items()
    }


@click.command()
@click.option("--requests", default=32, show_default=True, help="Running requests.")
@click.option("--steps-per-s", default=100.0, show_default=True, help="Engine steps a second.")
@click.option("--duration-s", default=10.0, show_default=True, help="Measured seconds of each run.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where to write the result.")
def main(requests: int, steps_per_s: float, duration_s: float, json_path: Path | None) -> None:
    pace = (steps_per_s, duration_s)
    idle, one, many = (measure(worker_main, count, *pace) for count in (0, 1, requests))
    bare = measure(bare_main, 1, *pace, requests)
    per_step_us = 1e6 * (many.cpu_s - idle.cpu_s) / many.steps
    one_step_us = 1e6 * (one.cpu_s - idle.cpu_s) / one.steps
    result = {
        "requests": requests,
        "steps_per_s": many.steps / duration_s,
        "cpu_share": many.cpu_s / duration_s,
        "idle_cpu_share": idle.cpu_s / duration_s,
        "bare_grpc_cpu_share": bare.cpu_s / duration_s,
        "ratio_to_bare_grpc": (many.cpu_s / many.steps) / (bare.cpu_s / bare.steps),
        "us_per_step": per_step_us,
        "us_per_step_of_one_request": one_step_us,
        "us_per_delta": per_step_us / requests,
        "parts_us_per_delta": measure_parts(requests),
    }
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
    click.echo(text)
    if json_path is not None:
        json_path.write_text(text + "\n")


if __name__ == "__main__":
    main()
