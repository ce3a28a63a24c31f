"""The frontend's view of a request that moves: whatever comes in whatever order, each token counts once."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.ownership import (
    EPOCHS_PER_ADOPTION,
    MAX_HELD_DELTAS,
    Filled,
    Ownership,
    TokenGap,
    TokenStream,
)
from mesh.errors import IllegalTransition

A, B, C = Incarnation("a", "1"), Incarnation("b", "1"), Incarnation("c", "1")
TRUTH = list(range(100, 130))


@dataclass(frozen=True)
class Step:
    """A delta."""

    epoch: int
    offset: int
    token_ids: list[int]
    emitted_token_ids: list[int] = field(default_factory=list)
    finish_reason: int = 0


def step(epoch: int, start: int, end: int, *, first: bool = False) -> Step:
    return Step(epoch, start, TRUTH[start:end], TRUTH[:start] if first else [])


def owned_by(owner: Incarnation) -> TokenStream[Step]:
    ownership = TokenStream[Step]()
    ownership.place(owner)
    return ownership


def tokens_of(passed: object) -> list[int]:
    assert isinstance(passed, list | tuple)
    return [token for one in passed for token in one.token_ids]


def test_the_owners_tokens_are_passed_on() -> None:
    ownership = owned_by(A)
    assert tokens_of(ownership.receive(A, step(0, 0, 2), 0)) == TRUTH[:2]
    assert tokens_of(ownership.receive(A, step(0, 2, 3), 0)) == TRUTH[2:3]
    assert ownership.token_ids == TRUTH[:3]


@pytest.mark.parametrize("offset", [1, 3])
def test_a_gap_or_a_double_of_the_owner_is_an_error(offset: int) -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    with pytest.raises(TokenGap, match="offset 2"):
        ownership.receive(A, step(0, offset, offset + 1), 0)


def test_an_early_new_owner_waits_for_the_last_tokens_of_the_former_one() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    assert ownership.receive(B, step(1, 4, 5, first=True), 0) == []
    assert tokens_of(ownership.receive(A, step(0, 2, 3), 0)) == TRUTH[2:3]
    assert tokens_of(ownership.receive(A, step(0, 3, 4), 0)) == TRUTH[3:5]
    assert (ownership.owner, ownership.holds) == (B, False)


@pytest.mark.parametrize("end", ["time", "stream", "moved"])
def test_missing_tokens_are_filled_in_from_the_new_owners_account(end: str) -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    ownership.receive(B, step(1, 4, 5, first=True), 0)
    assert ownership.expire(0.5) == ()
    ends = {
        "time": lambda: ownership.expire(1.0),
        "stream": lambda: ownership.silenced(A),
        "moved": lambda: ownership.moved(A, B, 1),
    }
    assert ends[end]() == [Filled(TRUTH[2:4]), step(1, 4, 5, first=True)]
    assert ownership.receive(A, step(0, 2, 3), 2) is None, "too late, and A is told to stop"


def test_a_move_that_was_announced_makes_the_target_the_owner() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    ownership.moved(A, B, 1)
    assert (ownership.owner, ownership.epoch) == (B, 1)
    assert tokens_of(ownership.receive(B, step(1, 2, 3, first=True), 0)) == TRUTH[2:3]


def test_after_a_recovery_the_old_life_is_told_to_stop_once() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    ownership.take_back()
    assert ownership.receive(A, step(0, 2, 3), 0) is None
    assert ownership.receive(B, step(1, 3, 4, first=True), 0) is None, "it committed unheard"
    ownership.place(C)
    assert tokens_of(ownership.receive(C, step(ownership.epoch, 2, 3), 0)) == TRUTH[2:3]
    assert ownership.receive(A, step(0, 3, 4), 0) is None
    assert ownership.receive(A, step(0, 4, 5), 0) == ()


def test_nobody_makes_himself_owner_while_the_request_is_placed_again() -> None:
    ownership = owned_by(A)
    ownership.take_back()
    assert ownership.receive(B, step(7, 0, 1, first=True), 0) is None
    ownership.place(C)
    assert ownership.epoch > 7, "above the stray life's"
    assert ownership.receive(B, step(7, 1, 2), 0) is None


def test_another_lifes_tokens_are_not_ours() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    assert ownership.receive(B, Step(1, 2, [7], [1, 2]), 0) is None
    assert ownership.owner == A


def test_only_the_owner_can_give_up() -> None:
    ownership = owned_by(A)
    assert not ownership.gives_up(B, 0)
    assert ownership.gives_up(A, 0)
    assert ownership.gives_up(B, 1), "a new owner that was not heard of before"


def test_two_placements_without_taking_back_are_a_bug() -> None:
    with pytest.raises(IllegalTransition, match="taken back"):
        owned_by(A).place(B)


EVENTS = st.lists(st.sampled_from(["a", "b", "b", "time", "repeat", "a ends"]), max_size=30)


@given(EVENTS, st.integers(0, 12), st.integers(0, 12))
def test_two_senders_in_any_order_with_loss_and_death(events: list[str], handoff: int, lost_from: int) -> None:
    """A hands off to B; both streams are interleaved at will, A's tail may be lost with it, time may pass."""
    sent_by_a = [step(0, index, index + 1) for index in range(handoff)]
    by_a, by_b = sent_by_a[:lost_from], [step(1, handoff, handoff + 1, first=True)]
    by_b += [step(1, index, index + 1) for index in range(handoff + 1, handoff + 5)]
    ownership, passed, now_s = owned_by(A), list[int](), 0.0
    for event in [*events, *(["b"] * 5), *(["a"] * 12), "time", "time"]:
        if event == "a" and by_a:
            passed += tokens_of(ownership.receive(A, by_a.pop(0), now_s) or ())
        elif event == "b" and by_b:
            passed += tokens_of(ownership.receive(B, by_b.pop(0), now_s) or ())
        elif event == "time":
            now_s += 0.6
            passed += tokens_of(ownership.expire(now_s))
        elif event == "repeat" and ownership.owner == B and sent_by_a:
            passed += tokens_of(ownership.receive(A, sent_by_a[0], now_s) or ())
        elif event == "a ends" and ownership.owner == B:
            by_a = []
            passed += tokens_of(ownership.silenced(A))
        ownership.validate()
        assert passed == ownership.token_ids == TRUTH[: len(passed)]
    assert ownership.owner == B
    assert passed == TRUTH[: handoff + 5]


