"""What a move between two vLLM engines leaves of sampling, penalties, logprobs; short prompts; a request taken back."""

import asyncio
from dataclasses import replace

import pytest

from controlplane.model.request import FinishReason, SamplingParams
from penstock.testing.engine import GREEDY, Answer
from tests.in_time import still
from tests.vllm.moving import LONG, Migration, Side, all_free, begin, enough_of, expected

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


async def moved(
    sides: tuple[Side, Side], sampling: SamplingParams, *, tokens: int = 100, max_tokens: int = LONG, after: int = 15
) -> tuple[Migration, Answer]:
    """A request that went on elsewhere, with that part of its answer."""
    source, target = sides
    migration = await begin(source, target, tokens, max_tokens, after, sampling)
    await migration.offer()
    continued = await migration.hand_off(await migration.pause())
    await enough_of(target, migration.request, continued)
    still(bool(continued.token_ids), "it is not at its end when it is moved")
    return migration, continued


async def test_logprobs_are_those_of_an_undisturbed_run(sides: tuple[Side, Side]) -> None:
    migration, continued = await moved(sides, replace(GREEDY, logprobs=3))
    ours = migration.answer.logprobs + continued.logprobs
    sampling = replace(migration.request.sampling, max_tokens=len(ours))
    undisturbed = await sides[0].driver.answer(migration.request.prompt_token_ids, sampling)
    assert migration.answer.token_ids + continued.token_ids == undisturbed.token_ids
    assert len(ours) == len(undisturbed.logprobs) == len(undisturbed.token_ids)
    for here, there in zip(ours, undisturbed.logprobs, strict=True):
        assert here.chosen.token_id == there.chosen.token_id
        assert here.chosen.logprob == pytest.approx(there.chosen.logprob, abs=1e-3)
        assert len(here.top) == len(there.top)


async def test_a_seeded_request_draws_alike_wherever_it_goes_on(sides: tuple[Side, Side]) -> None:
    """Not as an undisturbed run would have: vLLM keeps the generator's state to itself."""
    source, _ = sides
    migration, continued = await moved(sides, replace(GREEDY, temperature=0.9, seed=7))
    emitted = migration.answer.token_ids
    sampling = replace(migration.request.sampling, max_tokens=len(emitted + continued.token_ids))
    recovered = await source.driver.answer(migration.request.prompt_token_ids, sampling, emitted)
    assert continued.token_ids == recovered.token_ids


async def test_a_seeded_request_whose_prompt_is_computed_in_chunks(sides: tuple[Side, Side]) -> None:
    source, _ = sides
    prompt = tuple(range(10, 600))  # more than two steps of 256 tokens
    sampling = replace(GREEDY, temperature=0.9, seed=7, max_tokens=20)
    first = await source.driver.answer(prompt, sampling)
    assert len(first.token_ids) == 20, "the engine lives, although its generator cannot be rewound"
    other = await source.driver.answer(prompt, replace(sampling, seed=8))
    assert first.token_ids != other.token_ids


async def test_penalties_go_on_counting_what_was_generated_before(sides: tuple[Side, Side]) -> None:
    migration, continued = await moved(sides, replace(GREEDY, frequency_penalty=0.8))
    said = migration.answer.token_ids + continued.token_ids
    assert said == await expected(sides[0], migration.request, len(said))


async def test_a_prompt_shorter_than_a_block(sides: tuple[Side, Side]) -> None:
    free = [await side.free_blocks() for side in sides]
    migration, continued = await moved(sides, GREEDY, tokens=5, after=3)
    said = migration.answer.token_ids + continued.token_ids
    assert said == await expected(sides[0], migration.request, len(said))
    assert continued.cached_tokens > 0, "its part of a block came along"
    await all_free(sides, free)


async def test_taken_back_while_it_stands_still(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, 200, LONG, after=10)
    await migration.offer()
    await migration.pause()
    source.engine.abort(migration.request.request_id)
    source.engine.resume(migration.request.request_id)
    source.engine.withdraw(migration.request.request_id, migration.migration_id)
    target.engine.discard(migration.migration_id)
    await source.driver.end_of(migration.answer)
    assert migration.answer.deltas[-1].finish_reason is FinishReason.ABORT
    await all_free(sides, free)


async def test_taken_back_while_it_is_being_paused(sides: tuple[Side, Side]) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, 200, LONG, after=10)
    await migration.offer()
    pausing = asyncio.create_task(source.engine.pause(migration.request.request_id))
    await asyncio.sleep(0)
    source.engine.abort(migration.request.request_id)
    paused = await pausing
    if paused is not None:
        source.engine.resume(migration.request.request_id)
    source.engine.withdraw(migration.request.request_id, migration.migration_id)
    target.engine.discard(migration.migration_id)
    await source.driver.end_of(migration.answer)
    assert migration.answer.deltas[-1].finish_reason is FinishReason.ABORT
    await all_free(sides, free)
