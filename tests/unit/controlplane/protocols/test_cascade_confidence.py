"""The confidence that only falls."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.cascade.confidence import FIRST_COUNTED_TOKEN, RunningConfidence, ScoreBound, confidence_of

logprobs = st.lists(st.floats(-20, 0), max_size=60)


def means(values: list[float]) -> list[float]:
    """After each token that counts."""
    counted = range(min(FIRST_COUNTED_TOKEN, len(values)), len(values) + 1) if values else ()
    return [100 * math.exp(math.fsum(values[:tokens]) / tokens) for tokens in counted]


@given(logprobs)
def test_it_is_the_lowest_mean_so_far(values: list[float]) -> None:
    assert confidence_of(values).score == pytest.approx(min([100.0, *means(values)]))


@given(logprobs, st.floats(0, 100))
def test_giving_up_below_a_threshold_decides_as_the_whole_answer_does(values: list[float], threshold: float) -> None:
    whole = confidence_of(values)
    running, given_up_at = RunningConfidence(), None
    for value in values:
        running.add(value)
        if running.score < threshold:
            given_up_at = running.tokens
            break
    if given_up_at is None:
        running.end()
        assert running.score == whole.score
    else:
        assert whole.score < threshold
        assert given_up_at == next(bound.tokens for bound in whole.score_bounds if bound.score < threshold)


@given(logprobs)
def test_score_bounds_descend(values: list[float]) -> None:
    score_bounds = confidence_of(values).score_bounds
    assert all(a.tokens < b.tokens and a.score > b.score for a, b in itertools.pairwise(score_bounds))
    assert all(bound.tokens <= len(values) for bound in score_bounds)


def test_the_first_tokens_of_a_longer_answer_do_not_count_alone() -> None:
    assert confidence_of([math.log(0.3)]).score == pytest.approx(30.0)
    assert confidence_of([math.log(0.0001), 0.0, 0.0, 0.0]).score == pytest.approx(10.0)
    assert confidence_of([]).score == 100.0


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_probability_that_is_none_makes_the_answer_worth_nothing(broken: float) -> None:
    assert confidence_of([-0.1, -0.1, broken, -0.1, -0.1]).score == 0.0
    assert confidence_of([broken]).score == 0.0
    assert confidence_of([0.0, 1e-9, 0.0]).score == 100.0, "rounded above 0"


def test_it_is_bounded_anew_only_where_it_falls() -> None:
    assert confidence_of([-1.0] * 8).score_bounds == [ScoreBound(4, 100 * math.exp(-1.0))]
    assert confidence_of([0.0] * 8).score_bounds == [], "it has not fallen from 100"


def test_a_probability_that_was_rounded_above_1_counts_as_1() -> None:
    assert confidence_of([-1.0, -1.0, -1.0, 0.5]).score == pytest.approx(100 * math.exp(-3 / 4))
