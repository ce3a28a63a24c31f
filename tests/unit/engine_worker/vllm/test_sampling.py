"""The mapping of sampling parameters, continued requests included."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engines.vllm.checkpoint import Vocabulary
from engine_worker.engines.vllm.sampling import refusal, sampling_arguments

VOCABULARY = Vocabulary(size=100, eos_token_ids=(2, 3))


def request(sampling: SamplingParams, emitted: tuple[int, ...] = ()) -> EngineRequest:
    return EngineRequest("r", (10, 11, 12), sampling, emitted_token_ids=emitted)


def refused(sampling: SamplingParams, prompt: tuple[int, ...] = (10,), emitted: tuple[int, ...] = ()) -> str | None:
    return refusal(
        EngineRequest("r", prompt, sampling, emitted_token_ids=emitted),
        VOCABULARY,
        max_model_len_tokens=16,
        max_logprobs=5,
    )


def test_every_parameter_is_passed_on() -> None:
    sampling = SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.7,
        top_p=0.8,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        seed=7,
        stop_token_ids=(50,),
        logprobs=3,
        logit_bias=((60, 1.5),),
        allowed_token_ids=(60, 61),
        bad_words=((61, 60), (62,)),
        prompt_logprobs=4,
        vllm_xargs='{"a": [1, "b"]}',
        structured_outputs='{"regex":"a+"}',
    )
    assert sampling_arguments(request(sampling), VOCABULARY) == {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 7,
        "stop_token_ids": [2, 3, 50],
        "ignore_eos": False,
        "thinking_token_budget": None,
        "logprobs": 3,
        "logprob_token_ids": None,
        "logit_bias": {60: 1.5},
        "allowed_token_ids": [60, 61],
        "bad_words": None,
        "_bad_words_token_ids": [[61, 60], [62]],
        "prompt_logprobs": 4,
        "extra_args": {"a": [1, "b"]},
        "structured_outputs": {"regex": "a+"},
        "detokenize": False,
        "skip_clone": True,
    }


def test_named_tokens_take_the_place_of_a_number_of_rivals() -> None:
    sampling = SamplingParams(max_tokens=9, logprobs=3, logprob_token_ids=(60, 61))
    arguments = sampling_arguments(request(sampling), VOCABULARY)
    assert (arguments["logprobs"], arguments["logprob_token_ids"]) == (None, [60, 61])
    assert refused(replace(sampling, logprob_token_ids=(60, 100))) == (
        "token id 100 is outside the vocabulary of 100 tokens"
    )


def test_ignoring_the_end_of_sequence_keeps_the_stop_tokens() -> None:
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(50,))
    assert sampling_arguments(request(sampling), VOCABULARY)["stop_token_ids"] == [50]


@given(
    max_tokens=st.integers(1, 50),
    min_tokens=st.integers(0, 50),
    emitted=st.lists(st.integers(0, 99), max_size=49).map(tuple),
)
def test_what_was_emitted_is_not_asked_for_again(max_tokens: int, min_tokens: int, emitted: tuple[int, ...]) -> None:
    arguments = sampling_arguments(
        request(SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens), emitted), VOCABULARY
    )
    assert arguments["max_tokens"] + len(emitted) == max_tokens
    assert arguments["min_tokens"] == max(0, min_tokens - len(emitted))


def test_a_bad_word_that_has_begun_is_not_completed_elsewhere() -> None:
    sampling = SamplingParams(max_tokens=9, bad_words=((5, 6, 7), (8,), (6, 9)))
    arguments = sampling_arguments(request(sampling, emitted=(4, 5, 6)), VOCABULARY)
    assert arguments["_bad_words_token_ids"] == [[5, 6, 7], [8], [6, 9], [7], [9]]
    assert sampling_arguments(request(sampling, emitted=(5,)), VOCABULARY)["_bad_words_token_ids"][3:] == [[6, 7]]


def test_the_prompt_s_logprobs_are_told_once() -> None:
    sampling = SamplingParams(max_tokens=9, prompt_logprobs=2)
    assert sampling_arguments(request(sampling, emitted=(5,)), VOCABULARY)["prompt_logprobs"] is None


def test_penalties_of_emitted_tokens_become_bias() -> None:
    sampling = SamplingParams(
        max_tokens=9, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((20, 2.0), (21, 1.0))
    )
    arguments = sampling_arguments(request(sampling, emitted=(20, 30, 20)), VOCABULARY)
    assert arguments["logit_bias"] == {20: 2.0 - 0.5 - 2 * 0.25, 21: 1.0, 30: -0.5 - 0.25}


def test_without_penalties_emitted_tokens_leave_the_bias_alone() -> None:
    assert sampling_arguments(request(SamplingParams(max_tokens=9), emitted=(20,)), VOCABULARY)["logit_bias"] is None


@given(seed=st.integers(-(1 << 63), (1 << 63) - 1), emitted=st.integers(1, 1000))
def test_a_continuation_draws_from_a_seed_of_its_own(seed: int, emitted: int) -> None:
    sampling = SamplingParams(max_tokens=2000, seed=seed)
    seeds = [
        sampling_arguments(request(sampling, (5,) * count), VOCABULARY)["seed"] for count in (0, emitted, emitted + 1)
    ]
    assert seeds[0] == seed
    assert 0 <= seeds[1] < 1 << 63
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("sampling", "prompt", "emitted", "message"),
    [
        (SamplingParams(max_tokens=5), (), (), "empty"),
        (SamplingParams(max_tokens=5), (1,) * 16, (), "context is 16"),
        (SamplingParams(max_tokens=15), (1,) * 6, (1,) * 10, "context is 16"),
        (SamplingParams(max_tokens=0), (1,), (), "nothing is left"),
        (SamplingParams(max_tokens=2), (1,), (1, 1), "nothing is left"),
        (SamplingParams(max_tokens=5, logprobs=6), (1,), (), "at most 5 logprobs"),
        (SamplingParams(max_tokens=5), (1, 100), (), "token id 100 is outside"),
        (SamplingParams(max_tokens=5), (1,), (-1,), "token id -1 is outside"),
        (SamplingParams(max_tokens=5, stop_token_ids=(100,)), (1,), (), "token id 100 is outside"),
        (SamplingParams(max_tokens=5, logit_bias=((100, 1.0),)), (1,), (), "token id 100 is outside"),
    ],
)
def test_what_can_never_be_served(
    sampling: SamplingParams, prompt: tuple[int, ...], emitted: tuple[int, ...], message: str
) -> None:
    reason = refused(sampling, prompt, emitted)
    assert reason is not None
    assert message in reason


def test_what_just_fits_is_served() -> None:
    assert refused(SamplingParams(max_tokens=5, logprobs=5), (99,) * 15) is None
    assert refused(SamplingParams(max_tokens=3), (0,), (1, 1)) is None
