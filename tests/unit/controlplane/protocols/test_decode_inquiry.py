"""Who is asked who decodes a request: few, nobody twice, the leader first, and never without an end."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.decode_inquiry import (
    DEADLINE_S,
    MAX_ASKED,
    Answered,
    Ask,
    Begun,
    DecodeInquiry,
    Event,
    GiveUp,
    Instruction,
    Missed,
    Stale,
    Use,
)
from mesh.errors import IllegalTransition

FOUR = ("a", "b", "c", "d")


def after(*events: Event) -> Instruction:
    """What is said last."""
    inquiry = DecodeInquiry("r")
    for event in events:
        (instruction,) = inquiry.handle(event)
        inquiry.validate()
    return instruction


def test_the_first_is_asked_and_its_word_counts() -> None:
    assert after(Begun(FOUR)) == Ask("a", DEADLINE_S)
    assert after(Begun(FOUR), Answered("i")) == Use("i")
    assert after(Begun(FOUR), Answered("i", leader_id="a")) == Use("i")
    assert after(Begun(FOUR), Answered("")) == Use("")


def test_who_was_asked_last_is_asked_first_and_then_its_successors_in_a_ring() -> None:
    assert after(Begun(FOUR, "c")) == Ask("c")
    assert after(Begun(FOUR, "c"), Missed("late")) == Ask("d")
    assert after(Begun(FOUR, "c"), Missed("late"), Missed("late")) == Ask("a")
    assert after(Begun(FOUR, "gone")) == Ask("a")


def test_without_a_scheduler_it_is_given_up_at_once() -> None:
    assert after(Begun(())) == GiveUp("the mesh has no scheduler now")


def test_the_leader_is_asked_next() -> None:
    assert after(Begun(FOUR), Answered("i", leader_id="d")) == Ask("d")
    assert after(Begun(FOUR), Answered("i", leader_id="d"), Missed("late")) == Ask("b"), "the others keep their order"
    assert after(Begun(FOUR), Answered("i", leader_id="d"), Answered("j", leader_id="d")) == Use("j")


@pytest.mark.parametrize("leader_id", ["gone", "a"])
def test_a_leader_that_is_not_there_or_that_failed_is_not_waited_for(leader_id: str) -> None:
    said = after(Begun(FOUR), Missed("late"), Answered("i", leader_id=leader_id))
    assert isinstance(said, GiveUp)
    assert leader_id in said.reason


def test_the_last_reason_is_told_when_all_have_failed() -> None:
    assert after(Begun(("a", "b")), Missed("one"), Missed("two")) == GiveUp("two")


def test_no_more_are_asked_than_the_wait_is_worth() -> None:
    said = after(Begun(FOUR), *[Missed("late")] * MAX_ASKED)
    assert said == GiveUp("none of a, b, c could say who decodes r")


def test_a_leader_of_former_times_ends_it() -> None:
    assert after(Begun(FOUR), Stale("a is no longer the leader")) == GiveUp("a is no longer the leader")


@pytest.mark.parametrize("events", [(Answered("i"),), (Begun(FOUR), Begun(FOUR)), (Begun(FOUR), Use, Missed("late"))])
def test_only_a_bug_can_say_more_than_was_asked(events: tuple[Any, ...]) -> None:
    with pytest.raises(IllegalTransition, match="who decodes r"):
        after(*(Answered("i") if event is Use else event for event in events))


@given(st.integers(0, 6), st.lists(st.sampled_from(["missed", "answered", *FOUR, "e", "f", "gone"]), min_size=8))
def test_whatever_schedulers_say_it_ends_and_asks_nobody_twice(count: int, says: list[str]) -> None:
    scheduler_ids = tuple("abcdef"[:count])
    inquiry, asked = DecodeInquiry("r"), []
    (instruction,) = inquiry.handle(Begun(scheduler_ids))
    for say in says:
        inquiry.validate()
        if not isinstance(instruction, Ask):
            break
        asked.append(instruction.scheduler_id)
        events: dict[str, Event] = {"missed": Missed("late"), "answered": Answered("i")}
        event = events.get(say, Answered("i", leader_id=say))
        (instruction,) = inquiry.handle(event)
    assert not isinstance(instruction, Ask)
    assert len(asked) == len(set(asked)) <= min(MAX_ASKED, count)
    assert set(asked) <= set(scheduler_ids)
