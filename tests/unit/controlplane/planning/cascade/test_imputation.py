"""What stands in for answers that were not given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.planning.cascade.imputation import impute_tier
from controlplane.planning.cascade.workload import WorkloadRequest, sample_of


def answered(tokens: int, small: float, large: float | None, written: int = 100) -> WorkloadRequest:
    return WorkloadRequest(tokens, (20, None if large is None else written), (small, large))


def test_the_most_alike_request_lends_its_answer_as_a_whole() -> None:
    short_hard, long_easy = answered(10, 20.0, 55.0, 111), answered(1000, 95.0, 99.0, 222)
    requests = (answered(12, 25.0, None), answered(900, 90.0, None), answered(10, 20.0, 77.0, 333))
    made = impute_tier(requests, 1, (short_hard, long_easy))
    assert [(request.scores[1], request.output_tokens[1]) for request in made] == [
        (55.0, 111),
        (99.0, 222),
        (77.0, 333),
    ]
    assert [request.scores[0] for request in made] == [25.0, 90.0, 20.0]


def test_scores_decide_between_prompts_of_a_length_and_lengths_where_no_score_is_known_on_both() -> None:
    hard, easy = answered(100, 20.0, 50.0), answered(100, 90.0, 98.0)
    assert impute_tier((answered(100, 80.0, None),), 1, (hard, easy))[0].scores[1] == 98.0
    alone = WorkloadRequest(40, (None, 5), (None, 70.0))
    donors = (WorkloadRequest(500, (7, None), (30.0, None)), WorkloadRequest(50, (8, None), (60.0, None)))
    (made,) = impute_tier((alone,), 0, donors)
    assert (made.scores, made.output_tokens) == ((60.0, 70.0), (8, 5))


def test_score_bounds_come_with_the_answer_they_belong_to() -> None:
    donor = WorkloadRequest(10, (4, 9), (30.0, 80.0), score_bounds=(((2, 30.0),), ((9, 80.0),)))
    gone = WorkloadRequest(10, (None, 7), (None, 60.0), score_bounds=(None, ((7, 60.0),)))
    made = impute_tier((gone,), 0, (donor,))
    sample = sample_of(1.0, made)
    assert sample.score_bounds == ((((2, 30.0),), ((7, 60.0),)),)
    assert sample.tokens(0, 50.0).tolist() == [2]


@given(
    tokens=st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 100)), min_size=1, max_size=20),
    donors=st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=20),
)
def test_every_request_becomes_complete_and_what_was_known_stays(
    tokens: list[tuple[int, float]], donors: list[tuple[int, float, float]]
) -> None:
    requests = [answered(length, score, None) for length, score in tokens]
    lenders = [answered(length, small, large, round(large) + 1) for length, small, large in donors]
    lent = {(lender.scores[1], lender.output_tokens[1]) for lender in lenders}
    for before, after in zip(requests, impute_tier(requests, 1, lenders), strict=True):
        assert after.is_complete
        assert (after.input_tokens, after.scores[0]) == (before.input_tokens, before.scores[0])
        assert (after.scores[1], after.output_tokens[1]) in lent


def test_a_request_that_is_complete_stays_itself_without_anybody_to_ask() -> None:
    whole = answered(10, 20.0, 55.0)
    assert impute_tier((whole,), 1, ()) == (whole,)
    with pytest.raises(ValueError, match="empty"):
        impute_tier((answered(10, 20.0, None),), 1, ())
