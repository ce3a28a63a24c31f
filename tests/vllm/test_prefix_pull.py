"""Cached prefixes that one vLLM engine pulls from another: its greedy output must not tell. The protocol's part is
played here."""

import asyncio
from dataclasses import replace
from itertools import count
from time import monotonic

import psutil
import pytest

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.kv.cores import at_core
from mesh.errors import KvTransferRefused, PenstockError, RequestRefused
from penstock.testing.engine import GREEDY, EngineDriver
from tests.kv.peer import TOKEN
from tests.vllm.moving import BLOCK_TOKENS, SETTINGS, Side, all_free, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

DEADLINE_S = 30.0
SHORT = replace(GREEDY, max_tokens=24)
_ids = count()


def naming(tokens: tuple[int, ...], pull_id: str) -> EngineRequest:
    """What names a prefix to an engine."""
    return EngineRequest(pull_id, tokens, SamplingParams(max_tokens=1))


async def pull(source: Side, target: Side, tokens: tuple[int, ...], *, wait_s: float = 0.0) -> int:
    """Blocks that were copied."""
    pull_id, blocks = f"pull-{next(_ids)}", (len(tokens) - 1) // BLOCK_TOKENS
    name = naming(tokens, pull_id)
    try:
        held = await source.engine.prefixes.hold(pull_id, name, blocks, wait_s, TOKEN)
        return await target.engine.prefixes.fetch(
            pull_id, name, *at_core(source.engine.kv_address, held, TOKEN), DEADLINE_S
        )
    finally:
        source.engine.prefixes.let_go(pull_id)


@pytest.mark.parametrize("tokens", [100, 1000, 3000])
async def test_a_pulled_prefix_is_hit_and_answers_are_the_same(sides: tuple[Side, Side], tokens: int) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    shared = prompt(tokens)
    computed = await source.driver.answer(shared, SHORT)
    blocks = (tokens - 1) // BLOCK_TOKENS
    assert await pull(source, target, shared) == blocks
    pulled = await target.driver.answer(shared, SHORT)
    assert pulled.cached_tokens == blocks * BLOCK_TOKENS
    assert pulled.token_ids == computed.token_ids
    assert await pull(source, target, shared) <= 1, "it is here already"
    await all_free(sides, free)