@given(st.lists(st.sampled_from(["deliver", "die", "stray", "duplicate"]), max_size=40))
def test_recoveries_between_two_workers_lose_and_double_nothing(events: list[str]) -> None:
    ownership, passed = owned_by(A), list[int]()
    lives = {A: 0, B: 0}
    truth = list(range(1000))
    for event in events:
        owner = ownership.owner
        assert owner is not None
        other = B if owner == A else A
        at = len(ownership.token_ids)
        if event == "deliver":
            passed += tokens_of(ownership.receive(owner, Step(ownership.epoch, at, truth[at : at + 2]), 0) or ())
        elif event == "die":
            ownership.take_back()
            ownership.place(other)
            lives[other] = ownership.epoch
        elif event == "stray":
            assert not ownership.receive(other, Step(lives[other], at, truth[at : at + 1]), 0)
        elif at:
            with pytest.raises(TokenGap):
                ownership.receive(owner, Step(ownership.epoch, at - 1, truth[at - 1 : at]), 0)
        ownership.validate()
        assert passed == ownership.token_ids == truth[: len(passed)]


def test_an_adopted_request_goes_on_from_the_tokens_that_its_owner_tells_of() -> None:
    ownership = TokenStream[Step]()
    ownership.adopt(B, 4)
    assert (ownership.owner, ownership.epoch) == (B, 4)
    assert tokens_of(ownership.receive(B, step(4, 0, 3), 0)) == TRUTH[:3]
    with pytest.raises(AssertionError, match="before anything else"):
        ownership.adopt(A, 6)


def test_a_recovery_has_an_epoch_of_its_own_however_many_moves_were_not_heard_of() -> None:
    ownership = owned_by(A)
    for _ in range(3):
        unheard_moves = range(ownership.epoch, ownership.epoch + 1000)
        ownership.take_back()
        assert ownership.epoch > max(unheard_moves)
    assert ownership.epoch < EPOCHS_PER_ADOPTION, "another frontend overtakes them all"


@pytest.mark.parametrize(("sender", "epoch"), [(A, 0), (A, 2), (C, 9)])
def test_a_move_that_is_old_or_not_the_owners_changes_nothing(sender: Incarnation, epoch: int) -> None:
    ownership = TokenStream[Step]()
    ownership.adopt(A, 2)
    assert ownership.moved(sender, B, epoch) == ()
    assert (ownership.owner, ownership.epoch) == (A, 2)


