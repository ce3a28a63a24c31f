"""Which migrations to an instance are taken, and for how long one that ended is answered for."""

import pytest

from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.protocols.migration import messages, target
from controlplane.protocols.migration.limits import ManagerLimits
from controlplane.protocols.migration.source_events import ObstacleChanged, Stopped
from controlplane.protocols.migration.target import TargetState
from controlplane.protocols.migration.target_manager import (
    Answer,
    Answered,
    ArrivalEnded,
    ConnectionEnded,
    Do,
    Received,
    Superseded,
    TargetManager,
)

LIMITS = ManagerLimits()


def offer(number: int) -> messages.Offer:
    return messages.Offer(f"m{number}", EngineRequest(f"r{number}", (1,), SamplingParams(max_tokens=9)), 1, "f")


def take(manager: TargetManager, number: int, now_ms: float = 0.0) -> bool:
    """Whether an offer is taken; its blocks are reserved then."""
    (instruction,) = manager.handle(Received("source", offer(number)), now_ms)
    if isinstance(instruction, Answer):
        assert isinstance(instruction.message, messages.Refuse)
        return False
    assert instruction == Do(f"m{number}", target.Reserve(offer(number).request))
    answer = manager.handle(Answered(f"m{number}", target.Reserved()), now_ms)
    assert answer == (Answer("source", messages.Accept(f"m{number}")),)
    manager.validate()
    return True


def test_so_many_arrive_at_once_and_not_one_more() -> None:
    manager = TargetManager()
    assert all(take(manager, number) for number in range(LIMITS.arriving))
    assert not take(manager, LIMITS.arriving)
    assert manager.running == LIMITS.arriving
    manager.handle(Received("source", messages.Abort("m0", "never mind")), 1.0)
    assert take(manager, LIMITS.arriving), "one has ended"
    assert not take(manager, LIMITS.arriving + 1)


def test_the_bound_is_that_of_the_limits() -> None:
    manager = TargetManager(ManagerLimits(arriving=2))
    assert [take(manager, number) for number in range(3)] == [True, True, False]


def test_those_that_are_only_offered_count_too() -> None:
    manager = TargetManager(ManagerLimits(arriving=1))
    manager.handle(Received("source", offer(0)), 0.0)
    assert not take(manager, 1)


def test_how_a_migration_ended_is_remembered_for_a_while_and_for_so_many() -> None:
    manager = TargetManager(ManagerLimits(remembered=2))
    for number in range(2):
        assert take(manager, number)
        manager.handle(Received("source", messages.Abort(f"m{number}", "torn")), 10.0)
    assert manager.handle(Received("source", messages.Abort("m0", "again")), 11.0) == (
        Answer("source", messages.Failed("m0", "torn")),
    )
    assert manager.moved_lately("r0")
    assert not take(manager, 2, 10.0 + LIMITS.remember_ms - 1)
    assert take(manager, 2, 10.0 + LIMITS.remember_ms)
    assert not manager.moved_lately("r0")
    (answer,) = manager.handle(Received("source", messages.Abort("m0", "late")), 20_000.0)
    assert isinstance(answer, Answer)
    assert answer.message == messages.Failed("m0", "this migration is unknown here")


def test_time_makes_it_forget_as_well() -> None:
    manager = TargetManager()
    take(manager, 0)
    manager.handle(Received("source", messages.Abort("m0", "torn")), 10.0)
    manager.handle(target.Tick(), 10.0 + LIMITS.remember_ms)
    assert not manager.moved_lately("r0")


def test_nothing_is_taken_while_no_kv_can_be_received() -> None:
    manager = TargetManager()
    manager.handle(ObstacleChanged("no route"), 0.0)
    (answer,) = manager.handle(Received("source", offer(0)), 0.0)
    assert answer == Answer("source", messages.Refuse("m0", "no request can be moved to here: no route"))
    manager.handle(ObstacleChanged(""), 0.0)
    assert take(manager, 0)


@pytest.mark.parametrize("connection", ["source", "another"])
def test_the_loss_of_a_source_ends_what_came_from_it(connection: str) -> None:
    manager = TargetManager()
    take(manager, 0)
    ended = [each for each in manager.handle(ConnectionEnded(connection), 5.0) if isinstance(each, ArrivalEnded)]
    assert [(each.migration_id, each.state) for each in ended] == (
        [("m0", TargetState.DISCARDED)] if connection == "source" else []
    )
    assert manager.running == (connection == "another")


def test_a_request_whose_blocks_are_all_there_is_run_after_one_more_look() -> None:
    manager = TargetManager()
    take(manager, 0)
    final = messages.FinalMessage("m0", (7,), 1, first_block=0, block_count=0)
    assert manager.handle(Received("source", final), 1.0) == (Do("m0", target.Pull(0, 0)),)
    activate, answer, ended = manager.handle(Answered("m0", target.Arrived(0, 0)), 2.0)
    assert activate == Do("m0", target.Activate((7,), 1))
    assert answer == Answer("source", messages.Committed("m0"))
    assert isinstance(ended, ArrivalEnded)
    assert (ended.state, ended.duration_ms) == (TargetState.COMMITTED, 2.0)


def test_a_source_that_falls_silent_is_given_up() -> None:
    manager = TargetManager()
    take(manager, 0)
    assert manager.handle(target.Tick(), LIMITS.live.idle_ms - 1) == ()
    assert manager.running == 1
    manager.handle(target.Tick(), LIMITS.live.idle_ms)
    assert manager.running == 0


def test_an_instance_that_ends_lets_requests_stay_where_they_are() -> None:
    manager = TargetManager()
    take(manager, 0)
    take(manager, 1)
    manager.handle(Received("source", messages.FinalMessage("m1", (7,), 2, 0, 1)), 1.0)
    told = manager.handle(Stopped(), 2.0)
    failed = {each.message for each in told if isinstance(each, Answer)}
    assert failed == {messages.Failed(f"m{number}", "the worker ends") for number in range(2)}
    assert [each for each in told if isinstance(each, Do)] == [Do("m0", target.Discard()), Do("m1", target.Discard())]
    assert manager.running == 0
    manager.handle(ObstacleChanged(""), 3.0)
    assert not take(manager, 2), "nor does another one come"
    late = manager.handle(Received("source", messages.FinalMessage("m0", (7,), 2, 0, 1)), 3.0)
    assert late == (Answer("source", messages.Failed("m0", "the worker ends")),)


@pytest.mark.parametrize(("epoch", "is_discarded"), [(0, False), (1, True), (2, True)])
def test_a_request_that_its_frontend_gives_to_the_target_itself_does_not_arrive_besides(
    epoch: int, is_discarded: bool
) -> None:
    """Found by seed 9821: its source was frozen in mid-transfer, and its id was taken here for as long as that was."""
    manager = TargetManager()
    assert take(manager, 0)
    assert take(manager, 1)
    told = manager.handle(Superseded("r0", epoch), 5.0)
    assert (Do("m0", target.Discard()) in told) == is_discarded
    assert any(isinstance(each, ArrivalEnded) for each in told) == is_discarded
    assert manager.is_running("m0") != is_discarded
    assert manager.is_running("m1")
    assert manager.handle(Superseded("r0", epoch), 6.0) == ()
    manager.validate()
