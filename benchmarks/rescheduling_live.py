"""Decode rescheduling in a live mesh: preemptions and the spread of decode-step times with it and without, in one run.

`penstock up` with a few instances; the same seeded open-loop workload of long-tailed answers is sent once for each mode
in turn, round after round. Every 100 ms the scheduler's snapshot is read, and the workers tell of all their steps: the
variance of decode-step time is that over the instances of their median decode step within a second, mean over the
seconds in which all decode. (A mean instead of a median tells, on a busy machine, of the one step in a hundred that
waited for a CPU.) Of the moves it counts those whose request ended sooner after them than it had paused for them, and
those to an instance that the request had been on before.

    python -m benchmarks.rescheduling_live --engine simulated --json rescheduling_live.json
    python -m benchmarks.rescheduling_live --engine vllm --json rescheduling_live_vllm.json
    python -m benchmarks.rescheduling_live --engine vllm --learn-lengths --profile \
        --modes off,current,predicted,trajectories --seconds 600

Arrivals and lengths of a round are the same in all modes. Prompts are not: whoever learns lengths while it serves would
know them from the mode before.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks import english
from mesh.membership import Directory, Member
from mesh.parent_death import PARENT_VARIABLE
from mesh.rpc.client import open_channel
from mesh.run_file import read_run_file, run_dir
from mesh.runtime import GrpcTransport, system_runtime
from mesh.store import open_store
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.cli.chaos.temporary_mesh import free_ports

MODEL = "demo-large"
PROMPT_CHARACTERS = 80
START_S = 900.0
REQUEST_S = 600.0
SAMPLE_S = 0.1
MOVED = scheduler_pb2.ORDER_OUTCOME_MOVED
LEAST_STEPS = 10
"""Of an instance within a second, or it was idle for most of it."""
PARAMETERS = {"interval_s": 0.25, "stride_tokens": 16, "migration_fixed_ms": 30}
"""A horizon of 512 tokens: half of the longest answer here, as 8K tokens are a quarter of the paper's."""

LENGTH_QUANTILES = ((0.0, 0.01), (0.5, 0.047), (0.83, 0.8), (0.9, 1.0), (1.0, 1.0))
"""Answer lengths as shares of the longest: STAR's table 2 (ShareGPT: median 1536, P90 32670 of 32K)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How large a mesh and a load this engine kind bears on two cores."""

    workers: int
    engine_args: tuple[str, ...]
    longest_tokens: int
    requests: int
    rate_per_s: float
    concurrency: int = 0
    """Requests under way at any time, whenever the workload would have them arrive; 0: as they arrive. Keeps the KV
    memory as full on a slow machine as on a fast one."""


SETUPS = {
    "simulated": Setup(
        3,
        (
            "instance.kv_blocks=512",
            "instance.max_model_len_tokens=4096",
            "cost.fixed_ms=8",
            "cost.context_token_ms=0.002",
        ),
        1024,
        300,
        11.0,
    ),
    "vllm": Setup(
        2,
        (
            "dtype=float32",
            "block_size=32",
            "max_num_batched_tokens=256",
            "max_model_len=4096",
            "kv_cache_memory_bytes=150994944",  # 24,576 tokens, or decode steps would hardly tell how many there are
        ),
        3500,
        100,
        1000.0,
        concurrency=32,
    ),
}


