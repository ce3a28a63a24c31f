"""From vLLM's outputs to token deltas."""

from dataclasses import dataclass

import pytest

from controlplane.model.request import FinishReason, PositionLogprobs, TokenLogprob
from engine_worker.engines.vllm.deltas import prompt_positions, token_delta


@dataclass
class Candidate:
    logprob: float
    rank: int | None


@dataclass
class Output:
    token_ids: list[int]
    logprobs: list[dict[int, Candidate]] | None = None
    finish_reason: str | None = None


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (None, None),
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("abort", FinishReason.ABORT),
        ("repetition", FinishReason.ERROR),
    ],
)
def test_finish_reasons(reason: str | None, expected: FinishReason | None) -> None:
    delta = token_delta("r", 3, Output([8], finish_reason=reason), logprobs=None, cached_tokens=16)
    assert (delta.offset, delta.token_ids, delta.finish_reason, delta.cached_tokens) == (3, (8,), expected, 16)
    assert bool(delta.error) == (expected is FinishReason.ERROR)


def test_rivals_come_best_first_and_no_more_than_asked_for() -> None:
    # The chosen token comes first in vLLM's answer, whatever its rank.
    candidates = {40: Candidate(-5.0, 9), 12: Candidate(-0.5, 1), 11: Candidate(-2.0, 2)}
    delta = token_delta("r", 0, Output([40], [candidates]), logprobs=2, cached_tokens=None)
    assert delta.logprobs == (
        PositionLogprobs(TokenLogprob(40, -5.0, 9), (TokenLogprob(12, -0.5), TokenLogprob(11, -2.0))),
    )


def test_a_likely_chosen_token_is_among_its_rivals() -> None:
    candidates = {12: Candidate(-0.5, 1), 11: Candidate(-2.0, 2)}
    delta = token_delta("r", 0, Output([12], [candidates]), logprobs=2, cached_tokens=None)
    assert delta.logprobs[0].top == (TokenLogprob(12, -0.5), TokenLogprob(11, -2.0))


def test_named_tokens_come_behind_the_chosen_one_as_they_were_named() -> None:
    candidates = {40: Candidate(-5.0, 9), 12: Candidate(-0.5, 1), 11: Candidate(-7.0, 2)}
    delta = token_delta(
        "r", 0, Output([40], [candidates]), logprobs=1, named_token_ids=(12, 40, 11), cached_tokens=None
    )
    top = (TokenLogprob(40, -5.0), TokenLogprob(12, -0.5), TokenLogprob(11, -7.0))
    assert delta.logprobs == (PositionLogprobs(TokenLogprob(40, -5.0, 9), top),)


def test_the_prompt_s_logprobs_begin_with_its_second_token() -> None:
    candidates = [None, {7: Candidate(-3.0, 8), 9: Candidate(-0.2, 1)}]
    expected = (PositionLogprobs(TokenLogprob(7, -3.0, 8), (TokenLogprob(9, -0.2),)),)
    assert prompt_positions((5, 7), candidates, 1) == expected
    assert prompt_positions((5, 7), (), 1) == ()


def test_no_rivals_leave_the_chosen_token_s_logprob() -> None:
    delta = token_delta("r", 0, Output([12], [{12: Candidate(-0.5, 1)}]), logprobs=0, cached_tokens=None)
    assert delta.logprobs == (PositionLogprobs(TokenLogprob(12, -0.5, 1)),)


def test_logprobs_nobody_asked_for_are_dropped() -> None:
    delta = token_delta("r", 0, Output([12], [{12: Candidate(-0.5, 1)}]), logprobs=None, cached_tokens=None)
    assert delta.logprobs == ()
