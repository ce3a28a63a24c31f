"""The target's side of a migration alone: what it does about each event in each state."""

from collections.abc import Callable

import pytest

from controlplane.protocols.migration.messages import (
    Abort,
    Accept,
    Committed,
    Failed,
    FinalMessage,
    Offer,
    Pulled,
    Refuse,
    Round,
    ToSource,
)
from controlplane.protocols.migration.target import (
    Activate,
    Arrived,
    Discard,
    NotArrived,
    NotReserved,
    Pull,
    Reserve,
    Reserved,
    Send,
    SourceLost,
    TargetEvent,
    TargetInstruction,
    TargetMigration,
    TargetState,
    Tick,
)
from mesh.errors import IllegalTransition
from tests.unit.controlplane.protocols.migration_model import LIMITS, REQUEST

OFFER = Offer("m", REQUEST, 4, "f")
ROUND = Round("m", 1, 0, 4)
FINAL_MESSAGE = FinalMessage("m", (7,), 17, 4, 1)
ABORT = Abort("m", "never mind")


def reserving() -> TargetMigration:
    migration = TargetMigration(OFFER, limits=LIMITS, now_ms=0)
    assert migration.start() == (Reserve(REQUEST),)
    return migration


def receiving() -> TargetMigration:
    migration = reserving()
    migration.handle(Reserved(), 10)
    return migration


def pulling() -> TargetMigration:
    migration = receiving()
    migration.handle(ROUND, 20)
    return migration


def completing() -> TargetMigration:
    migration = receiving()
    migration.handle(FINAL_MESSAGE, 30)
    return migration


def committed() -> TargetMigration:
    migration = completing()
    migration.handle(Arrived(4, 1), 40)
    return migration


def discarded() -> TargetMigration:
    migration = receiving()
    migration.handle(Abort("m", "enough"), 40)
    return migration


def answer(message: ToSource) -> Send:
    return Send(message)


def failed(reason: str) -> Send:
    return Send(Failed("m", reason))


GONE = "the source is gone"


@pytest.mark.parametrize(
    ("given", "event", "instructions", "state"),
    [
        (reserving, OFFER, (), TargetState.RESERVING),
        (reserving, ROUND, (), TargetState.RESERVING),
        (reserving, FINAL_MESSAGE, (), TargetState.RESERVING),
        (reserving, Reserved(), (answer(Accept("m")),), TargetState.RECEIVING),
        (reserving, NotReserved("full"), (answer(Refuse("m", "full")),), TargetState.DISCARDED),
        (reserving, ABORT, (failed("never mind"),), TargetState.DISCARDED),
        (reserving, SourceLost(), (failed(GONE),), TargetState.DISCARDED),
        (receiving, OFFER, (answer(Accept("m")),), TargetState.RECEIVING),
        (receiving, ROUND, (Pull(0, 4),), TargetState.RECEIVING),
        (receiving, FINAL_MESSAGE, (Pull(4, 1),), TargetState.COMPLETING),
        (receiving, ABORT, (Discard(), failed("never mind")), TargetState.DISCARDED),
        (receiving, SourceLost(), (Discard(), failed(GONE)), TargetState.DISCARDED),
        (pulling, ROUND, (), TargetState.RECEIVING),
        (pulling, Arrived(0, 4), (answer(Pulled("m", 1)),), TargetState.RECEIVING),
        (pulling, NotArrived("torn"), (Discard(), failed("torn")), TargetState.DISCARDED),
        (pulling, ABORT, (Discard(), failed("never mind")), TargetState.DISCARDED),
        (pulling, SourceLost(), (Discard(), failed(GONE)), TargetState.DISCARDED),
        (completing, ROUND, (), TargetState.COMPLETING),
        (completing, FINAL_MESSAGE, (), TargetState.COMPLETING),
        (completing, SourceLost(), (), TargetState.COMPLETING),
        (completing, Arrived(4, 1), (Activate((7,), 17), answer(Committed("m"))), TargetState.COMMITTED),
        (completing, NotArrived("torn"), (Discard(), failed("torn")), TargetState.DISCARDED),
        (completing, ABORT, (Discard(), failed("never mind")), TargetState.DISCARDED),
        *((committed, each, (answer(Committed("m")),), TargetState.COMMITTED) for each in (OFFER, ROUND, ABORT)),
        *((committed, each, (), TargetState.COMMITTED) for each in (Reserved(), SourceLost(), Tick())),
        *((discarded, each, (failed("enough"),), TargetState.DISCARDED) for each in (OFFER, FINAL_MESSAGE, ABORT)),
        (discarded, SourceLost(), (), TargetState.DISCARDED),
        (discarded, Reserved(), (Discard(),), TargetState.DISCARDED),
    ],
)
def test_what_is_done_about_an_event(
    given: Callable[[], TargetMigration],
    event: TargetEvent,
    instructions: tuple[TargetInstruction, ...],
    state: TargetState,
) -> None:
    migration = given()
    before = migration.story
    has_changed = migration.state is not state
    assert migration.handle(event, 60) == instructions
    migration.validate()
    assert migration.state is state
    told = f"; 60 ms: {state}" + (f" ({migration.reason})" if migration.reason else "")
    assert migration.story == before + (told if has_changed else "")


def test_one_without_room_answers_whoever_asks_again() -> None:
    migration = reserving()
    migration.handle(NotReserved("full"), 5)
    assert migration.handle(OFFER, 6) == (failed("full"),)
    assert migration.story == "migration m: 0 ms: offered; 5 ms: discarded (full)"


def test_a_round_that_is_here_is_told_of_again_and_a_later_one_pulled() -> None:
    migration = pulling()
    migration.handle(Arrived(0, 4), 25)
    assert migration.handle(ROUND, 26) == (answer(Pulled("m", 1)),)
    assert migration.handle(Round("m", 2, 4, 2), 27) == (Pull(4, 2),)
    assert migration.handle(Arrived(4, 2), 28) == (answer(Pulled("m", 2)),)
    assert migration.handle(ROUND, 29) == (answer(Pulled("m", 1)),)


@pytest.mark.parametrize(
    ("given", "arrived"),
    [(receiving, Arrived(0, 4)), (pulling, Arrived(1, 4)), (pulling, Arrived(0, 3)), (completing, Arrived(0, 4))],
)
def test_blocks_that_nobody_asked_for_are_a_bug(given: Callable[[], TargetMigration], arrived: Arrived) -> None:
    with pytest.raises(
        IllegalTransition, match=r"blocks arrived that were not asked for: .*migration m: 0 ms: offered"
    ):
        given().handle(arrived, 60)


def test_blocks_are_reserved_once() -> None:
    with pytest.raises(IllegalTransition, match="receiving cannot become receiving; migration m: 0 ms: offered"):
        receiving().handle(Reserved(), 60)


@pytest.mark.parametrize("heard", [OFFER, ROUND])
def test_a_source_may_be_silent_only_so_long_counted_from_its_last_message(heard: Offer | Round) -> None:
    migration = pulling()
    migration.handle(Arrived(0, 4), 400)
    migration.handle(heard, 500)
    migration.handle(Tick(), 600)
    assert migration.handle(Tick(), 500 + LIMITS.idle_ms - 1) == ()
    assert migration.handle(Tick(), 500 + LIMITS.idle_ms) == (Discard(), failed("the source fell silent"))


@pytest.mark.parametrize("given", [pulling, completing])
def test_nobody_is_expected_to_speak_while_blocks_travel(given: Callable[[], TargetMigration]) -> None:
    assert given().handle(Tick(), 100 * LIMITS.idle_ms) == ()
