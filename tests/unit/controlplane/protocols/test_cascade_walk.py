"""A request's way up the cascade: by example, and under any course of events."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.cascade.terms import CascadeTerms, WithoutJudge, thresholds_for
from controlplane.protocols.cascade.walk import (
    TRANSITIONS,
    Accept,
    Action,
    Because,
    CascadeWalk,
    Escalation,
    Fail,
    Generate,
    Judge,
    WalkState,
)
from mesh.errors import ConfigurationError, IllegalTransition

THREE = CascadeTerms(thresholds=(80.0, 60.0), expected_s=(1.0, 5.0, 20.0))


def test_an_answer_that_scores_enough_is_accepted() -> None:
    walk = CascadeWalk("r", THREE)
    assert walk.first == Generate(0)
    assert walk.answered(0, 1.0) == Judge(0)
    assert walk.judged(0, 80.0, 2.0) == Accept(0, Because.SCORE)


def test_answers_that_score_too_little_go_up_to_the_last_tier_which_is_not_judged() -> None:
    walk = CascadeWalk("r", THREE)
    walk.answered(0, 1.0)
    assert walk.judged(0, 79.9, 2.0) == Generate(1, Escalation.LOW_SCORE)
    assert walk.answered(1, 3.0) == Judge(1)
    assert walk.judged(1, 10.0, 4.0) == Generate(2, Escalation.LOW_SCORE)
    accepted = walk.answered(2, 5.0)
    assert accepted == Accept(2, Because.LAST_TIER)
    assert walk.scores == {0: 79.9, 1: 10.0}


def test_a_tier_that_would_come_too_late_is_not_begun_and_the_best_so_far_is_taken() -> None:
    walk = CascadeWalk("r", CascadeTerms((80.0, 60.0), (1.0, 5.0, 20.0), deadline_s=12.0))
    walk.answered(0, 1.0)
    walk.judged(0, 50.0, 2.0)
    assert walk.answered(1, 6.0) == Accept(1, Because.DEADLINE), "nobody found it wanting, as the first"
    assert walk.state is WalkState.DONE
    late = CascadeWalk("r", CascadeTerms((80.0, 60.0), (1.0, 5.0, 20.0), deadline_s=30.0))
    late.answered(0, 1.0)
    late.judged(0, 50.0, 2.0)
    assert late.answered(1, 6.0) == Judge(1)
    assert late.judged(1, 40.0, 11.0) == Accept(0, Because.DEADLINE), "tier 0 scored higher"


def test_an_answer_that_nobody_could_judge_counts_as_what_its_tier_asks_for() -> None:
    terms = CascadeTerms((80.0, 60.0, 50.0), (0.0,) * 4, max_tier=2)
    walk = CascadeWalk("r", terms)
    walk.answered(0, 1.0)
    walk.not_judged(0, 1.0)
    walk.answered(1, 1.0)
    walk.judged(1, 59.0, 1.0)
    assert walk.failed(2, "gone", 2.0) == Accept(0, Because.TIER_FAILED)


def test_with_no_time_for_a_second_tier_nobody_is_bothered_to_judge_the_first() -> None:
    walk = CascadeWalk("r", CascadeTerms((80.0,), (1.0, 5.0), deadline_s=3.0))
    accepted = walk.answered(0, 1.0)
    assert accepted == Accept(0, Because.DEADLINE)
    assert accepted.is_compromise


def test_a_request_goes_no_further_than_it_may() -> None:
    walk = CascadeWalk("r", CascadeTerms((80.0, 60.0), (0.0, 0.0, 0.0), max_tier=1))
    walk.answered(0, 1.0)
    walk.judged(0, 0.0, 1.0)
    assert walk.answered(1, 1.0) == Accept(1, Because.LAST_TIER)


@pytest.mark.parametrize(
    ("without", "expected"),
    [(WithoutJudge.ESCALATE, Generate(1, Escalation.NOT_JUDGED)), (WithoutJudge.ACCEPT, Accept(0, Because.JUDGE_DOWN))],
)
def test_without_a_judge_the_terms_decide(without: WithoutJudge, expected: Action) -> None:
    walk = CascadeWalk("r", CascadeTerms((80.0,), (0.0, 0.0), without_judge=without))
    walk.answered(0, 1.0)
    assert walk.not_judged(0, 1.0) == expected


def test_tiers_that_fail_are_passed_over() -> None:
    walk = CascadeWalk("r", THREE)
    assert walk.failed(0, "no instance", 1.0) == Generate(1, Escalation.TIER_FAILED)
    assert walk.answered(1, 2.0) == Judge(1)
    assert walk.judged(1, 10.0, 2.0) == Generate(2, Escalation.LOW_SCORE)
    assert walk.failed(2, "no instance", 3.0) == Accept(1, Because.TIER_FAILED)


def test_if_no_tier_can_answer_the_client_hears_of_each() -> None:
    walk = CascadeWalk("r", CascadeTerms((80.0,), (0.0, 0.0)))
    walk.failed(0, "overloaded", 1.0)
    failed = walk.failed(1, "gone", 1.0)
    assert isinstance(failed, Fail)
    assert "overloaded" in failed.reason
    assert "gone" in failed.reason


def test_time_that_runs_out_during_a_further_tier_brings_the_best_so_far() -> None:
    walk = CascadeWalk("r", THREE)
    assert walk.out_of_time() is None, "there is no answer yet"
    walk.answered(0, 1.0)
    walk.judged(0, 50.0, 2.0)
    assert walk.out_of_time() == Accept(0, Because.DEADLINE)
    assert walk.out_of_time() is None


def test_an_answer_that_cannot_score_enough_any_more_is_given_up() -> None:
    walk = CascadeWalk("r", THREE)
    assert walk.may_give_up
    assert walk.gave_up(0, 79.0) == Generate(1, Escalation.GIVEN_UP)
    assert walk.answered(1, 2.0) == Judge(1)
    assert walk.judged(1, 60.0, 2.0) == Accept(1, Because.SCORE)
    assert walk.scores == {0: 79.0, 1: 60.0}


def test_an_answer_that_may_be_needed_is_not_given_up() -> None:
    last = CascadeWalk("r", CascadeTerms((80.0,), (0.0, 0.0), max_tier=0))
    assert not last.may_give_up
    hurried = CascadeWalk("r", CascadeTerms((80.0,), (1.0, 1.0), deadline_s=9.0))
    assert not hurried.may_give_up, "the deadline may need it"
    with pytest.raises(IllegalTransition, match="given up"):
        hurried.gave_up(0, 10.0)
    with pytest.raises(IllegalTransition, match="given up"):
        CascadeWalk("r", THREE).gave_up(0, 80.0)


def test_an_answer_that_was_given_up_is_asked_for_again_if_all_further_tiers_fail() -> None:
    walk = CascadeWalk("r", THREE)
    walk.gave_up(0, 10.0)
    walk.gave_up(1, 20.0)
    assert walk.failed(2, "gone", 1.0) == Generate(1, Escalation.TIER_FAILED)
    assert not walk.may_give_up
    assert walk.answered(1, 2.0) == Accept(1, Because.TIER_FAILED)
    broken = CascadeWalk("r", THREE)
    broken.gave_up(0, 10.0)
    broken.failed(1, "gone", 1.0)
    assert broken.failed(2, "gone", 1.0) == Generate(0, Escalation.TIER_FAILED)
    assert isinstance(broken.failed(0, "gone too", 1.0), Fail)


def test_a_further_tier_that_accepts_nothing_is_not_asked() -> None:
    walk = CascadeWalk("r", CascadeTerms((80.0, 100.1, 60.0), (0.0,) * 4))
    walk.answered(0, 1.0)
    assert walk.judged(0, 10.0, 1.0) == Generate(2, Escalation.LOW_SCORE)
    capped = CascadeWalk("r", CascadeTerms((80.0, 100.1, 60.0), (0.0,) * 4, max_tier=1))
    assert capped.gave_up(0, 10.0) == Generate(1, Escalation.GIVEN_UP)
    assert capped.answered(1, 1.0) == Accept(1, Because.LAST_TIER)


def test_a_first_tier_that_accepts_nothing_is_not_asked_either() -> None:
    walk = CascadeWalk("r", CascadeTerms((100.1, 60.0), (0.0,) * 3))
    assert walk.first == Generate(1)
    assert walk.gave_up(1, 10.0) == Generate(2, Escalation.GIVEN_UP)
    assert CascadeWalk("r", CascadeTerms((100.1, 100.1), (0.0,) * 3)).first == Generate(2)
    assert CascadeWalk("r", CascadeTerms((100.1, 60.0), (0.0,) * 3, max_tier=0)).first == Generate(0)


def test_requests_reach_tiers_that_accept_something_up_to_one_that_accepts_all() -> None:
    assert THREE.reached == (0, 1, 2)
    assert CascadeTerms((100.1, 60.0), (0.0,) * 3).reached == (1, 2)
    assert CascadeTerms((80.0, 0.0), (0.0,) * 3).reached == (0, 1)
    assert CascadeTerms((100.1, 60.0), (0.0,) * 3, max_tier=1).reached == (1,)


def test_tiers_that_accept_nothing_answer_if_no_other_can() -> None:
    walk = CascadeWalk("r", CascadeTerms((100.1, 60.0, 100.1), (0.0,) * 4))
    walk.gave_up(1, 10.0)
    assert walk.failed(3, "loading", 1.0) == Generate(1, Escalation.TIER_FAILED), "it has answered before"
    assert walk.failed(1, "gone", 1.0) == Generate(2, Escalation.TIER_FAILED)
    assert walk.will_accept is Because.TIER_FAILED
    assert walk.failed(2, "gone", 1.0) == Generate(0, Escalation.TIER_FAILED)
    assert walk.answered(0, 2.0) == Accept(0, Because.TIER_FAILED)


def test_an_answer_that_any_score_would_do_for_is_not_judged() -> None:
    walk = CascadeWalk("r", CascadeTerms((80.0, 0.0), (0.0,) * 3))
    assert not walk.will_accept
    walk.gave_up(0, 10.0)
    assert walk.will_accept
    assert not walk.may_give_up
    accepted = walk.answered(1, 1.0)
    assert accepted == Accept(1, Because.ACCEPTS_ALL)
    assert not accepted.is_compromise
    broken = CascadeWalk("r", CascadeTerms((0.0,), (0.0, 0.0)))
    assert broken.failed(0, "gone", 1.0) == Generate(1, Escalation.TIER_FAILED)


def test_an_answer_that_may_be_cut_for_another_is_not_yet_the_clients() -> None:
    walk = CascadeWalk("r", CascadeTerms((80.0,), (1.0, 1.0), deadline_s=9.0))
    walk.answered(0, 1.0)
    walk.judged(0, 10.0, 1.0)
    assert not walk.will_accept, "the deadline may bring the first tier's"
    assert CascadeWalk("r", CascadeTerms((0.0,), (1.0, 1.0), deadline_s=9.0)).will_accept


def test_events_out_of_place_raise_with_the_story() -> None:
    walk = CascadeWalk("request-7", THREE)
    with pytest.raises(IllegalTransition, match="request-7, generating on tier 0"):
        walk.judged(0, 50.0, 1.0)
    with pytest.raises(IllegalTransition, match="tier 1"):
        walk.answered(1, 1.0)
    walk.answered(0, 1.0)
    with pytest.raises(IllegalTransition, match="score"):
        walk.judged(0, 101.0, 1.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"expected_s": (1.0,)}, "expected"),
        ({"max_tier": 3}, "none of this cascade's"),
        ({"thresholds": (-1.0, 2.0)}, "scores"),
    ],
)
def test_terms_that_make_no_sense_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        CascadeTerms(**{"thresholds": (80.0, 60.0), "expected_s": (1.0, 5.0, 20.0), **wrong})  # type: ignore[arg-type]


def test_a_request_may_ask_for_a_quality_of_its_own() -> None:
    assert thresholds_for((80.0, 60.0), None) == (80.0, 60.0)
    assert thresholds_for((80.0, 60.0), 95.0) == (95.0, 95.0)
    with pytest.raises(ConfigurationError, match="score"):
        thresholds_for((80.0,), 101.0)


@st.composite
def courses(draw: st.DrawFn) -> tuple[CascadeTerms, list[tuple[str, float, float]]]:
    tiers = draw(st.integers(1, 4))
    terms = CascadeTerms(
        thresholds=tuple(draw(st.lists(st.floats(0, 101), min_size=tiers - 1, max_size=tiers - 1))),
        expected_s=tuple(draw(st.lists(st.floats(0, 10), min_size=tiers, max_size=tiers))),
        deadline_s=draw(st.none() | st.floats(0, 30)),
        max_tier=draw(st.none() | st.integers(0, tiers - 1)),
        without_judge=draw(st.sampled_from(WithoutJudge)),
    )
    what = st.sampled_from(["well", "badly", "hopeless", "out of time"])
    return terms, draw(st.lists(st.tuples(what, st.floats(0, 100), st.floats(0, 5)), min_size=12, max_size=12))


@given(courses())
def test_every_course_ends_with_one_answer_that_a_tier_gave_or_with_every_tier_failed(
    course: tuple[CascadeTerms, list[tuple[str, float, float]]],
) -> None:
    terms, events = course
    walk = CascadeWalk("r", terms)
    action: Action = walk.first
    answered: list[int] = []
    asked: list[int] = []
    given_up: list[int] = []
    now_s = 0.0
    for what, score, took_s in events:
        before = walk.state
        now_s += took_s
        out_of_time = walk.out_of_time() if what == "out of time" else None
        if out_of_time is not None:
            action = out_of_time
        elif isinstance(action, Generate):
            if asked and terms.deadline_s is not None and answered:
                assert now_s - took_s + terms.expected_s[action.tier] <= terms.deadline_s
            asked.append(action.tier)
            will_accept = walk.will_accept
            if what == "hopeless" and walk.may_give_up and score < terms.thresholds[action.tier]:
                given_up.append(action.tier)
                action = walk.gave_up(action.tier, score)
            elif what in ("well", "hopeless"):
                answered.append(action.tier)
                action = walk.answered(action.tier, now_s)
                assert will_accept is None or action == Accept(asked[-1], will_accept)
            else:
                action = walk.failed(action.tier, "broken", now_s)
        elif isinstance(action, Judge):
            assert 0 < terms.thresholds[action.tier] <= 100
            judged = what == "well"
            action = walk.judged(action.tier, score, now_s) if judged else walk.not_judged(action.tier, now_s)
        walk.validate()
        assert walk.state is before or walk.state in TRANSITIONS[before]
        if isinstance(action, Accept | Fail):
            break
    assert isinstance(action, Accept | Fail)
    upwards = asked[: asked.index(terms.last_tier) + 1] if terms.last_tier in asked else asked
    assert upwards == sorted(set(upwards))
    assert all(terms.accepts_some(tier) for tier in upwards)
    again, reserves = given_up[::-1], [tier for tier in range(terms.last_tier)[::-1] if not terms.accepts_some(tier)]
    falling_back = asked[len(upwards) :]
    assert falling_back == [*again, *reserves][: len(falling_back)], "first what was given up, then what was left out"
    assert max(asked) <= terms.last_tier
    if isinstance(action, Accept):
        assert action.tier in answered
    else:
        assert not answered
        assert upwards[-1] == terms.last_tier
        assert set(asked) == set(range(terms.last_tier + 1)), "every tier was tried"
        assert len(falling_back) == len(again) + len(reserves)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (lambda walk: walk.answered(1, 1.0), "tier 1 has answered"),
        (lambda walk: walk.failed(1, "gone", 1.0), "tier 1 has failed"),
        (lambda walk: walk.gave_up(1, 5.0), "tier 1 has been given up"),
        (lambda walk: walk.judged(0, 5.0, 1.0), "tier 0 has judged"),
        (lambda walk: walk.not_judged(0, 1.0), "tier 0 has not judged"),
    ],
)
def test_an_event_out_of_place_is_named(event: Callable[[CascadeWalk], object], words: str) -> None:
    with pytest.raises(IllegalTransition, match=f"{words}$"):
        event(CascadeWalk("r", THREE))


def test_a_step_that_there_is_not_tells_the_story() -> None:
    walk = CascadeWalk("r", THREE)
    walk.gave_up(0, 0.0)
    assert walk.failed(1, "gone", 1.0) == Generate(2, Escalation.TIER_FAILED)
    assert walk.answered(2, 2.0) == Accept(2, Because.LAST_TIER)
    story = r"request r, done on tier 2, answered by \[2\], given up \[0\], .*gone.* cannot become judging"
    with pytest.raises(IllegalTransition, match=story):
        walk._go(WalkState.JUDGING)


def test_scores_go_from_0_to_100_both_included() -> None:
    strict = CascadeTerms((100.0,), (0.0, 0.0))
    best, worst = CascadeWalk("r", strict), CascadeWalk("r", strict)
    best.answered(0, 1.0)
    assert best.judged(0, 100.0, 1.0) == Accept(0, Because.SCORE)
    worst.answered(0, 1.0)
    assert worst.judged(0, 0.0, 1.0) == Generate(1, Escalation.LOW_SCORE)
    assert CascadeWalk("r", strict).first == Generate(0), "a perfect answer would do"


def test_a_tier_that_is_expected_to_answer_just_in_time_is_begun() -> None:
    terms = CascadeTerms((80.0,), (1.0, 5.0), deadline_s=7.0)
    walk = CascadeWalk("r", terms)
    assert walk.answered(0, 2.0) == Judge(0)
    assert walk.judged(0, 10.0, 2.0) == Generate(1, Escalation.LOW_SCORE)


@pytest.mark.parametrize(
    ("now_s", "expected"),
    [(5.0, Generate(1, Escalation.NOT_JUDGED)), (5.1, Accept(0, Because.DEADLINE))],
)
def test_an_answer_without_a_judge_goes_on_only_in_time(now_s: float, expected: Action) -> None:
    walk = CascadeWalk("r", CascadeTerms((80.0, 60.0), (1.0, 5.0, 5.0), deadline_s=10.0))
    assert walk.answered(0, 1.0) == Judge(0)
    assert walk.not_judged(0, now_s) == expected


@pytest.mark.parametrize(
    ("now_s", "expected"),
    [(5.0, Generate(2, Escalation.TIER_FAILED)), (5.1, Accept(0, Because.TIER_FAILED))],
)
def test_a_tier_that_fails_is_passed_over_only_in_time_once_there_is_an_answer(now_s: float, expected: Action) -> None:
    walk = CascadeWalk("r", CascadeTerms((80.0, 60.0), (1.0, 1.0, 5.0), deadline_s=10.0))
    walk.answered(0, 1.0)
    assert walk.judged(0, 10.0, 1.0) == Generate(1, Escalation.LOW_SCORE)
    assert walk.failed(1, "gone", now_s) == expected


def test_terms_name_the_tiers_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"tier 3 is none of this cascade's, which are 0 to 2$"):
        CascadeTerms((80.0, 60.0), (1.0, 1.0, 1.0), max_tier=3)


def test_only_a_threshold_of_0_accepts_every_score_and_one_of_100_still_accepts_some() -> None:
    terms = CascadeTerms((100.0, 0.5), (0.0,) * 3)
    assert terms.accepts_some(0)
    assert not terms.accepts_all(1)


@pytest.mark.parametrize("quality", [0.0, 0.5, 100.0])
def test_any_score_may_be_asked_for(quality: float) -> None:
    assert thresholds_for((80.0,), quality) == (quality,)
