"""What the simulated model says."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.request import FinishReason, SamplingParams
from simulator.instance.config import OutputConfig
from simulator.instance.script import Script

CONFIG = OutputConfig(
    vocabulary_tokens=200, first_token_id=10, last_token_id=99, eos_token_id=2, median_tokens=60, sigma=0.8
)
GREEDY = SamplingParams(max_tokens=500, temperature=0.0)


def script(
    prompt: int, sampling: SamplingParams = GREEDY, emitted: Sequence[int] = (), config: OutputConfig = CONFIG
) -> Script:
    return Script(np.array([prompt, 5, 7], dtype=np.uint32), emitted, sampling, 4096, config)


def test_lengths_follow_the_lognormal_distribution() -> None:
    config = replace(CONFIG, longest_tokens=100_000)
    sampling = replace(GREEDY, max_tokens=4000)
    lengths = [script(prompt, sampling, config=config).total_tokens for prompt in range(1500)]
    logarithms = [math.log(length) for length in lengths]
    assert statistics.median(lengths) == pytest.approx(60, rel=0.1)
    assert statistics.stdev(logarithms) == pytest.approx(0.8, rel=0.1)


def test_lengths_stay_within_their_bounds() -> None:
    config = replace(CONFIG, shortest_tokens=20, longest_tokens=70, sigma=2.0)
    lengths = {script(prompt, config=config).total_tokens for prompt in range(300)}
    assert min(lengths) == 20
    assert max(lengths) == 70


@given(
    prompt=st.integers(0, 10_000),
    emitted=st.integers(0, 40),
    max_tokens=st.integers(41, 80),
    min_tokens=st.integers(0, 41),
    seed=st.none() | st.integers(-(1 << 64), 1 << 64),
    stop=st.lists(st.integers(0, 120), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    allowed=st.lists(st.integers(10, 14), max_size=4).map(tuple),
    bad_words=st.lists(st.lists(st.integers(10, 14), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
def test_a_continuation_says_what_the_whole_says(
    prompt: int,
    emitted: int,
    max_tokens: int,
    min_tokens: int,
    seed: int | None,
    stop: tuple[int, ...],
    ignore_eos: bool,
    allowed: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
) -> None:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=seed,
        stop_token_ids=stop,
        ignore_eos=ignore_eos,
        allowed_token_ids=allowed,
        bad_words=bad_words,
        temperature=0.7,
    )
    whole = script(prompt, sampling)
    if whole.total_tokens <= emitted:
        return
    rest = script(prompt, sampling, whole.token_ids(0, emitted))
    assert rest.total_tokens == whole.total_tokens
    assert rest.finish_reason is whole.finish_reason
    assert rest.token_ids(emitted, rest.total_tokens) == whole.token_ids(0, whole.total_tokens)[emitted:]


@given(prompt=st.integers(0, 10_000), min_tokens=st.integers(0, 50), stop=st.integers(10, 99))
def test_ends_are_where_they_may_be(prompt: int, min_tokens: int, stop: int) -> None:
    sampling = SamplingParams(max_tokens=50, min_tokens=min_tokens, temperature=0.0, stop_token_ids=(stop,))
    said = script(prompt, sampling)
    tokens = said.token_ids(0, said.total_tokens)
    assert min_tokens <= len(tokens) <= 50
    assert not {stop, CONFIG.eos_token_id} & set(tokens[:min_tokens])
    assert not {stop, CONFIG.eos_token_id} & set(tokens[:-1])
    ended = tokens[-1] in (stop, CONFIG.eos_token_id)
    assert said.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


def test_only_allowed_tokens_come_and_no_bad_word_does() -> None:
    bad_words = ((10,), (11, 12), (12, 13, 13), (2,))
    sampling = replace(GREEDY, allowed_token_ids=(2, 10, 11, 12, 13), bad_words=bad_words)
    said = script(1, sampling)
    tokens = tuple(said.token_ids(0, said.total_tokens))
    assert len(tokens) == 500, "the end of sequence is a bad word, too"
    assert set(tokens) == {11, 12, 13}
    assert not any(tokens[at : at + len(word)] == word for word in bad_words for at in range(500))


def test_a_bias_that_decides_alone_decides() -> None:
    said = script(1, replace(GREEDY, logit_bias=((20, 100.0), (150, 100.0))))
    assert set(said.token_ids(0, 500)) == {20, 150}
    said = script(1, replace(GREEDY, logit_bias=((20, 100.0), (21, 100.0), (22, -100.0)), bad_words=((20,),)))
    assert set(said.token_ids(0, 500)) == {21}
    said = script(1, replace(GREEDY, logit_bias=tuple((token_id, -100.0) for token_id in (2, *range(12, 100)))))
    assert set(said.token_ids(0, 500)) == {10, 11}


def test_logprobs_of_a_prompt_leave_its_first_token_out() -> None:
    said = script(90, replace(GREEDY, prompt_logprobs=2))
    told = said.prompt_logprobs()
    assert [position.chosen.token_id for position in told] == [5, 7]
    assert all(len(position.top) == 2 and position.chosen.logprob < 0 for position in told)
    assert script(90, replace(GREEDY, prompt_logprobs=2), said.token_ids(0, 3)).prompt_logprobs() == ()
    assert script(90).prompt_logprobs() == ()


def test_a_seed_matters_only_when_sampling() -> None:
    def tokens(temperature: float, seed: int | None) -> list[int]:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=seed)
        return script(1, sampling).token_ids(0, 20)

    assert tokens(0.0, 1) == tokens(0.0, 2) == tokens(1.0, None)
    assert tokens(1.0, 1) != tokens(1.0, 2)
    assert tokens(1.0, 0) != tokens(1.0, None)


def test_the_end_of_sequence_is_left_out_of_an_answer_s_range() -> None:
    config = replace(CONFIG, eos_token_id=50)
    said = script(1, replace(GREEDY, ignore_eos=True), config=config)
    assert 50 not in said.token_ids(0, 500)


def test_logprobs_of_a_tiny_vocabulary() -> None:
    config = replace(CONFIG, first_token_id=10, last_token_id=11)
    sampling = SamplingParams(max_tokens=50, temperature=1.0, seed=3, logprobs=5, ignore_eos=True)
    said = script(1, sampling, config=config)
    for position in range(50):
        logprobs = said.logprobs(position)
        assert {candidate.token_id for candidate in logprobs.top} == {10, 11}
        assert logprobs.chosen in logprobs.top
        assert sum(math.exp(candidate.logprob) for candidate in logprobs.top) < 1


def test_named_tokens_have_the_logprobs_that_they_have_as_rivals() -> None:
    sampling = SamplingParams(max_tokens=50, temperature=1.0, seed=3, logprobs=9, ignore_eos=True)
    rivals = script(1, sampling)
    for position in range(50):
        likeliest = rivals.logprobs(position)
        named = tuple(candidate.token_id for candidate in reversed(likeliest.top))
        told = script(1, replace(sampling, logprobs=0, logprob_token_ids=(*named, 2))).logprobs(position)
        assert told.chosen == told.top[0] == likeliest.chosen
        assert {each.token_id: each.logprob for each in told.top[:-1]} == {
            each.token_id: each.logprob for each in likeliest.top
        }
        order = [token_id for token_id in named if token_id != likeliest.chosen.token_id]
        assert [each.token_id for each in told.top] == [likeliest.chosen.token_id, *order, 2]
        assert told.top[-1].logprob < min(each.logprob for each in likeliest.top), "it is never said"


def test_sampling_does_not_always_choose_the_likeliest() -> None:
    sampling = SamplingParams(max_tokens=400, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)
    said = script(1, sampling)
    likeliest = [said.logprobs(position).chosen == said.logprobs(position).top[0] for position in range(400)]
    assert 0.8 < statistics.mean(likeliest) < 0.95


def test_words_are_said_where_there_are_some() -> None:
    words = (12, 40, 41, 98)
    long = replace(GREEDY, ignore_eos=True)
    said = set(script(1, long, config=replace(CONFIG, word_token_ids=words)).token_ids(0, 100))
    assert said <= set(words)
    assert len(said) == len(words)
    outside = script(1, long, config=replace(CONFIG, word_token_ids=(150,)))
    assert outside.token_ids(0, 100) == script(1, long).token_ids(0, 100), "first..last is the limit"
