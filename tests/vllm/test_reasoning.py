"""Reasoning with a grammar behind it: from the first token, after a recovery, after a live move; and preemption under a
grammar."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from controlplane.model.request import EngineRequest, FinishReason
from engine_worker.engines.vllm.engine import VllmEngine
from penstock.testing.engine import GREEDY, Answer, EngineDriver
from services.frontend.parsers.reasoning import PlainText, ReasoningParser
from tests.in_time import still
from tests.vllm.moving import SETTINGS, Migration, Side
from tests.vllm.thinking_model import make_thinker

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age", "tags"],
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 30},
        "age": {"type": "integer", "minimum": 100, "maximum": 99999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 4, "maxItems": 8},
    },
}
FITTING = replace(GREEDY, max_tokens=150, ignore_eos=False, structured_outputs=json.dumps({"json": SCHEMA}))
MAX_MODEL_LEN = 256
BLOCK_BYTES = 6 * 2 * 2 * 64 * 4 * 32
"""Layers, keys and values, heads, their size, float32, tokens of a block."""
SMALL_BLOCKS = 13


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinker(tmp_path_factory.mktemp("thinker"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(thinker: Path) -> AsyncIterator[tuple[Side, Side]]:
    """The second one has so little KV memory that few requests fit."""
    large = replace(SETTINGS, model_path=str(thinker), reasoning_parser="deepseek_r1", max_model_len=MAX_MODEL_LEN)
    small = replace(large, kv_cache_memory_bytes=SMALL_BLOCKS * BLOCK_BYTES)
    engines = VllmEngine(large), VllmEngine(small)
    limits = [await engine.start() for engine in engines]  # not at once: vLLM renews metrics of the whole process
    first, second = (
        Side(engine, EngineDriver(engine, limit, 120.0)) for engine, limit in zip(engines, limits, strict=True)
    )
    yield first, second
    await first.driver.close()
    await second.driver.close()


@pytest.fixture(scope="module")
def tokenizer(thinker: Path) -> Tokenizer:
    return Tokenizer.from_file(str(thinker / "tokenizer.json"))


def counting(tokenizer: Tokenizer, start: int, end: int = 30) -> tuple[int, ...]:
    prompt = f"<s><|user|>Count from {start} up to {end}.</s><|assistant|>"
    return tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)


def read(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> tuple[str, str]:
    """Reasoning and content, as a frontend tells them."""
    parser = ReasoningParser(PlainText())
    first = parser.push(tokenizer.decode(list(token_ids)))
    last = parser.finish()
    return first.reasoning + last.reasoning, first.content + last.content


def fits(tokenizer: Tokenizer, answer: Answer) -> None:
    assert answer.finish_reason is FinishReason.STOP
    reasoning, content = read(tokenizer, answer.token_ids)
    assert reasoning.strip(), "it thinks first"
    jsonschema.validate(json.loads(content), SCHEMA)


async def test_a_grammar_begins_behind_the_reasoning(thinking: tuple[Side, Side], tokenizer: Tokenizer) -> None:
    answer = await thinking[0].driver.answer(counting(tokenizer, 2), FITTING)
    fits(tokenizer, answer)
    assert read(tokenizer, answer.token_ids)[0] == "2 3 4 5 6 7 8 "
    queued_ms = answer.deltas[0].queued_ms
    assert queued_ms is not None
    assert 0 <= queued_ms < 60_000


async def test_recovered_anywhere_it_is_that_of_an_undisturbed_run(
    thinking: tuple[Side, Side], tokenizer: Tokenizer
) -> None:
    """As after a kill: in the reasoning, at its end, and behind it."""
    source, target = thinking
    asked = counting(tokenizer, 3)
    whole = await source.driver.answer(asked, FITTING)
    end = whole.token_ids.index(tokenizer.token_to_id("</think>"))
    for cut in sorted({1, 2, end - 1, end, end + 1, end + 2, *range(end + 3, len(whole.token_ids) - 1, 6)}):
        rest = await target.driver.answer(asked, FITTING, whole.token_ids[:cut])
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids, f"cut after {cut}, reasoning ends at {end}"
        assert rest.finish_reason is whole.finish_reason


async def test_moved_in_the_reasoning_and_behind_it(thinking: tuple[Side, Side], tokenizer: Tokenizer) -> None:
    source, target = thinking
    for number, goal in enumerate((40, 50, 60)):
        asked = counting(tokenizer, 1, goal)
        expected = (await source.driver.answer(asked, FITTING)).token_ids
        end = expected.index(tokenizer.token_to_id("</think>"))
        after = (2, end - 3, end + 4)[number]
        request = EngineRequest(f"moving-{goal}", asked, FITTING)
        answer = source.driver.submit_request(request)
        await source.driver.until(partial(has_emitted, answer, after))
        migration = Migration(source, target, request, answer)
        await migration.offer()
        await migration.round()
        continued = await migration.hand_off(await migration.pause())
        await target.driver.end_of(continued)
        still(bool(continued.token_ids), "it is not at its end when it is moved")
        assert answer.token_ids + continued.token_ids == expected, f"after {after}, reasoning ends at {end}"


def has_emitted(answer: Answer, tokens: int) -> bool:
    still(not answer.ended.is_set(), "it has not ended")
    return len(answer.token_ids) >= tokens


async def test_a_budget_ends_the_reasoning_wherever_it_goes_on(
    thinking: tuple[Side, Side], tokenizer: Tokenizer
) -> None:
    """At an instance that goes on behind tokens of another one, too."""
    source, target = thinking
    begin, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    asked = (*counting(tokenizer, 2), begin)
    sampling = replace(GREEDY, max_tokens=20, ignore_eos=True)
    free = (await source.driver.answer(asked, sampling)).token_ids
    assert end not in free
    for budget in (0, 1, 4, 9):
        limited = replace(sampling, thinking_token_budget=budget)
        whole = (await source.driver.answer(asked, limited)).token_ids
        assert whole.index(end) == budget, "as many tokens of reasoning as were allowed"
        assert whole[:budget] == free[:budget]
        for cut in {1, 2, max(1, budget - 1), max(1, budget), budget + 1, budget + 3}:
            rest = (await target.driver.answer(asked, limited, whole[:cut])).token_ids
            assert whole[:cut] + rest == whole, f"cut after {cut} of {budget}"
    first, *others = counting(tokenizer, 2)
    asked = (first, begin, *others)
    free = (await source.driver.answer(asked, sampling)).token_ids
    plenty = replace(sampling, thinking_token_budget=len(others) + free.index(end) + 1)
    assert (await source.driver.answer(asked, plenty)).token_ids == free, "it ends by itself"


async def test_preempted_requests_keep_to_their_grammar(thinking: tuple[Side, Side], tokenizer: Tokenizer) -> None:
    """More streams than there is KV memory for: some are preempted, computed again, and go on in the same JSON."""
    plenty, little = thinking
    prompts = [counting(tokenizer, start, end) for start in (1, 2, 3, 4) for end in (50, 70)]
    before = little.engine.load().preemptions_total
    answers = [little.driver.submit(prompt, FITTING) for prompt in prompts]
    for answer in answers:
        await little.driver.end_of(answer)
    assert little.engine.load().preemptions_total > before, "the test needs less memory or more streams"
    for prompt, answer in zip(prompts, answers, strict=True):
        fits(tokenizer, answer)
        undisturbed = await plenty.driver.answer(prompt, FITTING)
        assert answer.token_ids == undisturbed.token_ids
