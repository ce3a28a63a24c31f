"""Copies on a GPU keep their order with the engine's work, whichever stream is ahead."""

import asyncio
import random

import numpy as np
import pytest

from engine_worker.kv.device_memory import DeviceMemory
from engine_worker.kv.plan import RegionBlocks
from engine_worker.kv.serving import ServedPull
from tests.unit.engine_worker.kv.fake_gpu import FakeGpu
from tests.unit.engine_worker.kv.test_transfer import BLOCK_BYTES, BLOCKS, Transfer

pytestmark = pytest.mark.live

SCATTERED = ([1, 3, 5, 7, 8, 9, 10, 15, 20, 21], [2, 4, 6, 8, 10, 11, 12, 13, 0, 23])


def device_memory(gpu: FakeGpu, seed: int, *, sends: bool) -> DeviceMemory:
    regions = [np.random.default_rng([seed, n]).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8) for n in range(2)]
    return DeviceMemory(regions, gpu, sends_device_memory=sends, model="m", dtype="uint8", block_tokens=4)


def overwrite(memory: DeviceMemory, gpu: FakeGpu, content: int) -> None:
    """A step of the engine that is still to be done."""
    for region in memory._regions:
        gpu.engine.work.append(lambda region=region: region.fill(content))


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("seed", range(20))
async def test_blocks_arrive_as_the_engines_last_step_left_them(seed: int, sends: bool) -> None:
    chance, gpus = random.Random(seed), (FakeGpu(), FakeGpu())
    source, target = (device_memory(gpu, number, sends=sends) for number, gpu in enumerate(gpus))
    # The source's blocks are computed by a step under way; a step under way reuses what the target's were before.
    overwrite(source, gpus[0], 77)
    overwrite(target, gpus[1], 13)
    for memory in (source, target):
        memory.mark_engine()
    transfer = Transfer(*SCATTERED, source=source, target=target)  # type: ignore[arg-type]
    run = asyncio.create_task(transfer.run())
    while not run.done():
        chance.choice(gpus).step(chance)
        await asyncio.sleep(0)
    run.result()
    await asyncio.gather(*transfer.tasks)
    assert all((region[SCATTERED[1]] == 77).all() for region in target._regions)
    # Each block of the target that was not asked for is as its engine left it.
    others = sorted(set(range(BLOCKS)) - set(SCATTERED[1]))
    assert all((region[others] == 13).all() for region in target._regions)
    assert sends == (gpus[0].pinned_bytes == 0)


async def test_nothing_is_sent_before_the_engine_is_done_and_nothing_is_waited_for_in_a_call() -> None:
    gpu = FakeGpu()
    source = device_memory(gpu, 1, sends=True)
    overwrite(source, gpu, 77)
    source.mark_engine()
    transfer = Transfer([1], [1], source=source)  # type: ignore[arg-type]
    run = asyncio.create_task(transfer.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not run.done()
    assert isinstance(transfer.serving, ServedPull)
    assert transfer.serving._sent == 0
    for _ in range(4):
        gpu.engine.step()
        gpu.copies.step()
    while not run.done():
        gpu.copies.step()
        await asyncio.sleep(0)
    assert (transfer.target._regions[0][1] == 77).all()


async def test_a_copy_that_ends_soon_is_noticed_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest pause of an event loop is a millisecond, in which a GPU copies a hundred messages."""
    gpu, pauses_s, turn = FakeGpu(), list[float](), asyncio.sleep
    memory = device_memory(gpu, 1, sends=True)

    async def sleep(pause_s: float) -> None:
        pauses_s.append(pause_s)
        if len(pauses_s) == 5:
            gpu.copies.step()
        await turn(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await memory.gather([RegionBlocks(0, np.array([1, 2]))], memory.staging(2 * BLOCK_BYTES))
    assert pauses_s == [0] * 5


async def test_scattered_blocks_of_a_region_are_one_copy() -> None:
    gpu = FakeGpu()
    memory = device_memory(gpu, 1, sends=True)
    scattered = [RegionBlocks(region, np.array([1, 2, 9])) for region in (0, 1)]
    buffer = memory.staging(6 * BLOCK_BYTES)
    gathering = asyncio.create_task(memory.gather(scattered, buffer))
    await asyncio.sleep(0)
    assert gpu.kernels == 2
    assert not gathering.done()
    gpu.copies.step()
    gpu.copies.step()
    await gathering
    assert (buffer.reshape(2, 3, -1)[1] == memory._regions[1][[1, 2, 9]]).all()


def test_without_a_cuda_transport_no_block_is_sent_in_place() -> None:
    assert device_memory(FakeGpu(), 1, sends=False).view(0, 1, 2) is None
    assert device_memory(FakeGpu(), 1, sends=True).view(0, 1, 2) is not None
