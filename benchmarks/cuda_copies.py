"""How fast KV blocks leave and enter a GPU's memory, and what that costs the engine's steps beside it.

    python -m benchmarks.cuda_copies [--blocks 256] [--rounds 5] [--json OUT]

The blocks are those of a model such as Llama 3 8B: 32 layers, 64 KiB for 16 tokens in each. As many as `--blocks` lie
scattered, and are gathered into and scattered out of messages of 1 MiB, in the GPU's memory and by way of page-locked
host memory, in turn. The step is a chain of matrix products of some 10 ms on a stream of its own, timed by events alone
and while blocks are copied. Where UCX is installed, an agent pulls the blocks from another one of this process, too.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, Final

import numpy as np
import torch

from engine_worker.engines.vllm.connector.cuda import CudaAccelerator
from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.device_memory import DeviceMemory
from engine_worker.kv.plan import RegionBlocks
from engine_worker.kv.settings import GATHERED_BYTES, KvTransferSettings
from engine_worker.kv.ucx_environment import has_cuda_transport, load_ucx
from mesh.runtime import SystemClock, SystemEntropy

LAYERS: Final = 32
BLOCK_BYTES: Final = 64 * 1024
MESSAGE_BLOCKS: Final = 16
TOKEN: Final = "0" * 32
STEP_PRODUCTS: Final = 7
STEPS: Final = 60
WAYS: Final = {"device": True, "pinned host": False}


class Agent:
    """The thread of a transfer agent."""

    def __init__(self) -> None:
        self.accelerator = CudaAccelerator(torch.device("cuda", 0))
        self.thread = ThreadPoolExecutor(1)
        self.thread.submit(self.accelerator.use_in_this_thread).result()

    def memory(self, regions: Sequence[torch.Tensor], *, sends: bool) -> DeviceMemory:
        """Of blocks in these matrices."""
        return DeviceMemory(
            regions, self.accelerator, sends_device_memory=sends, model="m", dtype="uint8", block_tokens=16
        )

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """On an event loop of the thread."""

        async def awaited() -> Any:
            return await work()

        return self.thread.submit(lambda: asyncio.run(awaited())).result()


def regions(blocks: int) -> list[torch.Tensor]:
    """The KV memory of a model: a matrix of blocks for each layer."""
    shape = (blocks, BLOCK_BYTES)
    return [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]


def messages(chosen: Sequence[int]) -> list[list[RegionBlocks]]:
    """The blocks of each message."""
    return [
        [RegionBlocks(layer, np.array(chosen[first : first + MESSAGE_BLOCKS]))]
        for layer in range(LAYERS)
        for first in range(0, len(chosen), MESSAGE_BLOCKS)
    ]


def blocks_in(message: Sequence[RegionBlocks]) -> int:
    return sum(len(each.ids) for each in message)


async def copied(memory: DeviceMemory, parts: Sequence[list[RegionBlocks]], *, leaves: bool) -> float:
    """GB/s of all messages, one after another, out of the blocks or into them."""
    buffer = memory.staging(MESSAGE_BLOCKS * BLOCK_BYTES)
    began_s = time.perf_counter()
    for part in parts:
        content = buffer[: blocks_in(part) * BLOCK_BYTES]
        await (memory.gather(part, content) if leaves else memory.scatter(part, content))
    took_s = time.perf_counter() - began_s
    return sum(map(blocks_in, parts)) * BLOCK_BYTES / took_s / 1e9


def step_ms() -> list[float]:
    """Durations of steps on a stream of the engine's own."""
    stream, size = torch.cuda.Stream(), 8192
    with torch.cuda.stream(stream):
        left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        for mark in marks:
            mark.record()
            for _ in range(STEP_PRODUCTS):
                torch.mm(left, right)
    stream.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks[5:])]


def steps_beside_copies(agent: Agent, memory: DeviceMemory, parts: Sequence[list[RegionBlocks]]) -> list[float]:
    """The same, while blocks are gathered without a break."""
    is_over = Event()

    async def copy_on() -> None:
        while not is_over.is_set():
            await copied(memory, parts[:64], leaves=True)

    copying = agent.thread.submit(lambda: asyncio.run(copy_on()))
    try:
        return step_ms()
    finally:
        is_over.set()
        copying.result()


async def pulled(source: DeviceMemory, target: DeviceMemory, chosen: Sequence[int]) -> float:
    """GB/s of one pull, after one that opens connections."""
    settings, clock = KvTransferSettings(device="cuda", gathered_bytes=GATHERED_BYTES["cuda"]), SystemClock()
    agents = [
        KvTransferAgent(memory, settings, clock, SystemEntropy(), agent_id=name)
        for name, memory in (("source", source), ("target", target))
    ]
    port, _ = [await agent.start() for agent in agents]
    try:
        for number in range(2):
            agents[0].export(f"m{number}", list(chosen), TOKEN)
            began_s = time.perf_counter()
            await agents[1].pull(
                PeerAddress("127.0.0.1", port, (), TOKEN), f"m{number}", list(chosen), list(chosen), 60.0
            )
            took_s = time.perf_counter() - began_s
        return LAYERS * len(chosen) * BLOCK_BYTES / took_s / 1e9
    finally:
        for agent in agents:
            await agent.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = measured(options.blocks, options.rounds)
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def measured(blocks: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, in which the ways take turns."""
    agent, cache, other = Agent(), regions(4 * blocks), regions(4 * blocks)
    torch.cuda.synchronize()
    chosen = random.Random(1).sample(range(4 * blocks), blocks)
    parts = messages(chosen)
    rates: dict[str, list[float]] = {}
    step: dict[str, list[float]] = {}
    has_ucx = find_spec("ucxx") is not None
    takes_device = has_ucx and has_cuda_transport(load_ucx("cuda"))
    for _ in range(rounds):
        step.setdefault("alone", []).append(statistics.median(step_ms()))
        for way, sends in WAYS.items():
            memory = agent.memory(cache, sends=sends)
            for name, leaves in (("out", True), ("in", False)):
                rate = agent.run(partial(copied, memory, parts, leaves=leaves))
                rates.setdefault(f"{name}, {way}", []).append(rate)
            beside = steps_beside_copies(agent, memory, parts)
            step.setdefault(f"beside copies, {way}", []).append(statistics.median(beside))
            if has_ucx and (takes_device or not sends):
                target = agent.memory(other, sends=sends)
                rate = agent.run(partial(pulled, memory, target, chosen))
                rates.setdefault(f"pull over UCX, {way}", []).append(rate)
    return {
        "gpu": torch.cuda.get_device_name(),
        "bytes": LAYERS * blocks * BLOCK_BYTES,
        "gb_per_s": {name: statistics.median(each) for name, each in rates.items()},
        "step_ms_median": {name: statistics.median(each) for name, each in step.items()},
        "has_ucx_cuda": takes_device,
    }


if __name__ == "__main__":
    main()
