"""Range refinement: every splitting point is tried, and boundaries neither jump nor leave their neighbours."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.planning.qoe import BatchLoad, QoeModel
from controlplane.policies.stages.refinement import (
    Boundary,
    Refinement,
    RefinementParameters,
    RequestLength,
    best_split,
    even_share,
)

MODEL = QoeModel(8.0, 0.05, 1e-4, 1e-8, 2e-4)


@st.composite
def request_lengths(draw: st.DrawFn) -> RequestLength:
    input_tokens = draw(st.integers(0, 5000))
    return RequestLength(input_tokens, input_tokens + draw(st.integers(1, 2000)))


requests = st.lists(request_lengths(), min_size=1, max_size=40)


def of_length(*lengths: int) -> list[RequestLength]:
    return [RequestLength(length // 2, length) for length in lengths]


def quality(part: list[RequestLength]) -> float:
    load = BatchLoad(
        len(part),
        sum(r.input_tokens for r in part),
        sum(r.input_tokens**2 for r in part),
        sum(r.total_tokens for r in part),
    )
    return len(part) * MODEL.normalised_latency_ms(load)


@settings(deadline=None)
@given(requests)
def test_no_other_split_is_better(both: list[RequestLength]) -> None:
    ordered = sorted(both, key=lambda request: request.total_tokens)
    costs = [quality(ordered[:i]) + quality(ordered[i:]) for i in range(len(ordered))]
    split = best_split(both, Refinement.QUALITY, MODEL)
    chosen = [cost for cost, request in zip(costs, ordered, strict=True) if request.total_tokens == split]
    assert min(chosen) == pytest.approx(min(costs))


def test_short_ones_that_are_many_are_kept_from_long_ones() -> None:
    assert best_split(of_length(*[100] * 30, 9000, 9000), Refinement.QUALITY, MODEL) == 9000


def test_rivals_count_requests_or_tokens() -> None:
    both = of_length(10, 20, 30, 40, 100, 1000)
    assert best_split(both, Refinement.QUANTITY, MODEL) == 40
    assert best_split(both, Refinement.MEMORY, MODEL) == 1000
    assert best_split(both, Refinement.FROZEN, MODEL) is None
    assert best_split(of_length(10, 20), Refinement.QUANTITY, MODEL) == 20, "one for each"


@settings(deadline=None)
@given(requests, st.integers(1, 8))
def test_shares_are_even(union: list[RequestLength], parts: int) -> None:
    share = even_share(union, parts)
    assert abs(len(share) - len(union) / parts) <= 1
    assert share == sorted(share, key=lambda request: request.total_tokens)


def test_a_share_begins_in_the_middle() -> None:
    assert [r.total_tokens for r in even_share(of_length(50, 10, 30, 20, 40, 60), 3)] == [20, 50]
    assert [r.total_tokens for r in even_share(of_length(30, 10, 20, 40), 2)] == [20, 40]


def test_a_boundary_moves_by_the_weight() -> None:
    boundary = Boundary(1000, RefinementParameters(smoothing=0.25))
    assert boundary.refine(of_length(*[100] * 30), [of_length(9000, 9000)], MODEL)
    assert boundary.tokens == pytest.approx(0.75 * 1000 + 0.25 * 9000)


def test_little_traffic_leaves_the_boundary() -> None:
    boundary = Boundary(1000, RefinementParameters())
    assert not boundary.refine(of_length(100, 100), [of_length(9000, 9000)], MODEL)
    assert not boundary.refine(of_length(*[100] * 30), [], MODEL)
    assert boundary.tokens == 1000
    assert boundary.refine(of_length(100, 100, 100), [of_length(9000, 9000)], MODEL), "five are enough"


def test_a_boundary_of_one_token_is_the_lowest() -> None:
    boundary = Boundary(5, RefinementParameters(smoothing=1.0))
    assert boundary.refine(of_length(1, 1, 1), [of_length(1, 1)], MODEL)
    assert boundary.tokens == 1


def test_a_frozen_boundary_never_moves() -> None:
    boundary = Boundary(1000, RefinementParameters(policy=Refinement.FROZEN))
    assert not boundary.refine(of_length(*[100] * 30), [of_length(9000, 9000)], MODEL)


@settings(deadline=None)
@given(requests, requests, st.integers(1, 3000), st.integers(2, 3000), st.sampled_from(Refinement))
def test_a_boundary_stays_between_its_neighbours(
    own: list[RequestLength], theirs: list[RequestLength], lower: int, width: int, policy: Refinement
) -> None:
    boundary = Boundary(lower + width / 2, RefinementParameters(policy=policy, smoothing=1.0))
    boundary.refine(own, [theirs], MODEL, lower_tokens=lower, upper_tokens=lower + width)
    assert lower < boundary.tokens < lower + width or width < 2


@pytest.mark.parametrize(("lower", "upper", "tokens"), [(9500.0, 9900.0, 9501), (10.0, 900.0, 899), (700, 701, 701)])
def test_a_boundary_comes_within_a_token_of_its_neighbours(lower: float, upper: float, tokens: float) -> None:
    boundary = Boundary(1000, RefinementParameters(smoothing=1.0))
    both = (of_length(*[100] * 30), [of_length(9000, 9000)])
    assert boundary.refine(*both, MODEL, lower_tokens=lower, upper_tokens=upper)
    assert boundary.tokens == tokens


def test_steady_lengths_are_converged_to() -> None:
    boundary = Boundary(100, RefinementParameters())
    for _ in range(40):
        boundary.refine(of_length(*[100] * 30), [of_length(9000, 9000)], MODEL, upper_tokens=inf)
    assert boundary.tokens == pytest.approx(9000, rel=0.01)
