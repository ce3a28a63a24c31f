"""How the choices of a request are gathered for a client that came back: by example, and under any answers."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.adoption import (
    ANSWER_S,
    PATIENCE_S,
    RETRY_S,
    TRANSITIONS,
    AdoptionManager,
    AdoptionState,
    AllAnswered,
    Ask,
    Begin,
    Closed,
    Found,
    GiveBack,
    LookedAfter,
    Nothing,
    Pause,
    Refuse,
    Resume,
    Take,
    Woken,
)
from controlplane.protocols.ownership import EPOCHS_PER_ADOPTION, EPOCHS_PER_RECOVERY
from mesh.errors import IllegalTransition, InvariantBroken


def found(index: int = 0, epoch: int = 2, choices: int = 1, key: str = "alice", *, is_behind: bool = False) -> Found:
    return Found(index, epoch, choices, key, is_behind)


def asking(*, at_s: float = 10.0) -> AdoptionManager:
    manager = AdoptionManager("r")
    assert manager.handle(Begin("alice"), at_s) == Ask(ANSWER_S)
    return manager


def test_a_request_that_is_whole_is_resumed() -> None:
    manager = asking()
    assert manager.handle(found(1, choices=2), 10.0) == Take(is_newer=False)
    assert manager.handle(found(0, choices=2), 10.0) == Take(is_newer=False)
    assert manager.handle(AllAnswered(), 10.1) == Resume()
    assert manager.handle(LookedAfter(), 10.1) == Nothing()
    assert manager.handle(Closed(), 20.0) == Nothing(), "the choices are somebody's"


def test_what_nobody_looks_after_goes_back() -> None:
    manager = asking()
    manager.handle(found(), 10.0)
    manager.handle(AllAnswered(), 10.1)
    assert manager.handle(Closed(), 11.0) == GiveBack((0,))
    assert manager.handle(Closed(), 11.0) == Nothing()


def test_missing_choices_are_asked_for_until_the_time_is_up() -> None:
    """With all others, which go back meanwhile: a worker that is asked again tells of its choice in a new life."""
    manager = asking()
    manager.handle(found(1, choices=3), 10.0)
    assert manager.handle(AllAnswered(), 10.1) == Pause(RETRY_S, (1,))
    assert manager.handle(Woken(), 10.3) == Ask(ANSWER_S)
    assert manager.handle(found(1, epoch=3, choices=3), 10.3) == Take(is_newer=False)
    manager.handle(found(0, choices=3), 10.3)
    assert manager.handle(AllAnswered(), 9.9 + PATIENCE_S) == Pause(RETRY_S, (0, 1))
    manager.handle(Woken(), 10.0 + PATIENCE_S)
    manager.handle(found(1, epoch=4, choices=3), 10.0 + PATIENCE_S)
    manager.handle(found(0, epoch=4, choices=3), 10.0 + PATIENCE_S)
    assert manager.handle(AllAnswered(), 10.0 + PATIENCE_S) == Refuse((0, 1), 1)
    assert manager.handle(Closed(), 20.0) == Nothing()


def test_a_request_that_no_worker_knows_is_refused_in_the_end() -> None:
    manager = asking()
    assert manager.handle(AllAnswered(), 10.1) == Pause(RETRY_S, ())
    manager.handle(Woken(), 10.3)
    assert manager.handle(AllAnswered(), 10.0 + PATIENCE_S) == Refuse((), 0)


@pytest.mark.parametrize("choices", [1, 2])
def test_another_keys_request_is_refused_at_once(choices: int) -> None:
    manager = asking()
    manager.handle(found(0, choices=choices, key="mallory"), 10.0)
    assert manager.handle(AllAnswered(), 10.1) == Refuse((0,), 0)


def test_of_two_lives_of_a_choice_the_one_of_the_higher_epoch_counts() -> None:
    manager = asking()
    assert manager.handle(found(epoch=4), 10.0) == Take(is_newer=False)
    assert manager.handle(found(epoch=3), 10.0) == Nothing()
    assert manager.handle(found(epoch=4), 10.0) == Nothing()
    assert manager.handle(found(epoch=5), 10.0) == Take(is_newer=True)
    assert manager.handle(AllAnswered(), 10.1) == Resume()


def test_a_life_that_is_behind_its_client_is_not_gone_on_with() -> None:
    """A recovery left it behind. Nor is it once it has caught up, while the worker of the other life is asked again."""
    manager = asking()
    assert manager.handle(found(epoch=EPOCHS_PER_ADOPTION + 2, is_behind=True), 10.0) == Take(is_newer=False)
    assert manager.handle(AllAnswered(), 11.0) == Pause(RETRY_S, (0,))
    manager.handle(Woken(), 11.2)
    assert manager.handle(found(epoch=2 * EPOCHS_PER_ADOPTION + 3), 11.2) == Take(is_newer=False)
    assert manager.handle(AllAnswered(), 11.3) == Pause(RETRY_S, (0,))
    manager.handle(Woken(), 11.5)
    assert manager.handle(found(epoch=3 * EPOCHS_PER_ADOPTION + 3), 11.5) == Take(is_newer=False)
    recovered = EPOCHS_PER_ADOPTION + EPOCHS_PER_RECOVERY + 2
    assert manager.handle(found(epoch=recovered), 11.5) == Take(is_newer=True)
    assert manager.handle(found(epoch=3 * EPOCHS_PER_ADOPTION + 3), 11.5) == Nothing()
    assert manager.handle(AllAnswered(), 11.6) == Resume()


def test_a_request_of_which_its_client_has_seen_more_than_there_is_is_refused_in_the_end() -> None:
    manager = asking()
    manager.handle(found(is_behind=True), 10.0)
    assert manager.handle(AllAnswered(), 10.1) == Pause(RETRY_S, (0,))
    manager.handle(Woken(), 10.3)
    manager.handle(found(epoch=3, is_behind=True), 10.3)
    assert manager.handle(AllAnswered(), 10.0 + PATIENCE_S) == Refuse((0,), 0, 1)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_choice_that_the_request_does_not_have_is_none(index: int) -> None:
    manager = asking()
    assert manager.handle(found(index, choices=2), 10.0) == Nothing()
    manager.validate()


def test_an_event_that_the_state_does_not_allow_tells_the_story() -> None:
    manager = asking()
    manager.handle(found(), 10.0)
    for event in (Begin("alice"), Woken(), LookedAfter()):
        story = f"request r, asking, begun at 10.000 s, with choices [0] does not await {event}"
        with pytest.raises(IllegalTransition, match=re.escape(story)):
            manager.handle(event, 10.0)
    with pytest.raises(IllegalTransition, match="cannot become new"):
        manager._go(AdoptionState.NEW)
    for unasked in (found(), AllAnswered()):
        with pytest.raises(IllegalTransition, match=rf"request r, new, .* does not await {re.escape(str(unasked))}"):
            AdoptionManager("r").handle(unasked, 0.0)


def test_every_state_can_end_and_none_comes_back() -> None:
    assert set(TRANSITIONS) == set(AdoptionState)
    assert all(
        (AdoptionState.ENDED in after) == (state is not AdoptionState.ENDED) for state, after in TRANSITIONS.items()
    )


@pytest.mark.parametrize("broken", [{1: found(0, choices=2)}, {1: found(1)}, {0: found(choices=2)}, {}])
def test_broken_state_is_found(broken: dict[int, Found]) -> None:
    manager = asking()
    manager.handle(found(), 10.0)
    manager.handle(AllAnswered(), 10.0)
    manager.validate()
    manager._found = broken
    with pytest.raises(InvariantBroken):
        manager.validate()


@given(st.data())
def test_whatever_workers_answer_each_choice_is_looked_after_or_given_back(data: Any) -> None:
    """And of each choice there is one, of the highest epoch that was told of."""
    choices, key = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(["alice", "mallory"]))
    manager, now_s = AdoptionManager("r"), 0.0
    taken, newest = set[int](), dict[int, int]()
    instruction: Any = manager.handle(Begin("alice"), now_s)
    rounds = 0
    while isinstance(instruction, Ask | Pause):
        if isinstance(instruction, Pause):
            assert set(instruction.indexes) == taken
            taken.clear()
            newest.clear()
            now_s += instruction.seconds
            instruction = manager.handle(Woken(), now_s)
            continue
        rounds += 1
        for index, epoch in data.draw(st.lists(st.tuples(st.integers(0, choices - 1), st.integers(0, 4)), max_size=4)):
            told = manager.handle(Found(index, epoch, choices, key), now_s)
            assert (told != Nothing()) == (epoch > newest.get(index, -1))
            if isinstance(told, Take):
                assert told.is_newer == (index in taken)
                taken.add(index)
                newest[index] = epoch
            manager.validate()
        now_s += data.draw(st.floats(0.0, instruction.timeout_s))
        instruction = manager.handle(AllAnswered(), now_s)
        manager.validate()
    assert rounds <= 1 + PATIENCE_S / RETRY_S
    if isinstance(instruction, Resume):
        assert taken == set(range(choices))
        assert key == "alice"
        instruction = manager.handle(Closed(), now_s)
    assert set(instruction.indexes) == taken
    assert manager.state is AdoptionState.ENDED