def slowed(setup: Setup, time_scale: float) -> Setup:
    """The same load on engines of which every step takes so many times as long: for machines with little to spare."""
    if time_scale == 1:
        return setup
    options = (*setup.engine_args, f"time_scale={time_scale:g}")
    return replace(setup, engine_args=options, rate_per_s=setup.rate_per_s / time_scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(SETUPS), default="simulated")
    parser.add_argument("--modes", default="off,current", help="taken in turn within each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0, help="no round begins later; 0: all rounds are run")
    parser.add_argument("--policy", default="least_loaded")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--concurrency", type=int, help="requests under way at any time, whenever they arrive")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of simulated engines; 4: four times as slow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learn-lengths", action="store_true", help="as of `penstock up`")
    parser.add_argument("--profile", action="store_true", help="`penstock profile` before the first round")
    parser.add_argument("--json", type=Path)
    report = asyncio.run(measure(parser.parse_args()))
    for mode, figures in report["medians"].items():
        print(mode, json.dumps(figures))


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds of all modes on one mesh."""
    setup = slowed(SETUPS[arguments.engine], arguments.time_scale)
    if arguments.concurrency:
        setup = replace(setup, concurrency=arguments.concurrency)
    parameters = {**PARAMETERS, "interval_s": PARAMETERS["interval_s"] * arguments.time_scale}
    modes = arguments.modes.split(",")
    runs: list[dict[str, Any]] = []
    async with running_mesh(arguments.engine, setup, arguments.policy, learns=arguments.learn_lengths) as mesh:
        if arguments.profile:
            await profile(mesh.name, setup)
        began_s = time.monotonic()
        for number in range(arguments.rounds):
            if number and arguments.seconds and time.monotonic() - began_s > arguments.seconds:
                break
            for turn, mode in enumerate(modes):
                workload = make_workload(
                    arguments.seed + number,
                    arguments.requests or setup.requests,
                    arguments.rate or setup.rate_per_s,
                    setup.longest_tokens,
                    prompts_seed=arguments.seed + number * len(modes) + turn,
                )
                runs.append(
                    {
                        "round": number,
                        "mode": mode,
                        **await one_run(mesh, mode, parameters, workload, setup.concurrency),
                    }
                )
                print(json.dumps(runs[-1]), file=sys.stderr)
    names = [name for name, value in runs[0].items() if isinstance(value, (int, float)) and name != "round"]
    medians = {
        mode: {name: statistics.median(run[name] for run in runs if run["mode"] == mode) for name in names}
        for mode in modes
    }
    report = {
        "engine": arguments.engine,
        "instances": setup.workers,
        "engine_args": setup.engine_args,
        "policy": arguments.policy,
        "rescheduler_parameters": parameters,
        "requests": arguments.requests or setup.requests,
        "rate_per_s": arguments.rate or setup.rate_per_s,
        "concurrency": setup.concurrency,
        "seed": arguments.seed,
        "learn_lengths": arguments.learn_lengths,
        "profile": arguments.profile,
        "medians": medians,
        "runs": runs,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return report


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the workload."""

    at_s: float
    prompt: str
    output_tokens: int


def make_workload(seed: int, count: int, rate_per_s: float, longest_tokens: int, *, prompts_seed: int) -> list[Request]:
    """Poisson arrivals; answers after `LENGTH_QUANTILES`, log-linear between them."""
    random = np.random.default_rng(seed)
    at_s = np.cumsum(random.exponential(1 / rate_per_s, count))
    shares, levels = zip(*LENGTH_QUANTILES, strict=True)
    lengths = np.exp(np.interp(random.random(count), shares, np.log(np.array(levels) * longest_tokens)))
    return [
        Request(float(at), prompt, max(2, round(float(length))))
        for at, length, prompt in zip(at_s, lengths, english.prompts(PROMPT_CHARACTERS, 0, prompts_seed), strict=False)
    ]


