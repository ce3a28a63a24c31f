"""Instances whose model is spread over processes, or that have several engine cores: requests and prefixes move between
shapes, and the greedy output does not tell. One engine of each shape, for all tests here: each is slow to start, and
its processes spin."""

import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil
import pytest
import pytest_asyncio

from controlplane.model.request import EngineRequest
from engine_worker.engines.data_parallel import CoreEngine
from engine_worker.engines.vllm.data_parallel import DataParallelVllm, vllm_engine
from engine_worker.engines.vllm.settings import VllmSettings
from mesh.errors import EngineFailed, KvTransferRefused, PenstockError
from penstock.testing.engine import GREEDY, Answer, EngineDriver
from tests.vllm.moving import BLOCK_TOKENS, Migration, Side, all_free, begin, expected, prompt
from tests.vllm.test_prefix_pull import pull

pytestmark = [pytest.mark.vllm, pytest.mark.ranks, pytest.mark.asyncio(loop_scope="module")]

MODEL = Path(__file__).parents[2] / "demo" / "models" / "demo-small"
TIMEOUT_S = 200.0
FILLER = "filler"
SETTINGS = VllmSettings(
    model_path=str(MODEL),
    dtype="float32",
    block_size=BLOCK_TOKENS,
    max_model_len=2048,
    max_num_batched_tokens=256,
    structured_outputs=False,
    cpu_niceness=0,
)
SHAPES: Final = {  # the one of one process last: what it sets in the environment is not for the others
    # Room for two long requests that grow, and not for a third.
    "tensor": replace(SETTINGS, tensor_parallel_size=2, kv_cache_memory_bytes=5 << 20),
    "pipeline": replace(SETTINGS, pipeline_parallel_size=2, kv_cache_memory_bytes=32 << 20),
    "data": replace(SETTINGS, data_parallel_size=2, kv_cache_memory_bytes=32 << 20),
    "single": replace(SETTINGS, kv_cache_memory_bytes=32 << 20),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def instances() -> AsyncIterator[dict[str, Side]]:
    found = {}
    for name, settings in SHAPES.items():
        engine = vllm_engine(settings)
        found[name] = Side(engine, EngineDriver(engine, await engine.start(), TIMEOUT_S))
    yield found
    for side in found.values():
        with suppress(EngineFailed):  # of the one that lost a process
            await side.driver.close()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("tensor", "single"),
        ("single", "tensor"),
        ("pipeline", "single"),
        ("single", "pipeline"),
        ("tensor", "pipeline"),
        ("pipeline", "tensor"),
    ],
)
async def test_a_request_goes_on_in_another_shape(instances: dict[str, Side], source: str, target: str) -> None:
    sides = instances[source], instances[target]
    free = [await side.free_blocks() for side in sides]
    migration = await begin(*sides, 400, 500, after=10)
    await migration.offer()
    await sides[0].driver.until(lambda: len(migration.progress.block_ids) >= 400 // BLOCK_TOKENS)
    await migration.round()
    paused = await migration.pause()
    continued = await migration.hand_off(paused)
    await sides[1].driver.end_of(continued)
    assert continued.cached_tokens == paused.computed_tokens
    assert migration.answer.token_ids + continued.token_ids == await expected(sides[0], migration.request)
    await all_free(sides, free)


@pytest.mark.parametrize(("source", "target"), [("tensor", "pipeline"), ("single", "tensor")])
async def test_a_prefix_is_pulled_into_another_shape(instances: dict[str, Side], source: str, target: str) -> None:
    sides = instances[source], instances[target]
    free = [await side.free_blocks() for side in sides]
    shared, short = prompt(700), replace(GREEDY, max_tokens=16)
    computed = await sides[0].driver.answer(shared, short)
    assert await pull(*sides, shared) == 699 // BLOCK_TOKENS
    pulled = await sides[1].driver.answer(shared, short)
    assert pulled.cached_tokens == 699 // BLOCK_TOKENS * BLOCK_TOKENS
    assert pulled.token_ids == computed.token_ids
    await all_free(sides, free)


@pytest.mark.parametrize("second_first", [True, False])
async def test_a_request_moves_out_of_the_second_core_and_into_it(
    instances: dict[str, Side], second_first: bool
) -> None:
    sides = instances["data"], instances["single"]
    source, target = sides if second_first else sides[::-1]
    free = [await side.free_blocks() for side in (source, target)]
    filler = await fill_the_first_core(sides[0])
    migration = await begin(source, target, 400, 150, after=10)
    await migration.offer()
    await source.driver.until(lambda: len(migration.progress.block_ids) >= 400 // BLOCK_TOKENS)
    await migration.round()
    paused = await migration.pause()
    assert {block_id >> 24 for block_id in paused.block_ids} == {int(second_first)}
    continued = await migration.hand_off(paused)
    assert [core.runs(migration.request.request_id) for core in cores_of(sides[0])] == [False, not second_first]
    await target.driver.end_of(continued)
    assert not filler.ended.is_set(), "the first core was busy meanwhile"
    assert continued.cached_tokens == paused.computed_tokens
    assert migration.answer.token_ids + continued.token_ids == await expected(sides[1], migration.request)
    sides[0].engine.abort(FILLER)
    await sides[0].driver.end_of(filler)
    await all_free((source, target), free)


async def test_a_prefix_is_pulled_from_the_core_that_has_it(instances: dict[str, Side]) -> None:
    source, target = instances["data"], instances["pipeline"]
    free = [await side.free_blocks() for side in (source, target)]
    shared, short = prompt(700), replace(GREEDY, max_tokens=16)
    filler = await fill_the_first_core(source)
    computed = await source.driver.answer(shared, short)
    assert [core.cached_tokens(EngineRequest("", shared, short)) > 0 for core in cores_of(source)] == [False, True]
    assert await pull(source, target, shared) == 699 // BLOCK_TOKENS
    pulled = await target.driver.answer(shared, short)
    assert pulled.cached_tokens == 699 // BLOCK_TOKENS * BLOCK_TOKENS
    assert pulled.token_ids == computed.token_ids
    source.engine.abort(FILLER)
    await source.driver.end_of(filler)
    await all_free((source, target), free)


async def fill_the_first_core(side: Side) -> Answer:
    """A request that is there longer than any test, so that the next one goes to the second core."""
    filler = side.driver.submit_request(EngineRequest(FILLER, prompt(300), replace(GREEDY, max_tokens=1700)))
    await side.driver.start_of(filler)
    return filler


def cores_of(side: Side) -> tuple[CoreEngine, ...]:
    assert isinstance(side.engine, DataParallelVllm)
    return side.engine.cores


async def test_a_preempted_request_is_exported_no_more_and_goes_on_where_it_is(instances: dict[str, Side]) -> None:
    sides = source, target = instances["tensor"], instances["single"]
    free = [await side.free_blocks() for side in sides]
    request = EngineRequest("preempted", prompt(900), replace(GREEDY, max_tokens=300), priority=5)
    migration = Migration(source, target, request, source.driver.submit_request(request))
    await source.driver.until(lambda: len(migration.answer.token_ids) >= 5)
    await migration.offer()
    await source.driver.until(lambda: len(migration.progress.block_ids) >= 900 // BLOCK_TOKENS)
    preemptions = source.engine.load().preemptions_total
    urgent = [source.driver.submit(prompt(1400), replace(GREEDY, max_tokens=250)) for _ in range(2)]
    await source.driver.until(lambda: source.engine.load().preemptions_total > preemptions)
    with pytest.raises(KvTransferRefused, match=r"nothing is exported|no token of a transfer"):
        await migration.round()
    target.engine.discard(migration.migration_id)
    source.engine.withdraw(request.request_id, migration.migration_id)
    for answer in (*urgent, migration.answer):
        await source.driver.end_of(answer)
    assert migration.answer.token_ids == await expected(source, request)
    await all_free(sides, free)


async def test_a_rank_that_hangs_or_dies_ends_the_pull_and_harms_no_other_instance(instances: dict[str, Side]) -> None:
    source, target = instances["tensor"], instances["single"]
    free = await target.free_blocks()
    migration = await begin(source, target, 400, 1000, after=5)
    await migration.offer()
    await source.driver.until(lambda: len(migration.progress.block_ids) >= 400 // BLOCK_TOKENS)
    (core,) = source.engine._core._processes  # type: ignore[union-attr]
    rank = [child for child in psutil.Process(core.pid).children() if "spawn_main" in " ".join(child.cmdline())][-1]
    context, long = prompt(100), replace(GREEDY, max_tokens=200)
    other = target.driver.submit(context, long)
    for fault in (signal.SIGSTOP, signal.SIGKILL):
        rank.send_signal(fault)
        with pytest.raises(PenstockError):
            await migration.round()
    await target.driver.end_of(other)
    target.engine.discard(migration.migration_id)
    assert other.token_ids == (await target.driver.answer(context, long)).token_ids
    await target.driver.until(lambda: target.engine.load().running_requests == 0)
    assert await target.free_blocks() == free
