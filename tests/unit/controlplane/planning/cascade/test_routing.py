"""Thresholds and what they do to a sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.planning.cascade.routing import (
    ESCALATE_ALL,
    candidate_thresholds,
    proportional_thresholds,
    route,
)
from controlplane.planning.cascade.sample import CascadeSample
from mesh.errors import ConfigurationError
from tests.unit.controlplane.planning.cascade.analytic_source import random_sample


def test_a_request_goes_up_until_its_score_meets_the_threshold() -> None:
    sample = CascadeSample(
        scores=np.array([[80.0, 10, 10], [20.0, 70, 10], [20.0, 30, 50]]),
        input_tokens=np.array([5, 5, 5]),
        output_tokens=np.ones((3, 3), np.int64),
        rate_per_s=1.0,
    )
    routed = route(sample, (50.0, 60.0))
    assert routed.answered_by.tolist() == [0, 1, 2]
    assert routed.reached.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert routed.quality == pytest.approx((80 + 70 + 50) / 3)
    assert routed.shares == pytest.approx((1.0, 2 / 3, 1 / 3))


def test_a_score_equal_to_the_threshold_is_accepted() -> None:
    sample = random_sample(1, 50, 2)
    assert route(sample, (0.0,)).answered_by.tolist() == [0] * 50
    assert route(sample, (ESCALATE_ALL,)).answered_by.tolist() == [1] * 50
    assert (route(sample, (100.0,)).answered_by == (sample.scores[:, 0] < 100)).all()


def test_a_tier_that_accepts_none_is_skipped_and_one_that_accepts_all_is_not_judged() -> None:
    sample = random_sample(1, 50, 4)
    routed = route(sample, (ESCALATE_ALL, ESCALATE_ALL, 60.0))
    assert routed.shares == pytest.approx((0.0, 0.0, 1.0, (sample.scores[:, 2] < 60).mean()))
    assert routed.is_judged == (False, False, True, False)
    assert set(routed.answered_by.tolist()) == {2, 3}
    assert route(sample, (ESCALATE_ALL, 100.0, 60.0)).shares[1] == 1.0
    assert (routed.output_tokens == sample.output_tokens).all()
    assert route(sample, (100.0, 0.0, 60.0)).is_judged == (True, False, True, False)


@pytest.mark.parametrize("tier", range(3))
def test_every_model_by_itself_is_a_routing(tier: int) -> None:
    sample = random_sample(2, 50, 3)
    routed = route(sample, ((ESCALATE_ALL,) * tier + (0.0,) * 2)[:2])
    assert routed.shares == tuple(float(other == tier) for other in range(3))
    assert not any(routed.is_judged[: tier + 1])
    assert routed.quality == pytest.approx(sample.scores[:, tier].mean())


def test_quality_counts_what_answers_are_worth_not_what_the_judge_saw() -> None:
    sample = CascadeSample(
        scores=np.array([[90.0, 10.0]]),
        input_tokens=np.array([1]),
        output_tokens=np.array([[1, 1]]),
        rate_per_s=1.0,
        quality=np.array([[0.0, 100.0]]),
    )
    assert route(sample, (50.0,)).quality == 0.0
    assert route(sample, (95.0,)).quality == 100.0


def test_the_first_routing_gives_tier_i_an_i_th_of_the_requests() -> None:
    rng = np.random.default_rng(3)
    sample = CascadeSample(rng.uniform(0, 100, (600, 4)), np.full(600, 9), np.full((600, 4), 9), 1.0)
    assert route(sample, proportional_thresholds(sample)).shares == pytest.approx((1, 1 / 2, 1 / 3, 1 / 4), abs=0.01)


@given(seed=st.integers(0, 10_000), tiers=st.integers(1, 4), most=st.integers(3, 12))
def test_candidates_are_bounded_ascending_and_have_both_ends(seed: int, tiers: int, most: int) -> None:
    sample = random_sample(seed, 40, tiers, levels=30)
    for candidates in candidate_thresholds(sample, most):
        assert len(candidates) <= most
        assert candidates[0] == 0
        assert candidates[-1] == ESCALATE_ALL
        assert list(candidates) == sorted(set(candidates))


@given(seed=st.integers(0, 10_000), thresholds=st.tuples(st.floats(0, 100), st.floats(0, 100)))
def test_every_request_is_answered_once_by_the_last_tier_it_reaches(seed: int, thresholds: tuple[float, float]) -> None:
    routed = route(random_sample(seed, 30, 3), thresholds)
    assert (routed.reached.sum(axis=1) == routed.answered_by + 1).all()
    assert list(routed.shares) == sorted(routed.shares, reverse=True)


@pytest.mark.parametrize("thresholds", [(), (1.0, 2.0), (-1.0,), (101.0,), (float("nan"),)])
def test_thresholds_that_make_no_sense_are_refused(thresholds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigurationError, match="threshold"):
        route(random_sample(1, 5, 2), thresholds)


def test_samples_that_contradict_themselves_are_refused() -> None:
    ones = np.ones((2, 2), np.int64)
    with pytest.raises(ConfigurationError, match="rescale"):
        CascadeSample(np.full((2, 2), 101.0), np.ones(2, np.int64), ones, 1.0)
    with pytest.raises(ConfigurationError, match="shape"):
        CascadeSample(np.full((2, 2), 1.0), np.ones(3, np.int64), ones, 1.0)
    with pytest.raises(ConfigurationError, match="rate"):
        CascadeSample(np.full((2, 2), 1.0), np.ones(2, np.int64), ones, 0.0)