async def one_run(
    mesh: "RunningMesh", mode: str, parameters: dict[str, float], workload: Sequence[Request], concurrency: int
) -> dict[str, Any]:
    """Send the workload with the rescheduler in `mode` and wait for its end."""
    url, scheduler, workers = mesh.url, mesh.scheduler, mesh.workers
    await scheduler.SetRescheduler(scheduler_pb2.SetReschedulerRequest(mode=mode, parameters=parameters), timeout=30)
    before = await read(scheduler)
    moves_before = await orders(scheduler)
    samples: list[dict[str, Any]] = []
    told: dict[tuple[str, int], scheduler_pb2.ReschedulerOrder] = {}
    steps: dict[str, list[DecodeStep]] = {worker.member_id: [] for worker in workers}
    listening = [asyncio.create_task(listen(worker, steps[worker.member_id])) for worker in workers]
    sampling = asyncio.create_task(sample(scheduler, samples, told))
    started_s = time.monotonic()
    limits = httpx.Limits(max_connections=len(workload))
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits) as client:
        places = asyncio.Semaphore(concurrency or len(workload))
        answers = await asyncio.gather(*(send(client, request, places) for request in workload))
    per_token_ms = [answer.per_token_ms for answer in answers]
    seconds = time.monotonic() - started_s
    for task in (sampling, *listening):
        task.cancel()
    await asyncio.gather(sampling, *listening, return_exceptions=True)
    after = await read(scheduler)
    moves = await orders(scheduler)
    busy = [each for each in samples if min(each["running"], default=0) > 0]
    return {
        "preemptions": after["preemptions"] - before["preemptions"],
        "step_ms_variance": step_variance(list(steps.values())),
        "step_ms_median": float(np.median([step.duration_ms for each in steps.values() for step in each])),
        "token_interval_ms_variance": mean(float(np.var(each["token_interval_ms"])) for each in busy),
        "tokens_variance": mean(float(np.var(each["tokens"])) for each in busy),
        "kv_blocks_max": max((max(each["kv_blocks"], default=0) for each in samples), default=0),
        "latency_per_token_ms_p50": float(np.percentile(per_token_ms, 50)),
        "latency_per_token_ms_p99": float(np.percentile(per_token_ms, 99)),
        "moved": moves[0] - moves_before[0],
        "stayed": moves[1] - moves_before[1],
        **judged(list(told.values()), {answer.request_id: answer.ended_unix_ms for answer in answers}),
        "seconds": seconds,
        "samples": len(busy),
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client saw of one request."""

    request_id: str
    per_token_ms: float
    """Waiting for the engine included."""
    ended_unix_ms: float


async def send(client: httpx.AsyncClient, request: Request, places: asyncio.Semaphore) -> Answer:
    """Send it when it is its time, and there is a place."""
    await asyncio.sleep(request.at_s)
    async with places:
        return await answered(client, request)


async def answered(client: httpx.AsyncClient, request: Request) -> Answer:
    """Send one request and check the length of its answer."""
    body = {"model": MODEL, "prompt": request.prompt, "max_tokens": request.output_tokens, "ignore_eos": True}
    started_s = time.monotonic()
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    tokens = answer.json()["usage"]["completion_tokens"]
    if tokens != request.output_tokens:
        raise RuntimeError(f"{tokens} tokens came instead of {request.output_tokens}: {answer.text[:300]}")
    per_token_ms = 1000 * (time.monotonic() - started_s) / request.output_tokens
    return Answer(answer.headers["x-penstock-request-id"], per_token_ms, 1000 * time.time())


def judged(told: Sequence[scheduler_pb2.ReschedulerOrder], ended_unix_ms: dict[str, float]) -> dict[str, int]:
    """Moves that were in vain: those that the request did not outlive by as long as it had paused, and those to an
    instance that it had been on. An order names a choice of a request, whose number stands behind the request's id."""
    judged_moves = ended_within_pause = came_back = 0
    been_on: dict[str, set[str]] = {}
    for move in sorted(told, key=lambda each: each.ordered_unix_ms):
        ended_ms = ended_unix_ms.get(move.request_id) or ended_unix_ms.get(move.request_id.rpartition("-")[0])
        if move.outcome != MOVED or ended_ms is None:
            continue  # of the run before
        judged_moves += 1
        moved_ms = move.ordered_unix_ms + move.duration_ms
        ended_within_pause += ended_ms - moved_ms < move.paused_ms
        places = been_on.setdefault(move.request_id, set())
        places.add(move.source_instance_id)
        came_back += move.target_instance_id in places
    return {"moves_judged": judged_moves, "ended_within_pause": ended_within_pause, "came_back": came_back}


async def sample(
    scheduler: Any, samples: list[dict[str, Any]], told: dict[tuple[str, int], scheduler_pb2.ReschedulerOrder]
) -> None:
    """The snapshot and the latest orders, every `SAMPLE_S`, until cancelled."""
    while True:
        samples.append(await read(scheduler))
        status = await scheduler.GetRescheduler(scheduler_pb2.GetReschedulerRequest(), timeout=30)
        told |= {(order.request_id, order.ordered_unix_ms): order for order in status.orders}
        await asyncio.sleep(SAMPLE_S)


async def read(scheduler: Any) -> dict[str, Any]:
    """Figures of all instances now."""
    snapshot = await scheduler.GetSnapshot(scheduler_pb2.GetSnapshotRequest(), timeout=30)
    loads = [instance.load for instance in snapshot.instances]
    return {
        "preemptions": sum(load.preemptions_total for load in loads),
        "running": [load.decoding_requests for load in loads],
        "token_interval_ms": [load.token_interval_ms for load in loads],
        "tokens": [load.running_tokens for load in loads],
        "kv_blocks": [load.kv_blocks_used for load in loads],
    }


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step that computed no prompt."""

    second: int
    """Second of the monotonic clock in which the step was received."""
    duration_ms: float


async def listen(worker: Member, steps: list[DecodeStep]) -> None:
    """All decode steps of a worker, until cancelled."""
    async with open_channel(GrpcTransport(), worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        async for samples in stub.WatchSteps(worker_pb2.WatchStepsRequest()):
            second = int(time.monotonic())
            steps += [DecodeStep(second, step.duration_ms) for step in samples.steps if not step.prefill_tokens]


def step_variance(instances: Sequence[Sequence[DecodeStep]]) -> float:
    """Over the instances, of the median step of a second; mean over the seconds in which each has ten steps."""
    by_second: dict[int, list[list[float]]] = {}
    for number, steps in enumerate(instances):
        for step in steps:
            by_second.setdefault(step.second, [[] for _ in instances])[number].append(step.duration_ms)
    seconds = [each for each in by_second.values() if min(map(len, each)) >= LEAST_STEPS]
    return mean(float(np.var([statistics.median(durations_ms) for durations_ms in each])) for each in seconds)


async def orders(scheduler: Any) -> tuple[int, int]:
    """Migrations by the rescheduler so far: moved, stayed."""
    status = await scheduler.GetRescheduler(scheduler_pb2.GetReschedulerRequest(), timeout=30)
    return status.moved_total, status.stayed_total


def mean(values: Any) -> float:
    """Arithmetic mean; 0 for no values."""
    listed = list(values)
    return statistics.fmean(listed) if listed else 0.0


@dataclass(frozen=True, slots=True)
class RunningMesh:
    """Addresses and stubs of the mesh that is measured."""

    name: str
    url: str
    scheduler: Any
    """Its stub."""
    workers: Sequence[Member]


@asynccontextmanager
async def running_mesh(engine: str, setup: Setup, policy: str, *, learns: bool) -> AsyncIterator[RunningMesh]:
    """A mesh of its own, ended afterwards."""
    name, port = f"rescheduling-{os.getpid()}", free_ports()
    command = [sys.executable, "-m", "services.cli.main", "up", "--insecure", "--mesh", name, "--port", str(port)]
    command += ["--engine", engine, "--workers", str(setup.workers), "--model", MODEL, "--policy", policy]
    command += ["--ready-timeout-s", f"{START_S:g}"]
    command += [word for option in setup.engine_args for word in ("--engine-arg", option)]
    command += ["--learn-lengths"] if learns else []
    with tempfile.TemporaryDirectory() as folder:
        output_path = Path(folder) / "up.log"
        with output_path.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, env={**os.environ, PARENT_VARIABLE: str(os.getpid())}
            )
        try:
            await until_serving(process, output_path.read_text)
            running = read_run_file(name)
            if running is None:
                raise RuntimeError(output_path.read_text())
            async with members_of(running.store_url) as (scheduler, workers):
                yield RunningMesh(name, running.http_url, scheduler, workers)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                await process.wait()
            shutil.rmtree(run_dir() / name, ignore_errors=True)


async def profile(name: str, setup: Setup) -> None:
    """Measure what steps cost on one of the idle instances, up to the lengths of the workload, and tell the mesh."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "services.cli.main", "profile", "--mesh", name, "--model", MODEL]
        command += ["--shortest", "256", "--longest", str(setup.longest_tokens), "--largest-batch", "16"]
        done = await asyncio.create_subprocess_exec(
            *command, "--out", str(Path(folder) / "profile.json"), stdout=sys.stderr, stderr=sys.stderr
        )
        if await done.wait():
            raise RuntimeError("penstock profile failed")


async def until_serving(process: asyncio.subprocess.Process, printed: Callable[[], str]) -> None:
    """Raises RuntimeError with what it printed if it ends before."""
    async with asyncio.timeout(START_S):
        while "serving at" not in printed():
            if process.returncode is not None:
                raise RuntimeError(printed())
            await asyncio.sleep(0.1)


@asynccontextmanager
async def members_of(store_url: str) -> AsyncIterator[tuple[Any, Sequence[Member]]]:
    """A stub of the mesh's only scheduler, and the workers."""
    store = open_store(store_url, system_runtime())
    directory = Directory(store)
    await directory.start()
    try:
        (scheduler,) = directory.members("scheduler")
        async with open_channel(GrpcTransport(), scheduler.address) as channel:
            yield scheduler_pb2_grpc.SchedulerStub(channel), directory.members("worker")  # type: ignore[no-untyped-call]
    finally:
        await directory.stop()
        await store.close()


if __name__ == "__main__":
    main()
