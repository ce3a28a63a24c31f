"""KV blocks on a real GPU: the same bytes arrive, in order with the engine's own work, whoever is ahead."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.device_memory import DeviceMemory
from engine_worker.kv.plan import RegionBlocks
from engine_worker.kv.settings import KvTransferSettings
from mesh.runtime import SystemClock, SystemEntropy

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU"),
]

BLOCKS = 64
BLOCK_BYTES = 16 * 1024
REGIONS = 3
SCATTERED = [3, 4, 5, 9, 40, 41, 60, 1]
SLEEP_CYCLES = 1_000_000_000
"""Of the GPU's clock, half a second or so: a step of the engine that is still under way when a copy begins."""
TOKEN = "0" * 32


class Agent:
    """The thread of a transfer agent, whose GPU and stream are its own."""

    def __init__(self) -> None:
        import torch

        from engine_worker.engines.vllm.connector.cuda import CudaAccelerator

        self.accelerator = CudaAccelerator(torch.device("cuda", 0))
        self._thread = ThreadPoolExecutor(1)
        self.call(self.accelerator.use_in_this_thread)

    def call(self, work: Callable[[], Any]) -> Any:
        return self._thread.submit(work).result(60)

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """On an event loop of this thread."""

        async def awaited() -> Any:
            return await work()

        return self.call(lambda: asyncio.run(awaited()))

    def memory(self, regions: Sequence[Any], *, sends: bool) -> DeviceMemory:
        return DeviceMemory(
            regions, self.accelerator, sends_device_memory=sends, model="m", dtype="uint8", block_tokens=16
        )


@pytest.fixture(scope="module")
def agent() -> Agent:
    return Agent()


