"""What a frontend does about its requests' tokens and about workers that are lost."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.ownership import EPOCHS_PER_RECOVERY
from controlplane.protocols.relay.events import (
    TRANSITIONS,
    Abort,
    Adopted,
    DeltaCame,
    Dropped,
    Fail,
    FailAdopted,
    FailBroken,
    FinishAtLength,
    Forget,
    Loss,
    LossReason,
    Moved,
    Pass,
    Recover,
    RelayedRequest,
    RelayState,
    Release,
    Released,
    ReportLoss,
    Submitted,
    Tick,
    Why,
    Withdrawn,
    WorkerGaveUp,
    WorkerLost,
)
from controlplane.protocols.relay.manager import MAX_ENDED, RelayManager
from mesh.errors import IllegalTransition, InvariantBroken

A, B, C = Incarnation("a", "1"), Incarnation("b", "1"), Incarnation("c", "1")
MAX_TOKENS = 12
TRUTH = list(range(100, 100 + MAX_TOKENS))


@dataclass(frozen=True)
class Step:
    """A delta."""

    request_id: str
    epoch: int
    offset: int
    token_ids: list[int]
    emitted_token_ids: list[int] = field(default_factory=list)
    finish_reason: int = 0


Manager: TypeAlias = RelayManager[Step, str]


def step(epoch: int, start: int, end: int, *, first: bool = False, finish: int = 0) -> Step:
    return Step("r", epoch, start, TRUTH[start:end], TRUTH[:start] if first else [], finish)


def running(tokens: int = 0) -> tuple[Manager, RelayedRequest[Step]]:
    manager, request = Manager(), RelayedRequest[Step]("r", MAX_TOKENS)
    assert manager.handle(Submitted(request, A), 0.0) == ()
    if tokens:
        assert request.stream.push(A, step(0, 0, tokens))
    return manager, request


def lost(owner: Incarnation = A) -> WorkerLost[str]:
    return WorkerLost(owner, Loss(LossReason.WORKER_LOST, owner.instance_id, "gone"))


def test_what_push_does_not_take_is_passed_on_once_it_is_its_turn() -> None:
    manager, request = running(2)
    early, late = step(1, 4, 5, first=True), step(0, 2, 4)
    assert not request.stream.push(B, early)
    assert manager.handle(DeltaCame(B, early), 0.0) == ()
    manager.validate()
    assert not any(request.stream.push(B, step(1, at, at + 1)) for at in (2, 5)), "others are held"
    assert manager.handle(DeltaCame(A, late), 0.0) == (Pass("r", (late, early)),)
    assert request.stream.push(B, step(1, 5, 6))


def test_held_tokens_are_passed_on_when_their_time_is_up() -> None:
    manager, _ = running(2)
    manager.handle(DeltaCame(B, step(1, 4, 5, first=True)), 0.0)
    assert manager.handle(Tick(), 0.9) == ()
    (passed,) = manager.handle(Tick(), 1.0)
    assert isinstance(passed, Pass)
    assert [list(one.token_ids) for one in passed.passed] == [TRUTH[2:4], TRUTH[4:5]]
    assert manager.handle(Tick(), 9.0) == ()


@pytest.mark.parametrize("ends", [Dropped("r"), Released("r"), lost()])
def test_a_request_that_ends_or_is_lost_holds_nothing(ends: Any) -> None:
    manager, _ = running(2)
    manager.handle(DeltaCame(B, step(1, 4, 5, first=True)), 0.0)
    manager.handle(ends, 0.0)
    manager.validate()
    assert not manager._holding
    assert manager.handle(Tick(), 9.0) == ()


def test_nothing_counts_behind_the_last_delta() -> None:
    manager, request = running(2)
    last = step(1, 3, 4, first=True, finish=1)
    manager.handle(DeltaCame(B, last), 0.0)
    manager.handle(DeltaCame(B, step(1, 4, 5)), 0.0)
    missing = step(0, 2, 3)
    assert manager.handle(DeltaCame(A, missing), 0.0) == (Pass("r", (missing, last)), Forget("r"))
    assert (request.state, len(manager)) == (RelayState.ENDED, 0)
    assert manager.handle(DeltaCame(B, step(1, 5, 6)), 0.0) == ()


def test_a_broken_stream_ends_the_request() -> None:
    manager, request = running(2)
    abort, broken, forget = manager.handle(DeltaCame(A, step(0, 3, 4)), 0.0)
    assert (abort, forget) == (Abort(A, "r", 0, Why.BROKEN), Forget("r"))
    assert isinstance(broken, FailBroken)
    assert broken.request_id == "r"
    assert "offset 2" in str(broken.gap)
    assert request.state is RelayState.ENDED


def test_a_lost_worker_leaves_its_requests_to_others_and_the_others_theirs() -> None:
    manager, request = running(2)
    other = RelayedRequest[Step]("other", MAX_TOKENS)
    manager.handle(Submitted(other, B), 0.0)
    report, recover = manager.handle(lost(), 0.0)
    assert report == ReportLoss("a", LossReason.WORKER_LOST, 1)
    assert recover == Recover("r", Loss(LossReason.WORKER_LOST, "a", "gone"))
    assert (request.state, request.instance_id, request.stream.epoch) == (RelayState.LOST, "a", EPOCHS_PER_RECOVERY)
    assert (other.state, other.instance_id) == (RelayState.RUNNING, "b")
    assert manager.owned() == {B: 1}
    assert manager.handle(DeltaCame(A, step(0, 2, 3)), 0.0) == (Abort(A, "r", 0, Why.STRAY),)
    assert manager.handle(DeltaCame(A, step(0, 3, 4)), 0.0) == (), "said once"
    manager.handle(Submitted(request, C), 0.0)
    assert request.stream.push(C, step(EPOCHS_PER_RECOVERY, 2, 3))


def test_a_hung_worker_is_to_drop_what_it_has_and_what_is_complete_is_not_placed_again() -> None:
    manager, _ = running(MAX_TOKENS)
    manager.handle(Submitted(RelayedRequest[Step]("other", MAX_TOKENS), B), 0.0)
    loss = Loss(LossReason.WORKER_HUNG, "a", "hangs")
    assert manager.handle(WorkerLost(A, loss, is_connected=True), 0.0) == (
        Abort(A, "r", 0, Why.HUNG),
        ReportLoss("a", LossReason.WORKER_HUNG, 1),
        FinishAtLength("r"),
        Forget("r"),
    )


def test_the_loss_of_a_former_owner_ends_the_wait_for_its_tokens() -> None:
    manager, _ = running(2)
    manager.handle(DeltaCame(B, step(1, 4, 5, first=True, finish=1)), 0.0)
    report, passed, forget = manager.handle(lost(), 0.0)
    assert report == ReportLoss("a", LossReason.WORKER_LOST, 0)
    assert isinstance(passed, Pass)
    assert [token for one in passed.passed for token in one.token_ids] == TRUTH[2:5]
    assert forget == Forget("r")


def test_a_request_whose_last_tokens_came_late_is_not_lost_with_its_worker() -> None:
    """B had ended it, which was held for A's tail; then B's stream ends, and with it the wait."""
    manager, request = running(2)
    manager.handle(DeltaCame(B, step(1, 4, 5, first=True, finish=1)), 0.0)
    assert [type(one) for one in manager.handle(lost(B), 0.0)] == [ReportLoss, Pass, Forget]
    assert request.state is RelayState.ENDED


@pytest.mark.parametrize("reason", [None, LossReason.UNAVAILABLE])
def test_a_request_that_its_owner_gives_up_is_placed_again_if_that_may_help(reason: LossReason | None) -> None:
    manager, _ = running(2)
    assert manager.handle(WorkerGaveUp("r", B, 0, "not mine", reason), 0.0) == ()
    assert manager.handle(WorkerGaveUp("x", A, 0, "unknown", reason), 0.0) == ()
    told = manager.handle(WorkerGaveUp("r", A, 0, "no", reason), 0.0)
    if reason is None:
        assert told == (Fail("r", "no"), Forget("r"))
    else:
        assert told == (Recover("r", Loss(reason, "a", "no")),)
    manager.validate()


def test_a_former_owner_that_gives_up_is_waited_for_no_longer() -> None:
    manager, _ = running(2)
    manager.handle(DeltaCame(B, step(1, 4, 5, first=True)), 0.0)
    (passed,) = manager.handle(WorkerGaveUp("r", A, 0, "no", None), 0.0)
    assert isinstance(passed, Pass)
    assert [token for one in passed.passed for token in one.token_ids] == TRUTH[2:5]


def test_an_owner_that_gives_up_after_the_last_delta_was_held_fails_nothing() -> None:
    manager, _ = running(2)
    manager.handle(DeltaCame(B, step(1, 4, 5, first=True, finish=1)), 0.0)
    told = manager.handle(WorkerGaveUp("r", B, 1, "no", None), 0.0)
    assert [type(one) for one in told] == [Pass, Forget]


def test_a_request_that_moved_to_a_lost_worker_is_placed_again_or_complete() -> None:
    target_lost = Loss(LossReason.HANDOFF, "b", "gone")
    manager, _ = running(2)
    assert manager.handle(Moved("r", A, B, 1, target_lost), 0.0) == (Recover("r", target_lost),)
    manager, request = running(MAX_TOKENS)
    assert manager.handle(Moved("r", A, B, 1, target_lost), 0.0) == (FinishAtLength("r"), Forget("r"))
    assert (request.state, len(manager)) == (RelayState.ENDED, 0)


def test_a_move_is_believed_and_what_is_not_wanted_is_refused_at_the_target() -> None:
    manager, request = running(2)
    assert manager.handle(Moved("r", A, B, 1), 0.0) == ()
    assert request.stream.owner == B
    manager.handle(Dropped("r"), 0.0)
    assert manager.handle(Moved("r", B, C, 2), 0.0) == (Abort(C, "r", 2, Why.UNWANTED),)
    assert manager.handle(Moved("r", B, C, 2, Loss(LossReason.HANDOFF, "c", "")), 0.0) == ()


def test_a_request_of_an_earlier_life_of_the_frontend_that_has_moved_is_left_to_its_worker() -> None:
    manager = Manager()
    assert manager.handle(DeltaCame(B, step(1, 2, 3, first=True)), 0.0) == (Release(B, "r", 1),)
    assert manager.handle(DeltaCame(B, step(1, 3, 4)), 0.0) == (), "it was told"
    assert manager.handle(Moved("r", B, C, 2), 0.0) == (Release(C, "r", 2),)
    assert manager.handle(Moved("r", B, C, 2, Loss(LossReason.HANDOFF, "c", "")), 0.0) == ()


def test_dropped_and_released_requests_are_told_to_their_owner() -> None:
    manager, _ = running()
    assert manager.handle(Dropped("r"), 0.0) == (Abort(A, "r", 0, Why.UNWANTED), Forget("r"))
    assert manager.handle(Dropped("r"), 0.0) == ()
    manager, _ = running()
    assert manager.handle(Dropped("r", is_done=True), 0.0) == (Abort(A, "r", 0, Why.DONE), Forget("r"))
    manager, _ = running()
    assert manager.handle(Released("r"), 0.0) == (Release(A, "r", 0), Forget("r"))
    assert manager.handle(Released("r"), 0.0) == ()
    assert manager.handle(DeltaCame(B, step(1, 2, 3, first=True)), 0.0) == (Release(B, "r", 1),)
    assert manager.handle(Moved("r", A, B, 1), 0.0) == (Release(B, "r", 1),)
    assert manager.handle(DeltaCame(B, step(1, 3, 4)), 0.0) == (), "it was told"


@pytest.mark.parametrize("leaves", [Dropped("r"), Released("r")])
def test_a_request_without_an_owner_leaves_without_a_word_to_workers(leaves: Dropped | Released) -> None:
    manager, _ = running()
    manager.handle(lost(), 0.0)
    assert manager.handle(leaves, 0.0) == (Forget("r"),)


def test_few_requests_are_remembered_past_their_end() -> None:
    manager = Manager()
    for number in range(MAX_ENDED + 1):
        manager.handle(Submitted(RelayedRequest[Step](f"r{number}", MAX_TOKENS), A), 0.0)
        manager.handle(Dropped(f"r{number}"), 0.0)
        if number == MAX_ENDED - 1:
            assert manager.handle(Moved("r0", A, B, 1), 0.0) == (Abort(B, "r0", 1, Why.UNWANTED),)
    assert manager.handle(Moved("r0", A, B, 1), 0.0) == (Release(B, "r0", 1),)
    assert manager.handle(Moved("r1", A, B, 1), 0.0) == (Abort(B, "r1", 1, Why.UNWANTED),)
    manager.validate()


def test_a_request_that_is_back_is_not_remembered_as_ended() -> None:
    manager, _ = running()
    manager.handle(Dropped("r"), 0.0)
    manager.handle(Adopted(RelayedRequest[Step]("r", MAX_TOKENS, TRUTH[:3]), B, 2), 0.0)
    manager.validate()
    manager.handle(Released("r"), 0.0)
    assert manager.handle(Moved("r", B, C, 3), 0.0) == (Release(C, "r", 3),)


def test_a_withdrawn_request_that_had_moved_is_dropped_there() -> None:
    manager, _ = running()
    manager.handle(Withdrawn("r"), 0.0)
    assert manager.handle(Moved("r", A, B, 1), 0.0) == (Abort(B, "r", 1, Why.UNWANTED),)


def test_an_adopted_request_goes_on_and_ends_its_former_life_here() -> None:
    manager, former = running(2)
    adopted = RelayedRequest[Step]("r", MAX_TOKENS, TRUTH[:3])
    assert manager.handle(Adopted(adopted, B, 2), 0.0) == (FailAdopted("r"), Forget("r"))
    assert (former.state, adopted.state, len(manager)) == (RelayState.ENDED, RelayState.RUNNING, 1)
    assert adopted.stream.push(B, step(2, 3, 4))
    with pytest.raises(IllegalTransition, match=r"request r, ended, of a \(1\) in epoch 0.* cannot become running"):
        manager.handle(Adopted(former, B, 2), 0.0)


def test_a_withdrawn_request_is_submitted_anew_under_a_higher_epoch() -> None:
    manager, request = running()
    assert manager.handle(Withdrawn("r"), 0.0) == (Abort(A, "r", 0, Why.UNWANTED),)
    assert (request.state, request.stream.epoch, len(manager)) == (RelayState.NEW, EPOCHS_PER_RECOVERY, 0)
    assert manager.handle(Withdrawn("r"), 0.0) == ()
    manager.handle(Submitted(request, B), 0.0)
    assert request.state is RelayState.RUNNING


def test_what_only_a_bug_can_ask_for_is_refused_with_the_requests_story() -> None:
    manager, request = running(2)
    with pytest.raises(IllegalTransition, match=r"request r, running, of a \(1\) in epoch 0, .*2 of 12 tokens"):
        manager.handle(Submitted(request, B), 0.0)
    with pytest.raises(IllegalTransition, match=r"another request r, new, .* is here"):
        manager.handle(Submitted(RelayedRequest[Step]("r", MAX_TOKENS), B), 0.0)
    manager.handle(lost(), 0.0)
    with pytest.raises(IllegalTransition, match="request r, lost, of nobody in epoch 1048576, last lost by a"):
        manager.handle(Withdrawn("r"), 0.0)


def test_a_new_request_is_nobodys() -> None:
    assert RelayedRequest[Step]("r", MAX_TOKENS).instance_id == ""


def test_every_state_can_end_and_none_comes_back() -> None:
    assert set(TRANSITIONS) == set(RelayState)
    assert not TRANSITIONS[RelayState.ENDED]
    assert all(RelayState.ENDED in after for state, after in TRANSITIONS.items() if state is not RelayState.ENDED)


def spoil_owner(manager: Manager, request: RelayedRequest[Step]) -> None:
    request.stream.owner = None


def spoil_state(manager: Manager, request: RelayedRequest[Step]) -> None:
    request.state = RelayState.ENDED


def spoil_id(manager: Manager, request: RelayedRequest[Step]) -> None:
    request.request_id = "x"


def spoil_holding(manager: Manager, request: RelayedRequest[Step]) -> None:
    manager._holding["r"] = request


def spoil_ended(manager: Manager, request: RelayedRequest[Step]) -> None:
    manager._ended["r"] = None


@pytest.mark.parametrize("spoil", [spoil_owner, spoil_state, spoil_id, spoil_holding, spoil_ended])
def test_broken_state_is_found(spoil: Any) -> None:
    manager, request = running(2)
    manager.validate()
    spoil(manager, request)
    with pytest.raises(InvariantBroken):
        manager.validate()
