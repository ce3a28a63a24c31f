"""Parameters that name tokens and prompts, as real engines keep them: from the first token, after a recovery, after a
live move. Those that shape the distribution are in `test_moved_sampling`."""

from dataclasses import replace

import pytest

from controlplane.model.prefix_hash import block_hashes, root_hash
from controlplane.model.request import EngineRequest, FinishReason
from penstock.testing.engine import GREEDY
from tests.in_time import still
from tests.vllm.moving import BLOCK_TOKENS, LONG, Migration, Side, begin, enough_of, expected, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

SALT = "pepper"


async def bad_words_of(side: Side, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Some that an answer would hold: single tokens, pairs and triples of what is said without them."""
    said = (await side.driver.answer(tokens, replace(GREEDY, max_tokens=60))).token_ids
    return (said[3:4], said[8:10], said[20:22], said[30:33])


def holds(said: tuple[int, ...], words: tuple[tuple[int, ...], ...]) -> bool:
    return any(said[at : at + len(word)] == word for word in words for at in range(len(said)))


async def test_all_of_them_together_survive_a_move(sides: tuple[Side, Side]) -> None:
    source, target = sides
    tokens = prompt(100)
    words = await bad_words_of(source, tokens)
    sampling = replace(
        GREEDY,
        ignore_eos=False,
        max_tokens=70,
        min_tokens=65,
        bad_words=words,
        allowed_token_ids=tuple(range(2, 300)),
        logit_bias=((40, 3.0), (41, -100.0)),
        stop_token_ids=(50,),
        logprobs=1,
        prompt_logprobs=2,
    )
    asked = EngineRequest("all-together", tokens, sampling, cache_salt=SALT)
    answer = source.driver.submit_request(asked)
    await source.driver.until(lambda: len(answer.token_ids) >= 15)
    migration = Migration(source, target, asked, answer)
    await migration.offer()
    continued = await migration.hand_off(await migration.pause())
    await target.driver.end_of(continued)
    said = answer.token_ids + continued.token_ids
    begun = any(answer.token_ids[-n:] == word[:n] for word in words for n in range(1, len(word)))
    if not begun:  # else the rest of the word is forbidden everywhere behind the move
        assert said == await expected(source, replace(asked, request_id="undisturbed"))
    assert not holds(said, words)
    assert 65 <= len(said) <= 70
    assert max(said) < 300
    assert 41 not in said
    assert 50 not in said[:65]
    assert len(answer.logprobs + continued.logprobs) == len(said)
    positions = [position for delta in answer.deltas + continued.deltas for position in delta.prompt_logprobs]
    assert [position.chosen.token_id for position in positions] == list(tokens[1:]), "told once"
    assert all(len(position.top) == 2 and position.chosen.logprob <= 0 for position in positions)


async def test_no_bad_word_is_completed_after_a_recovery(sides: tuple[Side, Side]) -> None:
    source, target = sides
    tokens = prompt(40)
    words = await bad_words_of(source, tokens)
    sampling = replace(GREEDY, bad_words=words, max_tokens=60)
    whole = (await source.driver.answer(tokens, sampling)).token_ids
    assert not holds(whole, words)
    assert whole != (await source.driver.answer(tokens, replace(sampling, bad_words=()))).token_ids
    # Every cut that lies inside the beginning of a word, and two that do not.
    inside = [at for at in range(1, 59) if any(whole[at - n : at] == w[:n] for w in words for n in range(1, len(w)))]
    for cut in (*inside[:4], 5, 40):
        rest = (await target.driver.answer(tokens, sampling, whole[:cut])).token_ids
        assert not holds(whole[:cut] + rest, words)
        if cut not in inside:
            assert whole[:cut] + rest == whole


async def test_logprobs_of_a_prompt_are_those_of_its_generation(sides: tuple[Side, Side]) -> None:
    source, _ = sides
    tokens = prompt(50)
    generated = await source.driver.answer(tokens, replace(GREEDY, max_tokens=30, logprobs=1))
    scored = await source.driver.answer(tokens + generated.token_ids, replace(GREEDY, max_tokens=1, prompt_logprobs=1))
    positions = scored.deltas[0].prompt_logprobs
    assert len(positions) == 79, "although the prefix cache has the prompt"
    for position, once in zip(positions[49:], generated.logprobs, strict=True):
        assert position.chosen.token_id == once.chosen.token_id
        assert position.top[0].token_id == once.chosen.token_id, "it was drawn greedily"
        assert position.chosen.logprob == pytest.approx(once.chosen.logprob, abs=1e-3)


async def test_named_tokens_and_rivals_that_are_wanted_at_once_have_each_their_logprobs(
    sides: tuple[Side, Side],
) -> None:
    """vLLM's first model runner would give both those of the named tokens."""
    source, _ = sides
    few, many = (300, 301), (20, 21, 22, 23, 24)
    wanted = [
        replace(GREEDY, max_tokens=30, logprobs=3),
        replace(GREEDY, max_tokens=20, logprobs=1, logprob_token_ids=few),
        replace(GREEDY, max_tokens=20, logprobs=1, logprob_token_ids=many),
        replace(GREEDY, max_tokens=30, logprobs=0),
        replace(GREEDY, max_tokens=30, logprobs=2),
    ]
    tokens = [prompt(50 + index) for index in range(len(wanted))]
    alone = [await source.driver.answer(*each) for each in zip(tokens, wanted, strict=True)]
    together = [source.driver.submit(*each) for each in zip(tokens, wanted, strict=True)]
    for answer, before in zip(together, alone, strict=True):
        await source.driver.end_of(answer)
        assert answer.token_ids == before.token_ids
        for position, once in zip(answer.logprobs, before.logprobs, strict=True):
            assert [each.token_id for each in position.top] == [each.token_id for each in once.top]
            for one, other in zip((position.chosen, *position.top), (once.chosen, *once.top), strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    named = [each.token_id for each in alone[1].logprobs[0].top]
    assert set(named) == {alone[1].token_ids[0], *few}
    # What is sampled may be one of those that are named, since prompts are others in each run.
    expected_tops = [3, len({together[1].token_ids[0], *few}), len({together[2].token_ids[0], *many}), 0, 2]
    assert [len(answer.logprobs[0].top) for answer in together] == expected_tops
    likeliest = alone[0].logprobs[0].top
    sampling = replace(GREEDY, max_tokens=1, logprobs=0, logprob_token_ids=tuple(each.token_id for each in likeliest))
    again = await source.driver.answer(tokens[0], sampling)
    for one, other in zip(again.logprobs[0].top, likeliest, strict=True):
        assert (one.token_id, one.logprob) == (other.token_id, pytest.approx(other.logprob, abs=1e-3))


async def test_a_request_that_waits_for_the_logprobs_of_others_is_taken_back_at_once(sides: tuple[Side, Side]) -> None:
    source, _ = sides
    long = EngineRequest("long", prompt(60), replace(GREEDY, max_tokens=LONG, logprobs=1))
    running = source.driver.submit_request(long)
    await source.driver.start_of(running)
    named = EngineRequest("waits", prompt(61), replace(GREEDY, max_tokens=1, logprobs=0, logprob_token_ids=(300,)))
    waiting = source.driver.submit_request(named)
    source.engine.abort(named.request_id)
    await source.driver.end_of(waiting)
    still(not running.ended.is_set(), "the other request runs")
    assert (waiting.finish_reason, waiting.token_ids) == (FinishReason.ABORT, ())
    await enough_of(source, long, running)
    assert (await source.driver.answer(prompt(61), named.sampling)).logprobs[0].top[1].token_id == 300


async def test_only_allowed_tokens_come(sides: tuple[Side, Side]) -> None:
    source, target = sides
    allowed, tokens = (100, 101, 102), prompt(30)
    sampling = replace(GREEDY, allowed_token_ids=allowed, max_tokens=20)
    whole = (await source.driver.answer(tokens, sampling)).token_ids
    assert set(whole) <= set(allowed)
    assert (await target.driver.answer(tokens, sampling, whole[:7])).token_ids == whole[7:]


async def test_a_salt_keeps_blocks_apart_also_where_they_are_moved(sides: tuple[Side, Side]) -> None:
    source, target = sides
    tokens = prompt(4 * BLOCK_TOKENS + 3)
    asked = EngineRequest("salted", tokens, replace(GREEDY, max_tokens=LONG), cache_salt=SALT)
    answer = source.driver.submit_request(asked)
    await source.driver.until(lambda: len(answer.token_ids) >= 20)
    migration = Migration(source, target, asked, answer)
    await migration.offer()
    await migration.round()
    continued = await migration.hand_off(await migration.pause())
    await target.driver.end_of(continued)
    assert continued.finish_reason is FinishReason.LENGTH
    named = block_hashes(tokens, BLOCK_TOKENS, root_hash(SALT))
    for side in sides:
        await side.driver.until(lambda side=side: set(named) <= side.driver.cached_hashes)  # type: ignore[misc]
        short = replace(GREEDY, max_tokens=1)
        bare = await side.driver.answer(tokens, short)
        assert bare.cached_tokens == 0, "nobody without the salt finds them"
        again = side.driver.submit_request(EngineRequest(f"again-{id(side)}", tokens, short, cache_salt=SALT))
        await side.driver.end_of(again)
        assert again.cached_tokens >= 3 * BLOCK_TOKENS


async def test_a_request_that_moves_without_any_goes_on_as_before(sides: tuple[Side, Side]) -> None:
    source, target = sides
    migration = await begin(source, target, 100, LONG, after=10)
    await migration.offer()
    said = await migration.said(await migration.hand_off(await migration.pause()))
    assert said == await expected(source, migration.request, len(said))