def regions(seed: int) -> list[Any]:
    """Matrices of blocks; those of the last one have gaps between them, as vLLM's keys have where values follow."""
    import torch

    torch.manual_seed(seed)
    made = [torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda") for _ in range(REGIONS - 1)]
    gaps = torch.randint(0, 256, (BLOCKS, 2, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    return [*made, gaps[:, 0]]


def everywhere(ids: Sequence[int]) -> list[RegionBlocks]:
    """Blocks in all regions."""
    return [RegionBlocks(region, np.array(ids)) for region in range(REGIONS)]


def busy_engine() -> Any:
    """Work that the engine's stream has before it. Its event."""
    import torch

    torch.cuda._sleep(SLEEP_CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


def host(buffer: Any) -> np.ndarray:
    """A copy of it, once all copies are done."""
    return np.array(buffer if isinstance(buffer, np.ndarray) else buffer.cpu().numpy())


@pytest.mark.parametrize("sends", [True, False])
def test_blocks_are_gathered_and_put_in_their_places(agent: Agent, sends: bool) -> None:
    import torch

    source, target = regions(1), regions(2)
    untouched = [region.cpu().numpy().copy() for region in target]
    sending, receiving = agent.memory(source, sends=sends), agent.memory(target, sends=sends)
    torch.cuda.synchronize()
    places = [7, 6, 5, 30, 31, 32, 0, 63]

    async def copied() -> Any:
        buffer = sending.staging(REGIONS * len(SCATTERED) * BLOCK_BYTES)
        await sending.gather(everywhere(SCATTERED), buffer)
        await receiving.scatter(everywhere(places), buffer)
        return buffer

    buffer = agent.run(copied)
    expected = np.concatenate([region[SCATTERED].cpu().numpy().reshape(-1) for region in source])
    assert isinstance(buffer, np.ndarray) is not sends
    assert (host(buffer) == expected).all()
    for before, there, here in zip(source, untouched, target, strict=True):
        there[places] = before[SCATTERED].cpu().numpy()
        assert (here.cpu().numpy() == there).all(), "and no other block was touched"


def test_blocks_of_odd_lengths_are_copied_too(agent: Agent) -> None:
    """Which do not lie in words of eight bytes."""
    import torch

    source, target = (torch.randint(0, 256, (BLOCKS, 1001), dtype=torch.uint8, device="cuda") for _ in range(2))
    sending, receiving = agent.memory([source], sends=True), agent.memory([target], sends=True)
    torch.cuda.synchronize()

    async def copied() -> None:
        buffer = sending.staging(3 * 1001)
        await sending.gather([RegionBlocks(0, np.array([1, 5, 6]))], buffer)
        await receiving.scatter([RegionBlocks(0, np.array([9, 0, 63]))], buffer)

    agent.run(copied)
    assert (target[[9, 0, 63]] == source[[1, 5, 6]]).all()


@pytest.mark.parametrize("sends", [True, False])
def test_blocks_are_read_once_the_step_that_computes_them_is_done(agent: Agent, sends: bool) -> None:
    import torch

    source = regions(3)
    memory = agent.memory(source, sends=sends)
    source[0].fill_(0)  # what is loaded once is now
    torch.cuda.synchronize()
    step = busy_engine()
    for region in source:
        region.fill_(77)
    memory.mark_engine()
    assert not step.query(), "the step is under way"

    async def read() -> Any:
        await memory.ready()
        buffer = memory.staging(REGIONS * len(SCATTERED) * BLOCK_BYTES)
        await memory.gather(everywhere(SCATTERED), buffer)
        return buffer

    assert (host(agent.run(read)) == 77).all()


@pytest.mark.parametrize("sends", [True, False])
def test_no_copy_waits_for_the_engine(agent: Agent, sends: bool) -> None:
    import torch

    memory = agent.memory(regions(4), sends=sends)
    buffer = agent.call(lambda: memory.staging(REGIONS * len(SCATTERED) * BLOCK_BYTES))
    torch.cuda.synchronize()

    async def there_and_back() -> None:
        await memory.gather(everywhere(SCATTERED), buffer)
        await memory.scatter(everywhere(SCATTERED), buffer)

    agent.run(there_and_back)  # what is compiled or allocated once is now
    step = busy_engine()
    agent.run(there_and_back)
    assert not step.query(), "the copies are done, and the step goes on"
    torch.cuda.synchronize()


def test_a_staging_buffer_is_no_memory_that_a_step_under_way_still_reads(agent: Agent) -> None:
    """The engine has let go of it, so its own stream may have it anew: what comes there waits for the step."""
    import torch

    memory = agent.memory(regions(5), sends=True)
    nbytes = REGIONS * len(SCATTERED) * BLOCK_BYTES
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for _ in range(20):
        read = torch.full((nbytes,), 5, dtype=torch.uint8, device="cuda")
        result = torch.empty_like(read)
        torch.cuda.synchronize()
        busy_engine()
        result.copy_(read)
        del read
        buffer = agent.call(lambda: memory.staging(nbytes))
        agent.run(partial(memory.gather, everywhere(SCATTERED), buffer))
        torch.cuda.synchronize()
        assert (result == 5).all()
        del buffer


def test_staged_blocks_are_filled_in_on_the_engines_stream(agent: Agent) -> None:
    import torch

    from engine_worker.engines.vllm.connector.memory import EngineMemory, RankShape

    caches = {f"layer.{n}": torch.zeros((BLOCKS, 2, 16, 64), dtype=torch.float16, device="cuda") for n in range(2)}
    memory = EngineMemory(
        caches,
        blocks=BLOCKS,
        staging_blocks=8,
        model="m",
        block_tokens=16,
        shape=RankShape(total_heads=2),
        sends_device_memory=True,
    )
    for number, staged in enumerate(memory._staged):
        staged.copy_(torch.arange(8, device="cuda", dtype=torch.uint8)[:, None] + 10 * number)
    busy_engine()
    memory.fill([memory.first_staging + 2, memory.first_staging + 7], [5, 60])
    torch.cuda.synchronize()
    for number, region in enumerate(memory._regions):
        assert (region[5] == 10 * number + 2).all()
        assert (region[60] == 10 * number + 7).all()
        assert not region[[each for each in range(BLOCKS) if each not in (5, 60)]].any()


@pytest.mark.parametrize("sends", [True, False])
def test_blocks_are_pulled_over_ucx(sends: bool) -> None:
    """Between two agents: out of one GPU memory and into the other, and by way of host memory."""
    pytest.importorskip("ucxx", reason="needs UCX")
    import torch

    from engine_worker.kv.ucx_environment import has_cuda_transport, load_ucx

    if sends and not has_cuda_transport(load_ucx("cuda")):
        pytest.skip("UCX has no CUDA transport here")
    source, target = regions(6), regions(7)
    torch.cuda.synchronize()
    places = [7, 6, 5, 30, 31, 32, 0, 63]
    both = Agent()  # both agents are in one thread, as each would be in one of its own

    async def pulled() -> int:
        settings = KvTransferSettings(device="cuda", checksums=True)
        made = [
            KvTransferAgent(both.memory(each, sends=sends), settings, SystemClock(), SystemEntropy(), agent_id=name)
            for name, each in (("source", source), ("target", target))
        ]
        port, _ = [await each.start() for each in made]
        try:
            made[0].export("m1", SCATTERED, TOKEN)
            stats = await made[1].pull(PeerAddress("127.0.0.1", port, (), TOKEN), "m1", SCATTERED, places, 30.0)
            return stats.blocks
        finally:
            for each in made:
                await each.stop()

    assert both.run(pulled) == len(SCATTERED)
    for before, here in zip(source, target, strict=True):
        assert (here[places] == before[SCATTERED]).all()
