"""One placement among schedulers that answer, miss and are slow in any order."""

from collections import Counter
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.placing import (
    MAX_ASKED,
    Ask,
    Candidate,
    FallBack,
    Instruction,
    PlacementAttempt,
    Retract,
    Use,
    least_outstanding,
)
from mesh.errors import IllegalTransition

EVENTS = st.lists(st.tuples(st.sampled_from(["answered", "missed", "slow", "abandon"]), st.integers(0, 5)), max_size=20)


def run(schedulers: int, events: list[tuple[str, int]]) -> list[Instruction]:
    def choose(asked: Collection[str]) -> str | None:
        return next((f"s{n}" for n in range(schedulers) if f"s{n}" not in asked), None)

    attempt = PlacementAttempt(choose)
    done = attempt.begin()
    for kind, number in events:
        match kind:
            case "answered":
                done += attempt.answered(f"s{number}")
            case "missed":
                done += attempt.missed(f"s{number}", f"s{number} missed")
            case "slow":
                done += attempt.slow()
            case _:
                done += attempt.abandon()
        attempt.validate()
    return done


@given(st.integers(0, 6), EVENTS)
def test_whatever_happens_the_request_counts_at_one_scheduler_at_most(
    schedulers: int, events: list[tuple[str, int]]
) -> None:
    done = run(schedulers, [*events, ("abandon", 0)])
    asked = [each.scheduler_id for each in done if isinstance(each, Ask)]
    retracted = [each.scheduler_id for each in done if isinstance(each, Retract)]
    used = [each.scheduler_id for each in done if isinstance(each, Use)]
    fallbacks = [each for each in done if isinstance(each, FallBack)]
    assert len(set(asked)) == len(asked) <= min(schedulers, MAX_ASKED)
    assert Counter(asked) == Counter(retracted + used), "each one asked is used or told that it is over, once"
    assert len(used) + len(fallbacks) <= 1
    if not schedulers:
        assert fallbacks == [FallBack("no scheduler is connected")]
    for name in {*retracted, *used}:
        first = next(index for index, each in enumerate(done) if getattr(each, "scheduler_id", "") == name)
        assert isinstance(done[first], Ask)


@given(st.integers(1, 6), EVENTS)
def test_every_scheduler_missing_ends_in_the_fallback(schedulers: int, events: list[tuple[str, int]]) -> None:
    slow_first = [event for event in events if event[0] == "slow"]
    done = run(schedulers, [*slow_first, *(("missed", number) for number in range(schedulers))])
    last = min(schedulers, MAX_ASKED) - 1
    assert done[-1] == FallBack(f"s{last} missed")


def test_a_slow_scheduler_may_still_win() -> None:
    assert run(2, [("slow", 0), ("answered", 0)]) == [Ask("s0"), Ask("s1"), Retract("s1"), Use("s0")]


def test_a_miss_while_another_may_answer_is_no_fallback() -> None:
    done = run(2, [("slow", 0), ("missed", 0), ("answered", 1)])
    assert done == [Ask("s0"), Ask("s1"), Retract("s0"), Use("s1")]


def test_the_least_burdened_scheduler_is_asked_and_equals_in_turn() -> None:
    candidates = [Candidate("a", 2), Candidate("b", 1), Candidate("c", 1)]
    assert [least_outstanding(candidates, turn) for turn in range(4)] == ["b", "c", "b", "c"]
    assert least_outstanding([], 3) is None


@pytest.mark.parametrize("event", ["begin", "abandon"])
def test_a_placement_begins_once(event: str) -> None:
    attempt = PlacementAttempt(lambda asked: None if asked else "s0")
    if event == "begin":
        attempt.begin()
    else:
        assert attempt.abandon() == []
    with pytest.raises(IllegalTransition, match="begins again; it was asked of"):
        attempt.begin()


def test_after_the_fallback_nothing_more_is_done() -> None:
    attempt = PlacementAttempt(lambda asked: None if asked else "s0")
    attempt.begin()
    assert attempt.missed("s0", "it is gone") == [Retract("s0"), FallBack("it is gone")]
    assert attempt.slow() == attempt.answered("s0") == attempt.missed("s0", "again") == attempt.abandon() == []
