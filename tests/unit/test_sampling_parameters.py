"""A sampling parameter is declared once, and goes the whole way from a client's body to the engine by that."""

from dataclasses import dataclass, fields
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.model.sampling import TOKEN_IDS, Bounds, Parameter, parameter, parameters
from controlplane.sampling_message import sampling_message, sampling_params
from engine_worker.engines.vllm.checkpoint import Vocabulary
from engine_worker.engines.vllm.sampling import sampling_arguments
from penstock.v1 import request_pb2
from services.frontend.http.body import decode_body
from services.frontend.requests.sampling import body_field, values_in
from services.frontend.requests.schema import CompletionRequest
from simulator.instance.script import HONOURED, without_effect

DECLARED = parameters(SamplingParams)
VOCABULARY = Vocabulary(size=100, eos_token_ids=(2,))


def other_value(declared: Parameter) -> Any:
    """One that is not the default, as a body holds it."""
    kind = declared.type_but_none
    if get_origin(kind) is tuple:
        return ["a", "b"] if get_args(kind)[0] is str else [7, 9]
    return {int: 3, float: 0.5, bool: not declared.default, str: "a"}[kind]


def test_the_message_has_the_declared_parameters() -> None:
    assert {each.name for each in request_pb2.SamplingParams.DESCRIPTOR.fields} == set(DECLARED)


@pytest.mark.parametrize(
    "declared", [each for each in DECLARED.values() if each.is_in_body], ids=lambda each: each.name
)
def test_what_a_client_sends_reaches_vllm(declared: Parameter) -> None:
    sent = other_value(declared)
    body = msgspec.json.encode({"model": "m", "prompt": "x", declared.name: sent})
    read = SamplingParams(max_tokens=10, **values_in(decode_body(body, CompletionRequest)))
    arrived = sampling_params(sampling_message(read))
    assert arrived == read
    assert getattr(arrived, declared.name) == (tuple(sent) if isinstance(sent, list) else sent) != declared.default
    argument = sampling_arguments(EngineRequest("r", (1,), arrived), VOCABULARY)[declared.name]
    assert argument == (sorted({*sent, 2}) if declared.name == "stop_token_ids" else sent)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(0, 2**32 - 1),
        temperature=st.floats(0, 2),
        top_k=st.integers(0, 100),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
        logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
        bad_words=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        prompt_logprobs=st.none() | st.integers(0, 20),
    )
)
def test_a_message_says_what_the_value_says(sampling: SamplingParams) -> None:
    assert sampling_params(sampling_message(sampling)) == sampling


@dataclass(frozen=True)
class WithANewOne:
    """All that declaring another parameter takes, beside its line in the message."""

    allowed_token_ids: tuple[int, ...] = parameter((), "Nothing but these is generated.", TOKEN_IDS, max_items=2)
    patience: float = parameter(1.0, "How long.", Bounds(0, 3, is_low_open=True))
    prompt_logprobs: int | None = parameter(None, "Of the prompt's tokens, too.", Bounds(0, 20))
    bad_words: tuple[str, ...] = parameter((), "Never generated.", max_items=1)


def test_a_new_parameter_is_checked_documented_and_read_by_its_declaration() -> None:
    declared = tuple(parameters(WithANewOne).values())
    struct = msgspec.defstruct("Body", [body_field(each) for each in declared], forbid_unknown_fields=True)
    body = decode_body(b'{"allowed_token_ids": [1, 2], "patience": null, "prompt_logprobs": 0}', struct)
    assert WithANewOne(**values_in(body, declared)) == WithANewOne(allowed_token_ids=(1, 2), prompt_logprobs=0)
    _, schemas = msgspec.json.schema_components([struct])
    documented = schemas["Body"]["properties"]["patience"]
    assert documented["description"] == "How long."
    assert {"type": "number", "exclusiveMinimum": 0, "maximum": 3} in documented["anyOf"]
    for wrong in (
        '{"patience": 0}',
        '{"patience": 3.1}',
        '{"allowed_token_ids": [1, 2, 3]}',
        '{"allowed_token_ids": [-1]}',
        '{"prompt_logprobs": 21}',
        '{"bad_words": ["a", "b"]}',
        '{"bad_words": [3]}',
    ):
        with pytest.raises(Exception, match=r"Invalid `(patience|allowed_token_ids|prompt_logprobs|bad_words)"):
            decode_body(wrong.encode(), struct)


@pytest.mark.parametrize(
    ("value", "reason"),
    [(0.5, None), (3.0, None), (0.0, "patience must be above 0 and at most 3, got 0.0"), (float("nan"), "got nan")],
)
def test_a_worker_checks_a_new_parameter_by_its_declaration(value: float, reason: str | None) -> None:
    refusal = parameters(WithANewOne)["patience"].refusal(value)
    assert refusal is None if reason is None else reason in (refusal or "")
    assert parameters(WithANewOne)["prompt_logprobs"].refusal(None) is None


def test_every_parameter_of_a_body_is_documented() -> None:
    for declared in DECLARED.values():
        assert not declared.is_in_body or declared.description, declared.name


def test_a_simulated_engine_says_what_it_does_not_honour() -> None:
    assert without_effect(SamplingParams(max_tokens=5, temperature=0.3, seed=4, stop_token_ids=(3,))) == ()
    assert without_effect(SamplingParams(max_tokens=5, top_p=0.5, logit_bias=((3, 1.0),))) == ("top_p", "logit_bias")
    assert without_effect(SamplingParams(max_tokens=5, logit_bias=((3, 100.0), (4, -100.0)))) == ()
    assert {each.name for each in fields(SamplingParams)} >= HONOURED
