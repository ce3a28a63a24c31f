"""Answers that must fit a schema, a choice or a grammar: from the first token, after a recovery, after a live move."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from controlplane.model.request import EngineRequest, FinishReason
from engine_worker.engines.vllm.connector.grammar import replay_obstacle
from mesh.errors import RequestRefused
from penstock.testing.engine import GREEDY
from tests.in_time import still
from tests.vllm.moving import MODEL, Side, begin, expected, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age", "tags", "where"],
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "age": {"type": "integer", "minimum": 100, "maximum": 99999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
        "where": {
            "type": "object",
            "additionalProperties": False,
            "required": ["city", "zip"],
            "properties": {
                "city": {"type": "string", "maxLength": 9},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
        },
    },
}
FITTING = replace(
    GREEDY,
    max_tokens=200,
    ignore_eos=False,
    structured_outputs=json.dumps({"json": SCHEMA}),
)
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def text_of(token_ids: tuple[int, ...]) -> str:
    text: str = TOKENIZER.decode(list(token_ids))
    return text


def structured(**fields: Any) -> str:
    return json.dumps(fields)


async def test_an_answer_fits_its_schema(sides: tuple[Side, Side]) -> None:
    for tokens in (20, 300):
        answer = await sides[0].driver.answer(prompt(tokens), FITTING)
        assert answer.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(text_of(answer.token_ids)), SCHEMA)


@pytest.mark.parametrize(
    ("structure", "form"),
    [
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"regex": "[a-c]{3}-[0-9]{4}"}, "[a-c]{3}-[0-9]{4}"),
        ({"grammar": 'root ::= "(" inner ")"\ninner ::= [a-f] [a-f] | "none"'}, r"\([a-f]{2}\)|\(none\)"),
    ],
)
async def test_other_structures(sides: tuple[Side, Side], structure: dict[str, Any], form: str) -> None:
    sampling = replace(FITTING, structured_outputs=structured(**structure))
    answer = await sides[0].driver.answer(prompt(30), sampling)
    assert re.fullmatch(form, text_of(answer.token_ids))


async def test_recovered_anywhere_an_answer_is_that_of_an_undisturbed_run(sides: tuple[Side, Side]) -> None:
    """As after a kill: prompt and emitted tokens at another instance, without their KV."""
    source, target = sides
    asked = prompt(60)
    whole = await source.driver.answer(asked, FITTING)
    cuts = range(1, len(whole.token_ids) - 1, 3)
    rests = await asyncio.gather(*(target.driver.answer(asked, FITTING, whole.token_ids[:cut]) for cut in cuts))
    for cut, rest in zip(cuts, rests, strict=True):
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids, f"cut after {cut}"
        assert rest.finish_reason is whole.finish_reason


async def test_moved_anywhere_an_answer_is_that_of_an_undisturbed_run(sides: tuple[Side, Side]) -> None:
    source, target = sides
    for tokens, after in ((100, 5), (300, 20), (700, 33)):
        migration = await begin(source, target, tokens, 200, after, FITTING)
        await migration.offer()
        await migration.round()
        continued = await migration.hand_off(await migration.pause())
        await target.driver.end_of(continued)
        answer = migration.answer.token_ids + continued.token_ids
        still(bool(continued.token_ids), "it is not at its end when it is moved")
        assert answer == await expected(source, migration.request)
        jsonschema.validate(json.loads(text_of(answer)), SCHEMA)


async def test_a_request_that_is_paused_and_resumed_goes_on_under_its_grammar(sides: tuple[Side, Side]) -> None:
    source, target = sides
    migration = await begin(source, target, 80, 200, after=10, sampling=FITTING)
    await migration.offer()
    await migration.pause()
    source.engine.resume(migration.request.request_id)
    target.engine.discard(migration.migration_id)
    await source.driver.end_of(migration.answer)
    assert migration.answer.token_ids == await expected(source, migration.request)


async def test_tokens_that_do_not_fit_fail_their_request_and_no_other(sides: tuple[Side, Side]) -> None:
    source, _ = sides
    other = source.driver.submit(prompt(40), FITTING)
    broken = await source.driver.answer(prompt(40), FITTING, tuple(TOKENIZER.encode("no brace").ids))
    assert broken.finish_reason is FinishReason.ERROR
    assert not broken.token_ids
    await source.driver.end_of(other)
    jsonschema.validate(json.loads(text_of(other.token_ids)), SCHEMA)


@pytest.mark.parametrize(
    "structure",
    [{"regex": "[a-"}, {"grammar": "no grammar"}, {"choice": []}, {"json": '{"type": "nonsense"}'}, {"unheard_of": 1}],
)
async def test_a_wrong_structure_is_refused_at_once(sides: tuple[Side, Side], structure: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused):
        sides[0].driver.submit(prompt(10), replace(FITTING, structured_outputs=structured(**structure)))


async def test_where_grammars_cannot_go_on_requests_are_refused_and_not_broken(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replay_obstacle() is None
    engine = sides[1].engine
    monkeypatch.setattr(engine, "_replay_obstacle", "vLLM has changed")
    arriving = EngineRequest("arriving", prompt(10), FITTING)
    with pytest.raises(RequestRefused, match="vLLM has changed"):
        await engine.reserve("move", arriving)
    with pytest.raises(RequestRefused, match="vLLM has changed"):
        engine.submit(replace(arriving, emitted_token_ids=(20, 21)))
    fresh = await sides[1].driver.answer(arriving.prompt_token_ids, FITTING)
    assert fresh.finish_reason is FinishReason.STOP, "what begins there is served as ever"
