"""CPU of the scheduler process for each placement that a frontend asks for over PlaceStream.

    python -m benchmarks.place_stream [--seconds 5] [--json OUT]

A process runs the scheduler's role with a filled table (2048-token prompts, the whole chain of 128 blocks
held); this one plays the frontend. `paced` asks 200 times a second, evenly; `burst` keeps 32 questions under way.
Each placement takes along that an earlier request has ended. The CPU is the serving process's, user and
system, divided by the placements.
"""

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.placement import MODEL, PROMPT_BLOCKS, Cluster
from benchmarks.process_cpu import process_cpu_s
from controlplane.scheduler.role import SchedulerRole
from controlplane.scheduler.settings import SchedulerSettings
from mesh.membership import Directory
from mesh.role import RoleContext
from mesh.rpc.client import open_channel
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemClock, system_runtime
from mesh.store import open_store
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc

UNDER_WAY = 32
PACE_PER_S = 200


def serve(pipe: multiprocessing.connection.Connection, instances: int, blocks: int, seed: int) -> None:
    """The serving process: sends its address, ends when it is told anything."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(pipe, instances, blocks, seed))


async def _serve(pipe: multiprocessing.connection.Connection, instances: int, blocks: int, seed: int) -> None:
    store = open_store("embedded:", system_runtime())
    directory, server, registry = Directory(store), RpcServer(GrpcTransport()), CollectorRegistry()
    await directory.start()
    role = SchedulerRole(SchedulerSettings())
    await role.start(
        RoleContext(
            "scheduler", "scheduler-0", "1", server.address, store, directory, server, registry, system_runtime()
        )
    )
    assert role.placements is not None, "it has started"
    role.placements.feed.table = Cluster(instances, blocks, seed).table
    role.placements.feed.heard_s = (
        SystemClock().now_s() + 1e9
    )  # or no monitor would be a reason to place by another policy
    role.placements.tick()
    pipe.send(await server.start())
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    await role.stop()
    await server.stop(0)
    await directory.stop()
    await store.close()


async def ask(address: str, chains: list[list[int]], seconds: float, pace_per_s: float | None) -> dict[str, float]:
    """Placements and the milliseconds that each took, as the frontend sees it."""
    asked_s: dict[str, float] = {}
    latencies_ms: list[float] = []
    ended: list[scheduler_pb2.RequestEnded] = []
    free = asyncio.Semaphore(UNDER_WAY)
    async with open_channel(GrpcTransport(), address) as channel:
        call: Any = scheduler_pb2_grpc.SchedulerStub(channel).PlaceStream()  # type: ignore[no-untyped-call]
        # gRPC takes one write at a time.
        writing = asyncio.Lock()

        async def write(**message: Any) -> None:
            async with writing:
                await call.write(scheduler_pb2.SchedulerMessage(**message))

        async def read() -> None:
            async for answer in call:
                assert answer.outcome == scheduler_pb2.PLACE_OUTCOME_PLACED, answer
                latencies_ms.append(1000 * (time.perf_counter() - asked_s.pop(answer.request_id)))
                ended.append(scheduler_pb2.RequestEnded(request_id=answer.request_id, ok=True))
                free.release()

        reading = asyncio.create_task(read())
        start_s = time.perf_counter()
        number = 0
        while time.perf_counter() - start_s < seconds:
            await free.acquire()
            request = scheduler_pb2.PlaceRequest(
                request_id=f"r{number}",
                model=MODEL,
                prompt_tokens=2048,
                block_hashes=chains[number % len(chains)],
            )
            asked_s[request.request_id] = time.perf_counter()
            await write(place=request, ended=ended)
            ended.clear()
            number += 1
            if pace_per_s is not None:
                await asyncio.sleep(max(0.0, start_s + number / pace_per_s - time.perf_counter()))
        for _ in range(UNDER_WAY):
            await free.acquire()
        await call.done_writing()
        await reading
    return {
        "placements": len(latencies_ms),
        "per_s": len(latencies_ms) / (time.perf_counter() - start_s),
        "median_ms": float(np.median(latencies_ms)),
        "p99_ms": float(np.percentile(latencies_ms, 99)),
    }


def measure(instances: int, blocks: int, seconds: float, seed: int) -> dict[str, Any]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(there, instances, blocks, seed), daemon=True
    )
    process.start()
    there.close()  # so that the end of the process is the end of the pipe
    assert process.pid is not None, "it was started"
    address = here.recv()
    cluster = Cluster(instances, blocks, seed)
    chains = [cluster.prompt("hit") for _ in range(2000)]
    result: dict[str, Any] = {"benchmark": "place_stream", "instances": instances, "blocks_indexed": blocks}
    assert all(len(chain) == PROMPT_BLOCKS for chain in chains)
    for name, pace_per_s in (("paced", PACE_PER_S), ("burst", None)):
        before_s = process_cpu_s(process.pid)
        answers = asyncio.run(ask(address, chains, seconds, pace_per_s))
        cpu_s = process_cpu_s(process.pid) - before_s
        result[name] = {**answers, "cpu_us_per_placement": 1e6 * cpu_s / answers["placements"]}
    here.send("end")
    process.join(timeout=10)
    return result


@click.command(help=__doc__.split("\n")[0] if __doc__ else None)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where the result goes as JSON.")
@click.option("--instances", default=256, show_default=True)
@click.option("--blocks", default=200_000, show_default=True)
@click.option("--seconds", default=5.0, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(json_path: Path | None, instances: int, blocks: int, seconds: float, seed: int) -> None:
    result = measure(instances, blocks, seconds, seed)
    print(json.dumps(result, indent=2))
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
