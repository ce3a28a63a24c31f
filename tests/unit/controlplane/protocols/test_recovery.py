"""Where one request goes and when it is placed again: by example, and under any course of events."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.recovery import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    MAX_CHOICES,
    OVERRULE_S,
    TRANSITIONS,
    Begin,
    Choose,
    Chosen,
    Ended,
    Event,
    GivenUp,
    GiveUp,
    Instruction,
    Lost,
    NoneChosen,
    Nothing,
    NotSubmitted,
    Pause,
    RecoveryLimits,
    RecoveryManager,
    RecoveryState,
    Run,
    Submit,
    Submitted,
    Wait,
    Woken,
)
from mesh.errors import IllegalTransition

LIMITS = RecoveryLimits(max_losses=3, wait_s=30.0)
NONE = GivenUp.NO_INSTANCE


def manager(limits: RecoveryLimits = LIMITS) -> RecoveryManager:
    return RecoveryManager("r", limits)


def running(on: str = "a") -> RecoveryManager:
    one = manager()
    one.handle(Submitted(on), 0.0)
    return one


def test_a_new_request_is_chosen_for_submitted_and_runs() -> None:
    one = manager()
    assert one.handle(Begin(30.0), 0.0) == Choose()
    assert one.handle(Chosen("a"), 0.0) == Submit("a")
    assert one.handle(Submitted("a"), 0.0) == Run("a", is_recovered=False)


def test_a_wait_ends_though_the_clock_rounds() -> None:
    one, now_ms = manager(), 1234.567
    instruction = one.handle(Begin(30.0), now_ms / 1000)
    for _ in range(40):
        assert isinstance(instruction, Choose)
        instruction = one.handle(NoneChosen("none"), now_ms / 1000)
        if isinstance(instruction, GiveUp):
            break
        assert isinstance(instruction, Wait)
        assert now_ms + 1000 * instruction.seconds > now_ms, "a clock in milliseconds moves by it"
        now_ms += 1000 * instruction.seconds
        instruction = one.handle(Woken(False), now_ms / 1000)
    assert isinstance(instruction, GiveUp)
    assert now_ms == pytest.approx(31234.567)


@given(st.floats(0, 1e9))
def test_a_rest_that_no_clock_can_tell_is_no_wait(began_ms: float) -> None:
    one = manager()
    one.handle(Begin(30.0), began_ms / 1000)
    one.handle(NoneChosen("none"), began_ms / 1000)
    almost_s = math.nextafter(began_ms / 1000 + 30.0, 0.0)
    one.handle(Woken(False), almost_s)
    assert isinstance(one.handle(NoneChosen("none"), almost_s), GiveUp)


def test_a_lost_request_goes_elsewhere_at_once_and_anywhere_later() -> None:
    one = running("a")
    assert one.handle(Lost("a", 5), 1.0) == Pause(0.0)
    assert one.handle(Woken(), 1.0) == Choose(("a",))
    assert one.handle(NoneChosen("none"), 1.0) == Wait(FIRST_RETRY_S, NONE, "none")
    assert one.handle(Woken(has_news=True), 1.0) == Choose(), "the next life of the same instance is as good"
    one.handle(Chosen("a"), 1.0)
    assert one.handle(Submitted("a"), 1.0) == Run("a", is_recovered=True)


def test_losses_without_a_token_between_them_cost_longer_and_longer_pauses() -> None:
    one, pauses = running(), []
    for _ in range(4):
        paused = one.handle(Lost("a", 5), 1.0)
        assert isinstance(paused, Pause)
        pauses.append(paused.seconds)
        for event in (Woken(), Chosen("a"), Submitted("a")):
            one.handle(event, 1.0)
    assert pauses == [0.0, 0.2, 0.4, 0.8]
    assert one.handle(Lost("a", 5), 31.0) == GiveUp(GivenUp.LOST_TOO_OFTEN)


def test_instances_that_cannot_be_reached_are_passed_over_and_then_waited_for() -> None:
    one = manager()
    one.handle(Begin(1.0), 0.0)
    for name, excluded in (("a", ("a",)), ("b", ("a", "b"))):
        one.handle(Chosen(name), 0.0)
        assert one.handle(NotSubmitted(name), 0.0) == Choose(excluded)
    one.handle(Chosen("c"), 0.0)
    waiting = one.handle(NotSubmitted("c"), 0.0)
    assert isinstance(waiting, Wait)
    assert waiting == Wait(FIRST_RETRY_S, GivenUp.UNREACHABLE, "the chosen instances cannot be reached")
    one.handle(Woken(), 1.0)
    given_up = one.handle(NoneChosen("gone"), 1.0)
    assert given_up == GiveUp(NONE, "gone")
    assert one.state is RecoveryState.ENDED


def test_who_waits_asks_less_and_less_often_until_there_is_news() -> None:
    one, waits = manager(), []
    one.handle(Begin(30.0), 0.0)
    for has_news in (False, False, True, False):
        waited = one.handle(NoneChosen("none"), 0.0)
        assert isinstance(waited, Wait)
        waits.append(waited.seconds)
        one.handle(Woken(has_news), 0.0)
    assert waits == [0.1, 0.2, 0.4, 0.1]


def test_a_scheduler_that_finds_none_for_long_may_be_overruled() -> None:
    one = manager()
    one.handle(Begin(30.0), 0.0)
    one.handle(NoneChosen("none"), 5.0)
    assert one.handle(Woken(), 5.0 + OVERRULE_S / 2) == Choose()
    one.handle(NoneChosen("none"), 5.0 + OVERRULE_S / 2)
    assert one.handle(Woken(), 5.0 + OVERRULE_S) == Choose(may_overrule=True)


def test_a_request_that_may_not_wait_is_given_up_at_once() -> None:
    one = manager()
    one.handle(Begin(0.0), 0.0)
    assert one.handle(NoneChosen("none"), 0.0) == GiveUp(NONE, "none")


def test_events_out_of_place_raise_with_the_story() -> None:
    with pytest.raises(IllegalTransition, match=r"request r, running, last on a.*Chosen"):
        running("a").handle(Chosen("b"), 0.0)
    ended = running("a")
    assert ended.handle(Ended(), 0.0) == Nothing()
    with pytest.raises(IllegalTransition, match="ended"):
        ended.handle(Lost("a", 1), 0.0)


@pytest.mark.parametrize(
    "event", [Begin(1.0), Chosen("b"), NoneChosen("none"), Submitted("b"), NotSubmitted("b"), Woken()]
)
def test_what_is_not_awaited_is_named_with_where_the_request_stands(event: Event) -> None:
    story = "request r, running, last on a, not on (), 0 choices, 0 losses without a token does not await"
    with pytest.raises(IllegalTransition, match=re.escape(f"{story} {event}")):
        running("a").handle(event, 0.0)
    with pytest.raises(IllegalTransition, match=r"request r, new, last on no instance, .* does not await Lost\("):
        manager().handle(Lost("a", 1), 0.0)


def test_a_state_that_cannot_follow_is_named() -> None:
    with pytest.raises(IllegalTransition, match=r"request r, running, .* cannot become waiting"):
        running()._go(RecoveryState.WAITING)


def test_the_story_names_the_instance_that_was_chosen_last() -> None:
    one = manager()
    one.handle(Begin(30.0), 0.0)
    one.handle(Chosen("a"), 0.0)
    one.handle(NotSubmitted("a"), 0.0)
    with pytest.raises(IllegalTransition, match=r"choosing, last on a, not on \('a',\), 1 choices"):
        one.handle(Begin(30.0), 0.0)


def test_the_next_attempt_may_be_overruled_as_well_where_a_choice_was_not_reached() -> None:
    one = manager()
    one.handle(Begin(30.0), 0.0)
    one.handle(NoneChosen("none"), 5.0)
    one.handle(Woken(), 5.0)
    one.handle(Chosen("a"), 5.0 + OVERRULE_S)
    assert one.handle(NotSubmitted("a"), 5.0 + OVERRULE_S) == Choose(("a",), may_overrule=True)


def answer(instruction: Instruction, luck: float, tokens: int) -> Event:
    """What may come of an instruction."""
    instance_id = "abcde"[int(luck * 4.99)]
    match instruction:
        case Choose(excluded):
            return Chosen(instance_id) if luck > 0.3 and instance_id not in excluded else NoneChosen("none")
        case Submit(chosen):
            return Submitted(chosen) if luck > 0.5 else NotSubmitted(chosen)
        case Run(instance_id):
            return Lost(instance_id, tokens)
        case Pause():
            return Woken()
        case Wait():
            return Woken(has_news=luck > 0.7)
        case _:
            return Ended()


COURSE = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2), st.floats(0, 4)), max_size=80)


@given(COURSE, st.integers(0, 4), st.floats(0, 20))
def test_whatever_happens_every_wait_is_bounded_and_every_step_allowed(
    course: list[tuple[float, int, float]], max_losses: int, wait_s: float
) -> None:
    one = manager(RecoveryLimits(max_losses, wait_s))
    event: Event = Begin(wait_s)
    now_s, tokens, choices, placing_since_s = 0.0, 0, 0, 0.0
    for luck, gained, took_s in course:
        before, instruction = one.state, one.handle(event, now_s)
        one.validate()
        assert one.state is before or one.state in TRANSITIONS[before]
        match instruction:
            case Choose(excluded):
                assert len(excluded) <= MAX_CHOICES
            case Submit(chosen, excluded):
                assert chosen not in excluded
                choices += 1
                assert choices <= MAX_CHOICES
            case Pause(seconds):
                now_s, choices = now_s + seconds, 0
                placing_since_s = now_s
            case Wait(seconds):
                assert 0 < seconds <= LONGEST_RETRY_S
                now_s, choices = now_s + seconds, 0
            case Run():
                now_s, tokens, choices = now_s + took_s, tokens + gained, 0
            case GiveUp(because):
                if because is GivenUp.LOST_TOO_OFTEN:
                    assert one.budget.losses >= max_losses
                else:
                    assert now_s - placing_since_s >= wait_s - 1e-6, "it had waited for as long as it may"
                return
        event = answer(instruction, luck, tokens)
