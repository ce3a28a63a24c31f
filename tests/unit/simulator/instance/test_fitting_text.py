"""Text of a given form, as a simulated engine says it."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.request import FinishReason, SamplingParams
from mesh.errors import RequestRefused
from simulator.instance.config import OutputConfig
from simulator.instance.fitting_text import NotSimulated, fitting_text, leaves_text_free
from simulator.instance.script import Script

COUNTS = st.integers(0, 9)
NUMBERS = st.integers(-99, 99)
SCALARS = st.none() | st.integers() | st.text(max_size=3)
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from([{}, {"type": "boolean"}, {"type": ["null", "integer"]}, {"$ref": "#/$defs/leaf"}]),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, COUNTS, COUNTS),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "exclusiveMaximum": low + 1 + more}, NUMBERS, COUNTS
    ),
    st.builds(lambda high: {"type": "number", "maximum": high}, NUMBERS),
    st.builds(lambda step: {"type": "integer", "multipleOf": step}, st.integers(1, 7)),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, SCALARS),
)


def closed(members: dict[str, Any], required: set[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": members,
        "required": sorted(required & members.keys()),
        "additionalProperties": False,
    }


def objects(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from("abcd")
    return st.builds(closed, st.dictionaries(names, parts, max_size=3), st.sets(names))


SCHEMAS = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        objects(parts),
        st.builds(lambda item, low: {"type": "array", "items": item, "minItems": low}, parts, st.integers(0, 3)),
        st.builds(lambda choices: {"anyOf": choices}, st.lists(parts, min_size=1, max_size=2)),
    ),
    max_leaves=6,
)


@given(SCHEMAS, st.integers(0, 2**64 - 1))
def test_json_fits_its_schema(schema: dict[str, Any], key: int) -> None:
    schema = {**schema, "$defs": {"leaf": {"type": "string", "maxLength": 2}}}
    for given_as in (schema, json.dumps(schema)):
        text = fitting_text(json.dumps({"json": given_as}), key)
        jsonschema.validate(json.loads(text), schema)
        assert text == fitting_text(json.dumps({"json": given_as}), key)


def test_choices_and_any_json() -> None:
    assert {fitting_text('{"choice": ["a", "b"]}', key) for key in range(20)} == {"a", "b"}
    assert isinstance(json.loads(fitting_text('{"json_object": true}', 3)), dict)


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        ({"regex": "a+"}, "not regex"),
        ({"json": {"type": "string", "pattern": "a+"}}, "pattern"),
        ({"json": {"$ref": "#/$defs/nowhere"}}, "not there"),
        ({"json": {"$ref": "#"}}, "deeper"),
        ({"json": {"type": "integer", "minimum": 1, "maximum": 0}}, "no integer"),
        ({"json": {"type": "number", "minimum": 1, "maximum": 0}}, "no number"),
    ],
)
def test_what_it_cannot_do_it_says(structure: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotSimulated, match=reason):
        fitting_text(json.dumps(structure), 0)


CONFIG = OutputConfig(vocabulary_tokens=300, last_token_id=299, byte_token_ids=tuple(range(20, 276)))
FITTING = SamplingParams(max_tokens=100, structured_outputs='{"choice": ["héllo"]}')
SPELLED = [20 + byte for byte in "héllo".encode()] + [CONFIG.eos_token_id]


def script(sampling: SamplingParams, emitted: tuple[int, ...] = (), config: OutputConfig = CONFIG) -> Script:
    return Script(np.array([5, 6], dtype=np.uint32), emitted, sampling, 200, config)


@pytest.mark.parametrize("emitted", range(len(SPELLED)))
def test_a_request_goes_on_with_the_same_text(emitted: int) -> None:
    rest = script(FITTING, tuple(SPELLED[:emitted]))
    assert rest.token_ids(emitted, rest.total_tokens) == SPELLED[emitted:]
    assert rest.finish_reason is FinishReason.STOP


def test_text_that_is_too_long_is_cut() -> None:
    cut = script(replace(FITTING, max_tokens=4))
    assert (cut.token_ids(0, cut.total_tokens), cut.finish_reason) == (SPELLED[:4], FinishReason.LENGTH)


def test_what_cannot_be_spelled_or_gone_on_with_is_refused() -> None:
    with pytest.raises(RequestRefused, match="no tokens for bytes"):
        script(FITTING, config=replace(CONFIG, byte_token_ids=()))
    with pytest.raises(RequestRefused, match="not regex"):
        script(replace(FITTING, structured_outputs='{"regex": "a"}'))
    with pytest.raises(RequestRefused, match="not those of this engine"):
        script(FITTING, tuple(SPELLED))


def test_tags_of_calls_that_need_not_be_leave_the_text_free() -> None:
    form = {"type": "triggered_tags", "triggers": ["<call>"], "tags": []}
    assert leaves_text_free(json.dumps({"structural_tag": json.dumps({"format": form})}))
    assert not leaves_text_free(json.dumps({"structural_tag": json.dumps({"format": {**form, "at_least_one": True}})}))
    assert not leaves_text_free(json.dumps({"json_object": True}))
