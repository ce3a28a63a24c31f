"""The next tier, begun ahead: when, and that no decision differs by it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.cascade.escalation_odds import (
    ENOUGH,
    REMEMBERED,
    UNBEGUN,
    WHOLE,
    EscalationOdds,
    progress_of,
)
from controlplane.protocols.cascade.state_machine import (
    FINAL,
    Abandon,
    Accept,
    AcceptReason,
    Answered,
    Begin,
    Broken,
    CascadeState,
    CascadeStateMachine,
    Doubted,
    EndedEarly,
    EscalationReason,
    Event,
    Generate,
    Instruction,
    Judge,
    Judged,
    NotJudged,
    Speculate,
    TierFailed,
)
from controlplane.protocols.cascade.terms import CascadeTerms

ALL = frozenset(range(4))
TERMS = CascadeTerms((80.0, 60.0), (0.0,) * 3, speculate_from=0.7)


def begun(terms: CascadeTerms = TERMS) -> CascadeStateMachine:
    machine = CascadeStateMachine("r", terms)
    machine.handle(Begin(), 0.0)
    return machine


def test_a_likely_escalation_begins_the_next_tier_which_goes_on_when_it_comes() -> None:
    machine = begun()
    assert machine.handle(Doubted(0, 0.69, ALL), 0.1) == ()
    assert machine.handle(Doubted(0, 0.7, frozenset({0, 2})), 0.2) == (), "the next tier has no room"
    assert machine.handle(Doubted(0, 0.7, ALL), 0.3) == (Speculate(1, may_be_judged=True),)
    assert machine.handle(Doubted(0, 1.0, ALL), 0.4) == (), "once"
    machine.handle(Answered(0), 1.0)
    (asked,) = machine.handle(Judged(0, 10.0), 2.0)
    assert isinstance(asked, Generate)
    assert (asked.tier, asked.begun_ahead, asked.reason) == (1, True, EscalationReason.LOW_SCORE)
    assert machine.handle(Doubted(1, 0.9, ALL), 3.0) == (Speculate(2, may_be_judged=False),), "and so on"


def test_an_accepted_answer_has_the_next_one_abandoned() -> None:
    machine = begun()
    machine.handle(Answered(0), 1.0)
    assert machine.handle(Doubted(0, 0.9, ALL), 1.1) == (Speculate(1, may_be_judged=True),), "while it is judged"
    assert machine.handle(Judged(0, 90.0), 2.0) == (Abandon(1), Accept(0, AcceptReason.SCORE))
    assert machine.handle(Doubted(0, 0.9, ALL), 3.0) == (), "a doubt that comes late"


@pytest.mark.parametrize(
    "terms",
    [
        CascadeTerms((80.0, 60.0), (0.0,) * 3),
        CascadeTerms((80.0, 60.0), (0.0,) * 3, deadline_s=9.0, speculate_from=0.1),
        CascadeTerms((80.0, 60.0), (0.0,) * 3, max_tier=0, speculate_from=0.1),
        CascadeTerms((0.0, 60.0), (0.0,) * 3, speculate_from=0.1),
    ],
)
def test_nothing_is_begun_ahead_unasked_under_a_deadline_or_behind_an_answer_that_is_sure(terms: CascadeTerms) -> None:
    assert begun(terms).handle(Doubted(0, 1.0, ALL), 0.0) == ()


OUTCOMES = st.sampled_from(["answered", "early", "failed", "broken"])
ROUNDS = st.lists(
    st.tuples(OUTCOMES, st.floats(0, 100), st.booleans(), st.floats(0, 1), st.floats(0, 1)), min_size=8, max_size=8
)


def _event(machine: CascadeStateMachine, last: Instruction, outcome: str, score: float, is_judged: bool) -> Event:
    assert isinstance(last, Generate | Judge)
    if isinstance(last, Judge):
        return Judged(last.tier, score) if is_judged else NotJudged(last.tier)
    if outcome == "early" and last.early_exit_below > 0:
        return EndedEarly(last.tier, score * last.early_exit_below / 101)
    if outcome == "failed":
        return TierFailed(last.tier, "gone", ALL & frozenset(range(machine.terms.last_tier + 1)))
    return Broken(last.tier, "late", is_judged) if outcome == "broken" else Answered(last.tier)


def _plain(instruction: Instruction) -> Any:
    if isinstance(instruction, Generate):
        return instruction.tier, instruction.reason, instruction.attempt, instruction.will_accept
    return instruction


@given(ROUNDS, st.lists(st.sampled_from([0.0, 50.0, 90.0, 101.0]), min_size=1, max_size=3), st.floats(0.01, 1))
def test_no_decision_differs_and_what_was_begun_is_taken_or_abandoned(
    rounds: list[tuple[str, float, bool, float, float]], thresholds: list[float], speculate_from: float
) -> None:
    times = (0.0,) * (len(thresholds) + 1)
    plain = CascadeStateMachine("r", CascadeTerms(tuple(thresholds), times))
    ahead = CascadeStateMachine("r", CascadeTerms(tuple(thresholds), times, speculate_from=speculate_from))
    (last,), (other,) = plain.handle(Begin(), 0.0), ahead.handle(Begin(), 0.0)
    pending: list[int] = []
    for outcome, score, is_judged, *doubts in (*rounds, *rounds, *rounds):
        for p_escalates in doubts:
            begins = ahead.handle(Doubted(ahead.tier, p_escalates, ALL), 1.0)
            ahead.validate()
            assert all(isinstance(each, Speculate) for each in begins)
            pending += [each.tier for each in begins if isinstance(each, Speculate)]
            assert len(pending) <= 1
        event = _event(plain, last, outcome, score, is_judged)
        *_, last = plain.handle(event, 1.0)
        *before, other = ahead.handle(event, 1.0)
        ahead.validate()
        assert _plain(other) == _plain(last)
        abandoned = [each.tier for each in before if isinstance(each, Abandon)]
        taken = [other.tier] if isinstance(other, Generate) and other.begun_ahead else []
        assert [*abandoned, *taken] in ([], pending)
        pending = [] if abandoned or taken else pending
        if isinstance(last, FINAL):
            assert not pending
            assert ahead.state is plain.state in (CascadeState.DONE, CascadeState.FAILED)
            return


def test_odds_are_those_of_answers_that_have_come_as_far_and_are_as_sure() -> None:
    odds = EscalationOdds()
    sure, unsure = progress_of(9, 99.0), progress_of(9, 40.0)
    assert odds.p_escalates(sure) == 0.0
    for number in range(2 * ENOUGH):
        odds.note({UNBEGUN, sure}, escalated=number % 10 == 0)
        odds.note({UNBEGUN, unsure}, escalated=number % 10 != 0)
    odds.validate()
    assert odds.p_escalates(sure) == pytest.approx(0.1, abs=0.02)
    assert odds.p_escalates(unsure) == pytest.approx(0.9, abs=0.02)
    assert odds.p_escalates(UNBEGUN) == pytest.approx(0.5, abs=0.02)
    assert odds.p_escalates(progress_of(9, 40.0, is_whole=True)) == 0.0, "few have got so far: nothing is known"


def test_odds_follow_what_has_changed() -> None:
    odds = EscalationOdds()
    for escalated in (True, False):
        for _ in range(3 * round(REMEMBERED)):
            odds.note({UNBEGUN}, escalated)
            odds.validate()
    assert odds.p_escalates(UNBEGUN) < 0.05


@given(st.integers(0, 10**6), st.floats(allow_nan=False), st.booleans())
def test_progress_is_bounded(tokens: int, score: float, is_whole: bool) -> None:
    group = progress_of(tokens, score, is_whole=is_whole)
    assert 0 <= group.stage <= WHOLE
    assert 0 <= group.doubt <= 12
