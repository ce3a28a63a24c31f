"""Requests that move between two vLLM engines: their greedy output must not tell."""

import asyncio
from dataclasses import replace

import psutil
import pytest

from controlplane.model.request import EngineRequest
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.kv.connection import PeerAddress
from mesh.errors import KvTransferRefused, RequestRefused, RpcError
from penstock.testing.engine import GREEDY, EngineDriver
from tests.in_time import still
from tests.kv.peer import TOKEN
from tests.vllm.moving import (
    BLOCK_TOKENS,
    LONG,
    SETTINGS,
    Migration,
    Side,
    all_free,
    begin,
    enough_of,
    expected,
    prompt,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("tokens", [100, 1000, 3000])
async def test_moved_in_mid_decode(sides: tuple[Side, Side], tokens: int) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, tokens, LONG, after=20)
    await migration.offer()
    await source.driver.until(lambda: len(migration.progress.block_ids) >= tokens // BLOCK_TOKENS)
    await migration.round()
    assert migration.copied >= tokens // BLOCK_TOKENS
    paused = await migration.pause()
    assert migration.answer.token_ids == paused.emitted_token_ids
    continued = await migration.hand_off(paused)
    await target.driver.end_of(continued)
    assert not migration.answer.ended.is_set()
    assert continued.deltas[0].offset == len(paused.emitted_token_ids)
    assert continued.cached_tokens == paused.computed_tokens
    assert migration.answer.token_ids + continued.token_ids == await expected(source, migration.request)
    await all_free(sides, free)


async def test_moved_under_load_into_a_warm_cache(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    load = [
        side.driver.submit(prompt(60 + number), replace(GREEDY, max_tokens=300))
        for side in sides
        for number in range(3)
    ]
    migration = await begin(source, target, 1500, LONG, after=10)
    await target.driver.answer(migration.request.prompt_token_ids[:500], replace(GREEDY, max_tokens=2))
    await migration.offer()
    emitted = len(migration.answer.token_ids)
    # Two rounds by carrier, with decoding in between.
    await source.driver.until(lambda: len(migration.progress.block_ids) >= 1500 // BLOCK_TOKENS)
    await migration.round()
    await source.driver.until(lambda: len(migration.answer.token_ids) >= emitted + 2 * BLOCK_TOKENS)
    await migration.round()
    said = await migration.said(continued := await migration.hand_off(await migration.pause()))
    assert continued.cached_tokens >= 1500
    for answer in load:
        await (source if answer in load[:3] else target).driver.end_of(answer)
    assert said == await expected(source, migration.request, len(said))
    await all_free(sides, free)


async def test_moved_while_the_prompt_is_computed(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, 3000, 60, after=0)
    await migration.offer()
    await source.driver.until(lambda: len(migration.progress.block_ids) >= 16)
    await migration.round()
    paused = await migration.pause()
    still(paused.emitted_token_ids == (), "its prompt is being computed")
    assert 0 < paused.computed_tokens < 3000
    continued = await migration.hand_off(paused)
    await target.driver.end_of(continued)
    assert continued.cached_tokens == paused.computed_tokens
    assert continued.token_ids == await expected(source, migration.request)
    await all_free(sides, free)


async def test_there_and_back(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, 700, LONG, after=20)
    await migration.offer()
    first = migration.answer
    second = await migration.hand_off(await migration.pause())
    await target.driver.until(lambda: len(second.token_ids) >= 50)
    moved = replace(migration.request, emitted_token_ids=first.token_ids)
    back = Migration(target, source, moved, second, emitted_before=first.token_ids)
    await back.offer()
    await target.driver.until(lambda: len(back.progress.block_ids) >= 700 // BLOCK_TOKENS)
    await back.round()
    third = await back.hand_off(await back.pause())
    said = first.token_ids + await back.said(third)
    assert third.cached_tokens >= 700
    assert said == await expected(source, migration.request, len(said))
    await all_free(sides, free)


@pytest.mark.parametrize("exported", [False, True])
async def test_paused_and_resumed(sides: tuple[Side, Side], exported: bool) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, 400, LONG, after=20)
    if exported:
        await migration.offer()
    paused = await migration.pause()
    assert migration.answer.token_ids == paused.emitted_token_ids
    assert not migration.answer.ended.is_set()
    source.engine.resume(migration.request.request_id)
    source.engine.withdraw(migration.request.request_id, migration.migration_id)
    target.engine.discard(migration.migration_id)
    await enough_of(source, migration.request, migration.answer)
    said = migration.answer.token_ids
    assert said == await expected(source, migration.request, len(said))
    await all_free(sides, free)


async def test_a_pause_taken_back_before_it_happened(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, 200, 100, after=10)
    pausing = asyncio.create_task(source.engine.pause(migration.request.request_id))
    await asyncio.sleep(0)
    source.engine.resume(migration.request.request_id)
    assert await pausing is None
    await source.driver.end_of(migration.answer)
    assert migration.answer.token_ids == await expected(source, migration.request)
    await all_free(sides, free)


async def test_the_end_overtakes_the_pause(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, 200, 30, after=10)
    await migration.offer()
    await source.driver.end_of(migration.answer)
    assert await source.engine.pause(migration.request.request_id) is None
    source.engine.withdraw(migration.request.request_id, migration.migration_id)
    target.engine.discard(migration.migration_id)
    await all_free(sides, free)


@pytest.mark.parametrize("blocks", [2, 20], ids=["staged", "carried"])
async def test_a_pull_from_nobody_fails_and_the_request_goes_on(sides: tuple[Side, Side], blocks: int) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    other = target.driver.submit(prompt(40), replace(GREEDY, max_tokens=100))
    migration = await begin(source, target, 32 * blocks, LONG, after=5)
    await migration.offer()
    await source.driver.until(lambda: len(migration.progress.block_ids) >= blocks)
    with pytest.raises(RpcError):
        await target.engine.pull(migration.migration_id, "127.0.0.1:9", 0, migration.progress.block_ids, (), 5.0)
    # Nor may it read what is not exported any more.
    source.engine.withdraw(migration.request.request_id, migration.migration_id)
    await source.free_blocks()  # an answer from the engine core: it has heard of the withdrawal, which is sent ahead
    with pytest.raises(RpcError):
        await migration.round()
    target.engine.discard(migration.migration_id)
    await target.driver.end_of(other)
    await enough_of(source, migration.request, migration.answer)
    said = migration.answer.token_ids
    assert said == await expected(target, migration.request, len(said))
    await all_free(sides, free)


async def test_an_abandoned_pull_leaves_nothing_behind(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, 2000, LONG, after=5)
    await migration.offer()
    await source.driver.until(lambda: len(migration.progress.block_ids) >= 60)
    pulling = asyncio.create_task(migration.round())
    await asyncio.sleep(0.005)
    pulling.cancel()
    await asyncio.gather(pulling, return_exceptions=True)
    target.engine.discard(migration.migration_id)
    source.engine.withdraw(migration.request.request_id, migration.migration_id)
    await enough_of(source, migration.request, migration.answer)
    said = migration.answer.token_ids
    assert said == await expected(target, migration.request, len(said))
    await all_free(sides, free)


async def test_a_peer_that_hangs_and_dies_ends_the_pull_and_nothing_else(sides: tuple[Side, Side]) -> None:
    _, target = sides
    free = await target.free_blocks()
    dying = VllmEngine(SETTINGS)
    source = Side(dying, EngineDriver(dying, await dying.start(), 60.0))
    core = psutil.Process(dying._core._processes[0].pid)  # type: ignore[union-attr]
    migration = await begin(source, target, 2000, 1000, after=5)
    await migration.offer()
    await source.driver.until(lambda: len(migration.progress.block_ids) >= 60)
    await migration.round()
    await source.driver.until(lambda: len(migration.progress.block_ids) > migration.copied + 5)
    core.suspend()
    pulling = asyncio.create_task(migration.round())
    await asyncio.wait([pulling], timeout=0.3)
    assert not pulling.done()
    core.kill()
    with pytest.raises(RpcError):
        await pulling
    target.engine.discard(migration.migration_id)
    answer = await target.driver.answer(prompt(100), GREEDY)
    assert len(answer.token_ids) == GREEDY.max_tokens
    await dying.stop()
    await asyncio.gather(*source.driver._readers, return_exceptions=True)
    async with asyncio.timeout(10.0):
        while await target.free_blocks() != free:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_more_than_fits_is_refused(sides: tuple[Side, Side]) -> None:
    _, target = sides
    for number in range(5):
        await target.engine.reserve(f"fits-{number}", EngineRequest(f"new-{number}", prompt(3000), GREEDY))
    with pytest.raises(RequestRefused, match="blocks"):
        await target.engine.reserve("too-much", EngineRequest("too-much", prompt(3000), GREEDY))
    for number in range(5):
        target.engine.discard(f"fits-{number}")
    with pytest.raises(RequestRefused):
        target.engine.export("unknown", "none", TOKEN, lambda progress: None)


async def test_the_agent_in_the_engine_core_is_asked_through_the_worker(sides: tuple[Side, Side]) -> None:
    agent = sides[0].engine.kv_agent()
    about = await agent.describe()
    assert sides[0].engine.kv_address.endswith(f":{about.port}")
    assert about.layout.block_tokens == BLOCK_TOKENS
    assert about.layout.block_bytes == sides[0].engine.kv_block_bytes > 0
    status = await agent.status()
    assert (status.pulling, status.serving, status.exported_blocks) == (0, 0, 0)
    with pytest.raises(KvTransferRefused, match="nothing is reserved under 'm1'"):
        await agent.pull_reserved(PeerAddress("127.0.0.1", 9), "m1", [1], [1], 5.0)