def test_an_error_of_a_life_that_nobody_owns_keeps_the_next_epoch_above_it() -> None:
    ownership = owned_by(A)
    ownership.take_back()
    assert not ownership.gives_up(B, 7)
    assert ownership.epoch > 8, "nor is it the epoch of a move of that life"
    assert ownership.owner is None
    ownership.validate()


def test_a_stray_life_is_told_to_stop_while_tokens_wait_for_the_former_owner() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    ownership.receive(B, step(1, 4, 5, first=True), 0)
    assert ownership.receive(C, step(0, 2, 3), 0) is None
    assert ownership.token_ids == TRUTH[:2]
    assert tokens_of(ownership.receive(A, step(0, 2, 4), 0)) == TRUTH[2:5]


def test_a_life_with_another_past_is_told_to_stop_once() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    assert ownership.receive(B, Step(1, 2, [7], [1, 2]), 0) is None
    assert ownership.receive(B, Step(1, 2, [7], [1, 2]), 0) == ()


def test_what_a_former_owner_repeats_or_went_on_to_after_the_handoff_does_not_count() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    ownership.receive(B, step(1, 4, 5, first=True), 0)
    assert ownership.receive(A, step(0, 2, 5), 0) == (), "token 4 is B's"
    assert ownership.receive(A, step(0, 1, 2), 0) == (), "it was passed on before"
    ownership.validate()
    assert tokens_of(ownership.receive(A, step(0, 2, 4), 0)) == TRUTH[2:5]


def test_a_former_owner_that_is_the_owner_again_is_not_waited_for() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    ownership.receive(B, step(1, 4, 5, first=True), 0)
    assert ownership.receive(A, step(2, 6, 7, first=True), 0) == []
    assert tokens_of(ownership.silenced(B)) == TRUTH[2:7], "nobody is left to wait for"
    assert tokens_of(ownership.receive(A, step(2, 7, 8), 0)) == TRUTH[7:8]


def test_tokens_that_two_owners_sent_count_once() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    ownership.receive(B, step(1, 4, 6, first=True), 0)
    ownership.receive(C, step(2, 5, 6, first=True), 0)
    ownership.receive(C, step(2, 6, 7), 0)
    assert tokens_of(ownership.expire(1.0)) == TRUTH[2:7]


def test_a_gap_in_what_was_held_ends_it_there() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    ownership.receive(B, step(1, 4, 5, first=True), 0)
    ownership.receive(B, step(1, 6, 7), 0)
    assert tokens_of(ownership.expire(1.0)) == TRUTH[2:5]
    with pytest.raises(TokenGap):
        ownership.receive(B, step(1, 7, 8), 1)


def test_no_more_is_held_than_may_be() -> None:
    truth = list(range(1000))
    ownership = owned_by(A)
    ownership.receive(B, Step(1, 1, truth[1:2], truth[:1]), 0)
    for index in range(2, MAX_HELD_DELTAS + 1):
        assert ownership.receive(B, Step(1, index, truth[index : index + 1]), 0) == []
    ownership.validate()
    last = MAX_HELD_DELTAS + 1
    assert tokens_of(ownership.receive(B, Step(1, last, truth[last : last + 1]), 0)) == truth[: last + 1]
    assert not ownership.holds


def test_a_second_handoff_may_be_early_too() -> None:
    ownership = owned_by(A)
    ownership.receive(A, step(0, 0, 2), 0)
    assert tokens_of(ownership.receive(B, step(1, 2, 3, first=True), 0)) == TRUTH[2:3]
    assert ownership.receive(C, step(2, 5, 6, first=True), 5.0) == []
    assert ownership.expire(5.9) == (), "a hold begins with what is held first"
    assert tokens_of(ownership.expire(6.0)) == TRUTH[3:6]


def test_a_life_that_a_recovery_has_overtaken_cannot_claim_the_request() -> None:
    ownership = Ownership()
    ownership.place(A)
    assert not ownership.claim(B, 0)
    assert ownership.claim(B, 1)
    assert not ownership.claim(A, 1)
    assert (ownership.owner, ownership.epoch) == (B, 1)


def test_a_stray_life_is_told_to_stop_once_while_nobody_owns_the_request() -> None:
    ownership = owned_by(A)
    ownership.take_back()
    assert ownership.receive(B, step(7, 0, 1, first=True), 0) is None
    assert ownership.receive(B, step(7, 1, 2), 0) == ()
