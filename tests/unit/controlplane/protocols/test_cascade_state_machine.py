"""A request's way up the cascade: by example, and under any course of events."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.cascade.state_machine import (
    TRANSITIONS,
    Accept,
    AcceptReason,
    Answered,
    Begin,
    Broken,
    CascadeState,
    CascadeStateMachine,
    EndedEarly,
    EscalationReason,
    Event,
    Fail,
    Generate,
    Instruction,
    Judge,
    Judged,
    NotJudged,
    Report,
    TierFailed,
)
from controlplane.protocols.cascade.terms import CascadeTerms, WithoutJudge, thresholds_for
from mesh.errors import ConfigurationError, IllegalTransition

THREE = CascadeTerms(thresholds=(80.0, 60.0), expected_s=(1.0, 5.0, 20.0))


def step(machine: CascadeStateMachine, event: Event, now_s: float) -> Instruction:
    """The one thing to do next, without what a tier is to be told beside it."""
    *_, last = machine.handle(event, now_s)
    machine.validate()
    if isinstance(last, Generate):
        return Generate(last.tier, last.reason)
    return Judge(last.tier) if isinstance(last, Judge) else last


def begun(terms: CascadeTerms, request_id: str = "r") -> CascadeStateMachine:
    """With its first tier asked."""
    machine = CascadeStateMachine(request_id, terms)
    machine.handle(Begin(), 0.0)
    return machine


def first(terms: CascadeTerms) -> Generate:
    (instruction,) = CascadeStateMachine("r", terms).handle(Begin(), 0.0)
    assert isinstance(instruction, Generate)
    return instruction


def asked_by(machine: CascadeStateMachine, event: Event, now_s: float = 0.0) -> Generate:
    """All that a further tier is asked with."""
    *_, last = machine.handle(event, now_s)
    assert isinstance(last, Generate)
    return last


def test_an_answer_that_scores_enough_is_accepted() -> None:
    walk = begun(THREE)
    assert first(THREE).tier == 0
    assert step(walk, Answered(0), 1.0) == Judge(0)
    assert step(walk, Judged(0, 80.0), 2.0) == Accept(0, AcceptReason.SCORE)


def test_answers_that_score_too_little_go_up_to_the_last_tier_which_is_not_judged() -> None:
    walk = begun(THREE)
    step(walk, Answered(0), 1.0)
    assert step(walk, Judged(0, 79.9), 2.0) == Generate(1, EscalationReason.LOW_SCORE)
    assert step(walk, Answered(1), 3.0) == Judge(1)
    assert step(walk, Judged(1, 10.0), 4.0) == Generate(2, EscalationReason.LOW_SCORE)
    accepted = step(walk, Answered(2), 5.0)
    assert accepted == Accept(2, AcceptReason.LAST_TIER)
    assert walk.scores == {0: 79.9, 1: 10.0}


def test_a_tier_that_would_come_too_late_is_not_begun_and_the_best_so_far_is_taken() -> None:
    walk = begun(CascadeTerms((80.0, 60.0), (1.0, 5.0, 20.0), deadline_s=12.0))
    step(walk, Answered(0), 1.0)
    step(walk, Judged(0, 50.0), 2.0)
    assert step(walk, Answered(1), 6.0) == Accept(1, AcceptReason.DEADLINE), "nobody found it wanting, as the first"
    assert walk.state is CascadeState.DONE
    late = begun(CascadeTerms((80.0, 60.0), (1.0, 5.0, 20.0), deadline_s=30.0))
    step(late, Answered(0), 1.0)
    step(late, Judged(0, 50.0), 2.0)
    assert step(late, Answered(1), 6.0) == Judge(1)
    assert step(late, Judged(1, 40.0), 11.0) == Accept(0, AcceptReason.DEADLINE), "tier 0 scored higher"


def test_an_answer_that_nobody_could_judge_counts_as_what_its_tier_asks_for() -> None:
    terms = CascadeTerms((80.0, 60.0, 50.0), (0.0,) * 4, max_tier=2)
    walk = begun(terms)
    step(walk, Answered(0), 1.0)
    step(walk, NotJudged(0), 1.0)
    step(walk, Answered(1), 1.0)
    step(walk, Judged(1, 59.0), 1.0)
    assert step(walk, TierFailed(2, "gone"), 2.0) == Accept(0, AcceptReason.TIER_FAILED)


def test_with_no_time_for_a_second_tier_nobody_is_bothered_to_judge_the_first() -> None:
    walk = begun(CascadeTerms((80.0,), (1.0, 5.0), deadline_s=3.0))
    accepted = step(walk, Answered(0), 1.0)
    assert accepted == Accept(0, AcceptReason.DEADLINE)
    assert accepted.is_compromise


def test_a_request_goes_no_further_than_it_may() -> None:
    walk = begun(CascadeTerms((80.0, 60.0), (0.0, 0.0, 0.0), max_tier=1))
    step(walk, Answered(0), 1.0)
    step(walk, Judged(0, 0.0), 1.0)
    assert step(walk, Answered(1), 1.0) == Accept(1, AcceptReason.LAST_TIER)


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        (WithoutJudge.ESCALATE, Generate(1, EscalationReason.NOT_JUDGED)),
        (WithoutJudge.ACCEPT, Accept(0, AcceptReason.JUDGE_DOWN)),
    ],
)
def test_without_a_judge_the_terms_decide(without: WithoutJudge, expected: Instruction) -> None:
    walk = begun(CascadeTerms((80.0,), (0.0, 0.0), without_judge=without))
    step(walk, Answered(0), 1.0)
    assert step(walk, NotJudged(0), 1.0) == expected


def test_tiers_that_fail_are_passed_over() -> None:
    walk = begun(THREE)
    assert step(walk, TierFailed(0, "no instance"), 1.0) == Generate(1, EscalationReason.TIER_FAILED)
    assert step(walk, Answered(1), 2.0) == Judge(1)
    assert step(walk, Judged(1, 10.0), 2.0) == Generate(2, EscalationReason.LOW_SCORE)
    assert step(walk, TierFailed(2, "no instance"), 3.0) == Accept(1, AcceptReason.TIER_FAILED)


def test_a_tier_that_failed_and_has_an_instance_by_now_is_asked_once_more() -> None:
    """Found by seed 3379: all workers were away, and only those of the tier that had been given up came back."""
    walk = begun(THREE)
    step(walk, TierFailed(0, "no instance"), 1.0)
    step(walk, TierFailed(1, "no instance"), 2.0)
    again = asked_by(walk, TierFailed(2, "no instance", frozenset({0, 1})))
    assert (again.tier, again.attempt, again.may_be_judged) == (1, 2, False)
    assert asked_by(walk, TierFailed(1, "gone again", frozenset({1, 2}))).tier == 2
    assert isinstance(step(walk, TierFailed(2, "gone again", frozenset({1, 2})), 3.0), Fail), "not for ever"
    other = begun(THREE)
    step(other, TierFailed(0, "no instance", frozenset({1})), 1.0)
    step(other, TierFailed(1, "overloaded", frozenset({0, 1})), 1.0)
    assert asked_by(other, TierFailed(2, "no instance", frozenset({0}))).tier == 0
    assert step(other, Answered(0), 2.0) == Accept(0, AcceptReason.TIER_FAILED)


def test_if_no_tier_can_answer_the_client_hears_of_each() -> None:
    walk = begun(CascadeTerms((80.0,), (0.0, 0.0)))
    step(walk, TierFailed(0, "overloaded"), 1.0)
    failed = step(walk, TierFailed(1, "gone"), 1.0)
    assert isinstance(failed, Fail)
    assert "overloaded" in failed.reason
    assert "gone" in failed.reason


def test_time_that_runs_out_during_a_further_tier_brings_the_best_so_far() -> None:
    terms = CascadeTerms((80.0, 60.0), (1.0, 5.0, 20.0), deadline_s=12.0)
    walk = begun(terms)
    assert first(terms).timeout_s is None, "there is no answer yet"
    assert walk.handle(Answered(0), 1.0) == (Judge(0, timeout_s=11.0),)
    assert asked_by(walk, Judged(0, 50.0), 2.0).timeout_s == 10.0
    assert step(walk, Broken(1, "too late", may_accept_another=True), 12.0) == Accept(0, AcceptReason.DEADLINE)


def test_an_answer_that_its_client_has_begun_to_get_is_the_only_one() -> None:
    walk = begun(CascadeTerms((80.0,), (0.0, 0.0)))
    step(walk, Answered(0), 1.0)
    step(walk, Judged(0, 50.0), 1.0)
    assert step(walk, Broken(1, "gone", may_accept_another=False), 2.0) == Fail("tier 1: gone", 1)
    hurried = begun(CascadeTerms((80.0,), (0.0, 0.0)))
    assert step(hurried, Broken(0, "too late", may_accept_another=True), 2.0) == Fail("tier 0: too late", 0)


def test_an_answer_that_cannot_score_enough_any_more_is_given_up() -> None:
    walk = begun(THREE)
    assert first(THREE).early_exit_below == 80.0
    assert step(walk, EndedEarly(0, 79.0), 0.0) == Generate(1, EscalationReason.GIVEN_UP)
    assert step(walk, Answered(1), 2.0) == Judge(1)
    assert step(walk, Judged(1, 60.0), 2.0) == Accept(1, AcceptReason.SCORE)
    assert walk.scores == {0: 79.0, 1: 60.0}


def test_an_answer_that_may_be_needed_is_not_given_up() -> None:
    assert first(CascadeTerms((80.0,), (0.0, 0.0), max_tier=0)).early_exit_below == 0
    hurried = begun(CascadeTerms((80.0,), (1.0, 1.0), deadline_s=9.0))
    assert first(hurried.terms).early_exit_below == 0, "the deadline may need it"
    with pytest.raises(IllegalTransition, match="ended early"):
        step(hurried, EndedEarly(0, 10.0), 0.0)
    with pytest.raises(IllegalTransition, match="ended early"):
        step(begun(THREE), EndedEarly(0, 80.0), 0.0)


def test_a_request_is_counted_once_however_many_tiers_answer_it() -> None:
    walk = begun(THREE)
    assert walk.handle(Answered(0), 1.0) == (Judge(0),), "whoever judges counts it"
    walk.handle(Judged(0, 10.0), 2.0)
    walk.handle(TierFailed(1, "gone"), 3.0)
    assert walk.handle(Answered(2), 4.0) == (Accept(2, AcceptReason.LAST_TIER),)


def test_a_tier_is_told_which_time_it_is_asked() -> None:
    walk = begun(THREE)
    assert first(THREE).attempt == 1
    asked_by(walk, EndedEarly(0, 10.0))
    assert asked_by(walk, TierFailed(1, "gone")).attempt == 1
    assert asked_by(walk, TierFailed(2, "gone")).attempt == 2


def test_an_answer_that_was_given_up_is_asked_for_again_if_all_further_tiers_fail() -> None:
    walk = begun(THREE)
    step(walk, EndedEarly(0, 10.0), 0.0)
    step(walk, EndedEarly(1, 20.0), 0.0)
    assert step(walk, TierFailed(2, "gone"), 1.0) == Generate(1, EscalationReason.TIER_FAILED)
    assert step(walk, Answered(1), 2.0) == Accept(1, AcceptReason.TIER_FAILED)
    broken = begun(THREE)
    step(broken, EndedEarly(0, 10.0), 0.0)
    step(broken, TierFailed(1, "gone"), 1.0)
    assert step(broken, TierFailed(2, "gone"), 1.0) == Generate(0, EscalationReason.TIER_FAILED)
    failed = step(broken, TierFailed(0, "gone too"), 1.0)
    assert isinstance(failed, Fail)
    assert failed.reason == "tier 1: gone; tier 2: gone; tier 0: gone too"
    assert failed.asked == 2, "the client gets the error of the highest tier, not of the last that was asked"


def test_a_further_tier_that_accepts_nothing_is_not_asked() -> None:
    walk = begun(CascadeTerms((80.0, 100.1, 60.0), (0.0,) * 4))
    step(walk, Answered(0), 1.0)
    assert step(walk, Judged(0, 10.0), 1.0) == Generate(2, EscalationReason.LOW_SCORE)
    capped = begun(CascadeTerms((80.0, 100.1, 60.0), (0.0,) * 4, max_tier=1))
    assert step(capped, EndedEarly(0, 10.0), 0.0) == Generate(1, EscalationReason.GIVEN_UP)
    assert step(capped, Answered(1), 1.0) == Accept(1, AcceptReason.LAST_TIER)


def test_a_first_tier_that_accepts_nothing_is_not_asked_either() -> None:
    walk = begun(CascadeTerms((100.1, 60.0), (0.0,) * 3))
    assert first(walk.terms).tier == 1
    assert step(walk, EndedEarly(1, 10.0), 0.0) == Generate(2, EscalationReason.GIVEN_UP)
    assert first(CascadeTerms((100.1, 100.1), (0.0,) * 3)).tier == 2
    assert first(CascadeTerms((100.1, 60.0), (0.0,) * 3, max_tier=0)).tier == 0


def test_requests_reach_tiers_that_accept_something_up_to_one_that_accepts_all() -> None:
    assert THREE.reached == (0, 1, 2)
    assert CascadeTerms((100.1, 60.0), (0.0,) * 3).reached == (1, 2)
    assert CascadeTerms((80.0, 0.0), (0.0,) * 3).reached == (0, 1)
    assert CascadeTerms((100.1, 60.0), (0.0,) * 3, max_tier=1).reached == (1,)


def test_tiers_that_accept_nothing_answer_if_no_other_can() -> None:
    walk = begun(CascadeTerms((100.1, 60.0, 100.1), (0.0,) * 4))
    step(walk, EndedEarly(1, 10.0), 0.0)
    assert step(walk, TierFailed(3, "loading"), 1.0) == Generate(1, EscalationReason.TIER_FAILED), (
        "it has answered before"
    )
    assert step(walk, TierFailed(1, "gone"), 1.0) == Generate(2, EscalationReason.TIER_FAILED)
    assert step(walk, TierFailed(2, "gone"), 1.0) == Generate(0, EscalationReason.TIER_FAILED)
    assert step(walk, Answered(0), 2.0) == Accept(0, AcceptReason.TIER_FAILED)


def test_an_answer_that_any_score_would_do_for_is_not_judged() -> None:
    walk = begun(CascadeTerms((80.0, 0.0), (0.0,) * 3))
    assert first(walk.terms).will_accept is None
    second = asked_by(walk, EndedEarly(0, 10.0))
    assert second.will_accept is AcceptReason.ACCEPTS_ALL
    assert (second.may_be_judged, second.early_exit_below) == (False, 0)
    accepted = step(walk, Answered(1), 1.0)
    assert accepted == Accept(1, AcceptReason.ACCEPTS_ALL)
    assert isinstance(accepted, Accept)
    assert not accepted.is_compromise
    broken = begun(CascadeTerms((0.0,), (0.0, 0.0)))
    assert step(broken, TierFailed(0, "gone"), 1.0) == Generate(1, EscalationReason.TIER_FAILED)


def test_an_answer_that_may_be_cut_for_another_is_not_yet_the_clients() -> None:
    walk = begun(CascadeTerms((80.0,), (1.0, 1.0), deadline_s=9.0))
    step(walk, Answered(0), 1.0)
    last = asked_by(walk, Judged(0, 10.0), 1.0)
    assert last.will_accept is None, "the deadline may bring the first tier's"
    assert first(CascadeTerms((0.0,), (1.0, 1.0), deadline_s=9.0)).will_accept


def test_the_router_is_told_once_of_a_request_that_nobody_judges() -> None:
    accepts_all = begun(CascadeTerms((0.0,), (0.0, 0.0)))
    assert accepts_all.handle(Answered(0), 1.0)[0] == Report(0, for_score=False)
    ended = begun(CascadeTerms((80.0,), (0.0, 0.0)))
    assert ended.handle(EndedEarly(0, 10.0), 1.0)[0] == Report(0, for_score=True)
    assert ended.handle(Answered(1), 1.0) == (Accept(1, AcceptReason.LAST_TIER),)


def test_events_out_of_place_raise_with_the_story() -> None:
    walk = begun(THREE, "request-7")
    with pytest.raises(IllegalTransition, match="request-7, generating on tier 0"):
        step(walk, Judged(0, 50.0), 1.0)
    with pytest.raises(IllegalTransition, match="tier=1"):
        step(walk, Answered(1), 1.0)
    step(walk, Answered(0), 1.0)
    with pytest.raises(IllegalTransition, match="score"):
        step(walk, Judged(0, 101.0), 1.0)


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
def courses(draw: st.DrawFn) -> tuple[CascadeTerms, list[tuple[str, float, float, frozenset[int]]]]:
    tiers = draw(st.integers(1, 4))
    terms = CascadeTerms(
        thresholds=tuple(draw(st.lists(st.floats(0, 101), min_size=tiers - 1, max_size=tiers - 1))),
        expected_s=tuple(draw(st.lists(st.floats(0, 10), min_size=tiers, max_size=tiers))),
        deadline_s=draw(st.none() | st.floats(0, 30)),
        max_tier=draw(st.none() | st.integers(0, tiers - 1)),
        without_judge=draw(st.sampled_from(WithoutJudge)),
    )
    what = st.sampled_from(["well", "badly", "hopeless", "out of time"])
    reachable = st.frozensets(st.integers(0, terms.last_tier))
    each = st.tuples(what, st.floats(0, 100), st.floats(0, 5), reachable)
    return terms, draw(st.lists(each, min_size=16, max_size=16))


@given(courses())
def test_every_course_ends_with_one_answer_that_a_tier_gave_or_with_every_tier_failed(
    course: tuple[CascadeTerms, list[tuple[str, float, float, frozenset[int]]]],
) -> None:
    terms, events = course
    walk = CascadeStateMachine("r", terms)
    (action,) = walk.handle(Begin(), 0.0)
    answered: list[int] = []
    asked: list[int] = []
    given_up: list[int] = []
    reports = judgements = 0
    now_s = 0.0
    for what, score, took_s, reachable in events:
        before = walk.state
        now_s += took_s
        event: Event
        if isinstance(action, Generate):
            if asked and terms.deadline_s is not None and answered:
                assert now_s - took_s + terms.expected_s[action.tier] <= terms.deadline_s
            asked.append(action.tier)
            will_accept = action.will_accept
            if what == "hopeless" and score < action.early_exit_below:
                given_up.append(action.tier)
                event = EndedEarly(action.tier, score)
            elif what in ("well", "hopeless"):
                answered.append(action.tier)
                event = Answered(action.tier)
            elif what == "out of time" and action.timeout_s is not None:
                will_accept = None
                event = Broken(action.tier, "too late", may_accept_another=True)
            else:
                will_accept = None
                event = TierFailed(action.tier, "broken", reachable)
        else:
            assert isinstance(action, Judge)
            will_accept = None
            judgements += 1
            assert 0 < terms.thresholds[action.tier] <= 100
            event = Judged(action.tier, score) if what == "well" else NotJudged(action.tier)
        *reported, action = walk.handle(event, now_s)
        walk.validate()
        reports += len(reported)
        assert all(isinstance(report, Report) for report in reported)
        assert will_accept is None or not isinstance(event, Answered) or action == Accept(asked[-1], will_accept)
        assert walk.state is before or walk.state in TRANSITIONS[before]
        if isinstance(action, Accept | Fail):
            break
    assert isinstance(action, Accept | Fail)
    upwards = asked[: asked.index(terms.last_tier) + 1] if terms.last_tier in asked else asked
    assert upwards == sorted(set(upwards))
    assert all(terms.accepts_some(tier) for tier in upwards)
    again, reserves = given_up[::-1], [tier for tier in range(terms.last_tier)[::-1] if not terms.accepts_some(tier)]
    falling_back = asked[len(upwards) :]
    in_reserve = [*again, *reserves]
    assert falling_back[: len(in_reserve)] == in_reserve[: len(falling_back)], (
        "what was given up, then what was left out"
    )
    assert max(asked.count(tier) for tier in asked) <= 2, "then what has come back, once"
    assert max(asked) <= terms.last_tier
    assert reports <= 1 + len(given_up)
    if isinstance(action, Accept):
        assert reports or judgements, "every request that is answered is counted"
        assert action.tier in answered
    else:
        assert not answered
        assert upwards[-1] == terms.last_tier
        assert set(asked) == set(range(terms.last_tier + 1)), "every tier was tried"
        assert len(falling_back) >= len(in_reserve)


@pytest.mark.parametrize(
    "event", [Answered(1), TierFailed(1, "gone"), EndedEarly(1, 5.0), Judged(0, 5.0), NotJudged(0), Begin()], ids=repr
)
def test_an_event_out_of_place_is_named(event: Event) -> None:
    with pytest.raises(IllegalTransition, match=re.escape(f"does not await {event}") + "$"):
        begun(THREE).handle(event, 1.0)


def test_a_step_that_there_is_not_tells_the_story() -> None:
    walk = begun(THREE)
    step(walk, EndedEarly(0, 0.0), 0.0)
    assert step(walk, TierFailed(1, "gone"), 1.0) == Generate(2, EscalationReason.TIER_FAILED)
    assert step(walk, Answered(2), 2.0) == Accept(2, AcceptReason.LAST_TIER)
    story = r"request r, done on tier 2, answered by \[2\], ended early by \[0\], .*gone.* cannot become judging"
    with pytest.raises(IllegalTransition, match=story):
        walk._go(CascadeState.JUDGING)


def test_scores_go_from_0_to_100_both_included() -> None:
    strict = CascadeTerms((100.0,), (0.0, 0.0))
    best, worst = begun(strict), begun(strict)
    step(best, Answered(0), 1.0)
    assert step(best, Judged(0, 100.0), 1.0) == Accept(0, AcceptReason.SCORE)
    step(worst, Answered(0), 1.0)
    assert step(worst, Judged(0, 0.0), 1.0) == Generate(1, EscalationReason.LOW_SCORE)
    assert first(strict).tier == 0, "a perfect answer would do"


def test_a_tier_that_is_expected_to_answer_just_in_time_is_begun() -> None:
    terms = CascadeTerms((80.0,), (1.0, 5.0), deadline_s=7.0)
    walk = begun(terms)
    assert step(walk, Answered(0), 2.0) == Judge(0)
    assert step(walk, Judged(0, 10.0), 2.0) == Generate(1, EscalationReason.LOW_SCORE)


@pytest.mark.parametrize(
    ("now_s", "expected"),
    [(5.0, Generate(1, EscalationReason.NOT_JUDGED)), (5.1, Accept(0, AcceptReason.DEADLINE))],
)
def test_an_answer_without_a_judge_goes_on_only_in_time(now_s: float, expected: Instruction) -> None:
    walk = begun(CascadeTerms((80.0, 60.0), (1.0, 5.0, 5.0), deadline_s=10.0))
    assert step(walk, Answered(0), 1.0) == Judge(0)
    assert step(walk, NotJudged(0), now_s) == expected


@pytest.mark.parametrize(
    ("now_s", "expected"),
    [(5.0, Generate(2, EscalationReason.TIER_FAILED)), (5.1, Accept(0, AcceptReason.TIER_FAILED))],
)
def test_a_tier_that_fails_is_passed_over_only_in_time_once_there_is_an_answer(
    now_s: float, expected: Instruction
) -> None:
    walk = begun(CascadeTerms((80.0, 60.0), (1.0, 1.0, 5.0), deadline_s=10.0))
    step(walk, Answered(0), 1.0)
    assert step(walk, Judged(0, 10.0), 1.0) == Generate(1, EscalationReason.LOW_SCORE)
    assert step(walk, TierFailed(1, "gone"), now_s) == expected


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
