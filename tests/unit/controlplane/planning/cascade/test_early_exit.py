"""What a tier generates of answers that it gives up."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.cascade_goal import Minimise
from controlplane.planning.cascade.bilevel import PlanRequest, plan
from controlplane.planning.cascade.early_exit import ScoreBounds
from controlplane.planning.cascade.latency import STATISTIC
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.cascade.routing import ESCALATE_ALL, route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.tables import latencies_of, tier_tables
from controlplane.planning.cascade.work import TierWork
from controlplane.protocols.cascade.confidence import RunningConfidence, confidence_of
from mesh.errors import ConfigurationError
from tests.unit.controlplane.planning.cascade.analytic_source import AnalyticSource, random_sample, with_score_bounds

SHAPES = [(ReplicaShape(1), ReplicaShape(2)), (ReplicaShape(1), ReplicaShape(2)), (ReplicaShape(4), ReplicaShape(8))]
TOKEN_S = [0.001, 0.006, 0.03]
OBJECTIVES: tuple[Minimise, ...] = ("slowest_tier", "end_to_end")


def one_answer(score_bounds: ScoreBounds, output_tokens: int, score: float) -> CascadeSample:
    """Of the first of two tiers."""
    return CascadeSample(
        scores=np.array([[score, 100.0]]),
        input_tokens=np.array([5]),
        output_tokens=np.array([[output_tokens, 9]]),
        rate_per_s=1.0,
        score_bounds=((score_bounds, ()),),
    )


@given(seed=st.integers(0, 1000), threshold=st.one_of(st.floats(0, 100), st.sampled_from([0.0, 40.0, 80.0, 100.0])))
def test_an_answer_is_given_up_at_its_first_bound_below_the_threshold(seed: int, threshold: float) -> None:
    sample = with_score_bounds(random_sample(seed, 20, 3), seed)
    assert sample.score_bounds is not None
    for tier in range(2):
        for row, tokens in enumerate(sample.tokens(tier, threshold)):
            below = [at for at, score in sample.score_bounds[row][tier] if score < threshold]
            assert tokens == (below[0] if below else sample.output_tokens[row, tier])
    assert (sample.tokens(2, threshold) == sample.output_tokens[:, 2]).all(), "the last gives none up"


@given(logprobs=st.lists(st.floats(-9, 0), min_size=1, max_size=60), threshold=st.floats(0, 100))
def test_the_planner_counts_the_tokens_after_which_a_live_answer_is_given_up(
    logprobs: list[float], threshold: float
) -> None:
    whole = confidence_of(logprobs)
    running = RunningConfidence()
    for logprob in logprobs:
        running.add(logprob)
        if running.score < threshold:
            break
    sample = one_answer(tuple(whole.score_bounds), len(logprobs), whole.score)
    assert sample.tokens(0, threshold).tolist() == [running.tokens]


def test_a_tier_that_accepts_none_gives_every_answer_up_at_once() -> None:
    sample = with_score_bounds(random_sample(1, 20, 3), 1)
    routed = route(sample, (ESCALATE_ALL, 0.0))
    assert routed.output_tokens[:, 0].tolist() == [1] * 20
    assert (routed.output_tokens[:, 1:] == sample.output_tokens[:, 1:]).all()


def test_a_score_that_was_rounded_otherwise_than_its_bound_decides() -> None:
    sample = one_answer(((4, 90.0), (7, 79.996)), 30, 80.0)
    assert sample.tokens(0, 80.0).tolist() == [30], "it is accepted"
    assert sample.tokens(0, 80.1).tolist() == [7]


@pytest.mark.parametrize(
    ("score_bounds", "words"),
    [
        (((4, 90.0), (3, 70.0)), "ascending tokens"),
        (((4, 60.0), (5, 70.0)), "falling scores"),
        (((0, 70.0),), "within it"),
        (((31, 70.0),), "answer of 30 tokens"),
        (((4, 170.0), (9, 70.0)), "from 0 to 100"),
        (((4, 65.0),), "65, not 70"),
        ((), "100, not 70"),
    ],
)
def test_score_bounds_that_contradict_the_answer_are_refused(score_bounds: ScoreBounds, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"request 0 of a sample on tier 0: .*{words}"):
        one_answer(score_bounds, 30, 70.0)


def test_a_sample_has_the_score_bounds_of_all_answers_or_none() -> None:
    sample = with_score_bounds(random_sample(1, 3, 2), 1)
    assert sample.score_bounds is not None
    for wrong in (sample.score_bounds[1:], tuple(answers[1:] for answers in sample.score_bounds)):
        with pytest.raises(ConfigurationError, match="3 requests on 2 tiers, or none"):
            replace(sample, score_bounds=wrong)
    for_the_last = replace(sample, score_bounds=tuple((answers[0], ()) for answers in sample.score_bounds))
    assert (for_the_last.tokens(0, 60.0) == sample.tokens(0, 60.0)).all()


def test_work_is_linear_between_the_first_token_and_the_last() -> None:
    work = TierWork(np.array([1.0, 1.0, 2.0]), np.array([5.0, 5.0, 2.0]), np.array([5, 5, 1]))
    assert work.seconds(np.array([1, 4, 1])).tolist() == [1.0, 4.0, 2.0]
    whole_s = np.random.default_rng(1).uniform(1, 2, 3)
    assert (replace(work, whole_s=whole_s).seconds(work.output_tokens) == whole_s).all()


@pytest.mark.parametrize("minimise", OBJECTIVES)
def test_without_score_bounds_tables_are_those_of_whole_answers_bit_for_bit(minimise: Minimise) -> None:
    sample = random_sample(4, 150, 3, levels=40)
    answers = zip(sample.output_tokens.tolist(), sample.scores.tolist(), strict=True)
    at_the_end = tuple(
        tuple(((tokens, score),) if score < 100 else () for tokens, score in zip(*answer, strict=True))
        for answer in answers
    )
    given_up_at_the_end = replace(sample, score_bounds=at_the_end)
    for first, then in (((50.0, 60.0), (30.0, 80.0)), ((0.0, 0.0), (45.0, ESCALATE_ALL))):
        bits: list[bytes] = []
        for each in (sample, given_up_at_the_end):
            source = AnalyticSource(each, TOKEN_S, SHAPES)
            tables = tier_tables(each, route(each, first), source, 24, 0.1, STATISTIC[minimise])
            bits.append(b"".join(latency.tobytes() for latency in latencies_of(each, route(each, then), tables)))
        assert bits[0] == bits[1]


def test_answers_that_are_given_up_do_not_wait_for_the_judge() -> None:
    sample = with_score_bounds(random_sample(4, 150, 3, levels=40), 4)
    source = AnalyticSource(sample, TOKEN_S, SHAPES)
    for threshold in (0.0, 1.0, 40.0, 100.0):
        routed = route(sample, (threshold, 0.0))
        whole = float((routed.output_tokens[:, 0] == sample.output_tokens[:, 0]).mean()) if threshold else 0.0
        for statistic, added_s in (("mean", 9.0 * whole), ("p95", 9.0 if whole else 0.0)):
            at_once, judged = (tier_tables(sample, routed, source, 8, judge_s, statistic)[0] for judge_s in (0.0, 9.0))
            difference_s = judged.latencies_s(routed, 1.0)[2:] - at_once.latencies_s(routed, 1.0)[2:]
            assert difference_s == pytest.approx(added_s)


@pytest.mark.slow
@pytest.mark.parametrize("minimise", OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_that_escalates_costs_less_where_answers_are_given_up(seed: int, minimise: Minimise) -> None:
    whole = random_sample(seed, 150, 3, rate_per_s=4.0, levels=40)
    given_up = with_score_bounds(whole, seed)
    request = PlanRequest(gpus=32, quality=75.0, judge_s=0.05, minimise=minimise)
    without, planned = (plan(each, AnalyticSource(each, TOKEN_S, SHAPES), request) for each in (whole, given_up))
    assert planned.routed.quality >= 75.0
    assert planned.routed.shares[-1] > 0
    assert planned.deployment.latency_s < without.deployment.latency_s
    again = route(given_up, planned.thresholds)
    assert again.shares == planned.routed.shares
    assert again.quality == route(whole, planned.thresholds).quality, "it changes no decision"
    assert again.output_tokens.sum() < whole.output_tokens.sum()