async def test_another_end_of_the_prompt_is_computed_on_top_of_it(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    shared = prompt(640)
    await source.driver.answer((*shared, *prompt(50)), SHORT)
    mine = (*shared, *prompt(90))
    pulled = await pull(source, target, (*shared, mine[640]))
    assert pulled == 640 // BLOCK_TOKENS
    answer = await target.driver.answer(mine, SHORT)
    assert answer.cached_tokens == 640
    assert answer.token_ids == (await source.driver.answer(mine, SHORT)).token_ids
    await all_free(sides, free)


async def test_both_serve_others_meanwhile_and_step_on(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    shared = prompt(2000)
    expected = await source.driver.answer(shared, SHORT)
    load = [side.driver.submit(prompt(60), replace(GREEDY, max_tokens=200)) for side in sides for _ in range(3)]
    for answer in load:
        await (source if answer in load[:3] else target).driver.start_of(answer)
    assert await pull(source, target, shared) == 1999 // BLOCK_TOKENS
    assert (await target.driver.answer(shared, SHORT)).token_ids == expected.token_ids
    for answer in load:
        await (source if answer in load[:3] else target).driver.end_of(answer)
    await all_free(sides, free)


async def test_nothing_is_computed_for_a_hold_and_what_is_not_cached_is_not_held(sides: tuple[Side, Side]) -> None:
    source, _ = sides
    free = [await side.free_blocks() for side in sides]
    shared = prompt(500)
    before = source.engine.load().prefilled_tokens_total
    assert await source.engine.prefixes.hold("nothing", naming(shared, "nothing"), 15, 0.0, TOKEN) == ()
    source.engine.prefixes.let_go("nothing")
    await source.driver.answer(shared[:320], SHORT)
    held = await source.engine.prefixes.hold("part", naming(shared, "part"), 15, 0.0, TOKEN)
    assert len(held) in (9, 10), "the last block of a prompt may be recomputed"
    assert source.engine.load().prefilled_tokens_total - before == 320
    source.engine.prefixes.let_go("part")
    await all_free(sides, free)


async def test_what_is_held_is_not_evicted_and_what_is_evicted_is_not_held(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    shared = prompt(1000)
    expected = await source.driver.answer(shared, SHORT)
    other = prompt(1000)
    await source.driver.answer(other, SHORT)
    name = naming(shared, "kept")
    held = await source.engine.prefixes.hold("kept", name, 31, 0.0, TOKEN)
    assert len(held) == 31
    for _ in range(free[0] * BLOCK_TOKENS // 3000 + 1):  # until all else has been evicted
        await source.driver.answer(prompt(3000), replace(GREEDY, max_tokens=1))
    assert await source.engine.prefixes.hold("late", naming(other, "late"), 31, 0.0, TOKEN) == ()
    source.engine.prefixes.let_go("late")
    assert (
        await target.engine.prefixes.fetch("kept", name, f"{TOKEN}@{source.engine.kv_address}", held, DEADLINE_S) == 31
    )
    source.engine.prefixes.let_go("kept")
    assert (await target.driver.answer(shared, SHORT)).token_ids == expected.token_ids
    await all_free(sides, free)


async def test_blocks_that_are_being_computed_are_waited_for(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    shared = prompt(2000)
    answer = source.driver.submit(shared, SHORT)
    assert await pull(source, target, shared, wait_s=60.0) == 1999 // BLOCK_TOKENS
    pulled = await target.driver.answer(shared, SHORT)
    await source.driver.end_of(answer)
    assert pulled.token_ids == answer.token_ids
    await all_free(sides, free)


async def test_waiting_has_an_end(sides: tuple[Side, Side]) -> None:
    source, _ = sides
    free = [await side.free_blocks() for side in sides]
    assert await source.engine.prefixes.hold("vain", naming(prompt(500), "vain"), 15, 0.2, TOKEN) == ()
    source.engine.prefixes.let_go("vain")
    await all_free(sides, free)


async def test_another_salt_is_another_prefix(sides: tuple[Side, Side]) -> None:
    source, _ = sides
    shared = prompt(500)
    await source.driver.answer(shared, SHORT)
    name = replace(naming(shared, "salted"), cache_salt="tenant")
    assert await source.engine.prefixes.hold("salted", name, 15, 0.0, TOKEN) == ()
    source.engine.prefixes.let_go("salted")


async def test_a_cancelled_hold_or_fetch_leaves_nothing(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    shared = prompt(3000)
    await source.driver.answer(shared, SHORT)
    for delay_s in (0.0, 0.002, 0.01, 0.05):
        pull_id = f"cancelled-{next(_ids)}"
        name = naming(shared, pull_id)
        holding = asyncio.create_task(source.engine.prefixes.hold(pull_id, name, 93, 5.0, TOKEN))
        await asyncio.sleep(delay_s)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        source.engine.prefixes.let_go(pull_id)
        await all_free(sides, free)
        pull_id = f"cancelled-{next(_ids)}"
        name = naming(shared, pull_id)
        held = await source.engine.prefixes.hold(pull_id, name, 93, 0.0, TOKEN)
        fetching = asyncio.create_task(
            target.engine.prefixes.fetch(pull_id, name, f"{TOKEN}@{source.engine.kv_address}", held, DEADLINE_S)
        )
        await asyncio.sleep(delay_s)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        source.engine.prefixes.let_go(pull_id)
        await all_free(sides, free)


async def test_what_was_let_go_cannot_be_fetched(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    shared = prompt(1000)
    await source.driver.answer(shared, SHORT)
    name = naming(shared, "gone")
    held = await source.engine.prefixes.hold("gone", name, 31, 0.0, TOKEN)
    source.engine.prefixes.let_go("gone")
    await all_free(sides, free)
    with pytest.raises(KvTransferRefused, match=r"nothing is exported|no token of a transfer"):
        await target.engine.prefixes.fetch("gone", name, f"{TOKEN}@{source.engine.kv_address}", held, DEADLINE_S)
    assert (await target.driver.answer(shared, SHORT)).cached_tokens == 0
    await all_free(sides, free)


async def test_a_prefix_that_there_is_no_room_for_is_refused(sides: tuple[Side, Side]) -> None:
    _, target = sides
    free = await target.free_blocks()
    with pytest.raises(RequestRefused, match="are free"):
        await target.engine.prefixes.fetch(
            "large", naming(prompt(64), "large"), "127.0.0.1:1", tuple(range(free + 1)), DEADLINE_S
        )


async def test_a_pulled_prompt_begins_sooner_than_a_computed_one(sides: tuple[Side, Side]) -> None:
    """Prints the measurement; `docs/prefix_pull.md` has it."""
    source, target = sides
    shared, other = prompt(3000), prompt(3000)
    await source.driver.answer(shared, replace(GREEDY, max_tokens=1))
    began_s = monotonic()
    await target.driver.answer(other, replace(GREEDY, max_tokens=1))
    computed_ms = 1000 * (monotonic() - began_s)
    began_s = monotonic()
    copied = await pull(source, target, shared)
    answer = await target.driver.answer(shared, replace(GREEDY, max_tokens=1))
    pulled_ms = 1000 * (monotonic() - began_s)
    assert (copied, answer.cached_tokens) == (93, 93 * BLOCK_TOKENS)
    print(f"\n3000 tokens: computed {computed_ms:.0f} ms, pulled {pulled_ms:.0f} ms, {computed_ms / pulled_ms:.1f} x")


async def test_a_source_that_is_killed_costs_the_pull_only(sides: tuple[Side, Side]) -> None:
    _, target = sides
    dying = VllmEngine(SETTINGS)
    source = Side(dying, EngineDriver(dying, await dying.start(), 120.0))
    try:
        shared = prompt(3000)
        expected = await source.driver.answer(shared, SHORT)
        free = await target.free_blocks()
        name = naming(shared, "orphaned")
        held = await source.engine.prefixes.hold("orphaned", name, 93, 0.0, TOKEN)
        fetching = asyncio.create_task(
            target.engine.prefixes.fetch("orphaned", name, f"{TOKEN}@{source.engine.kv_address}", held, 5.0)
        )
        await asyncio.sleep(0.01)
        psutil.Process(dying._core._processes[0].pid).kill()  # type: ignore[union-attr]
        outcome = (await asyncio.gather(fetching, return_exceptions=True))[0]
        assert outcome == 93 or isinstance(outcome, PenstockError)
        answer = await target.driver.answer(shared, SHORT)
        assert answer.token_ids == expected.token_ids
        async with asyncio.timeout(10.0):
            while await target.free_blocks() != free:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await asyncio.gather(dying.stop(), return_exceptions=True)
        for reader in source.driver._readers:
            reader.cancel()
