"""The source's side of a migration alone: what it does about each event in each state, and when its times are over."""

from collections.abc import Callable

import pytest

from controlplane.protocols.migration import messages
from controlplane.protocols.migration.limits import MigrationLimits
from controlplane.protocols.migration.orders import Transfer, TransferState
from controlplane.protocols.migration.source import (
    FINAL,
    Cancel,
    Ended,
    GiveUp,
    Pause,
    Paused,
    Progress,
    Release,
    Resume,
    Send,
    SourceEvent,
    SourceInstruction,
    SourceMigration,
    SourceState,
    TargetLost,
    Tick,
)
from mesh.errors import IllegalTransition
from tests.unit.controlplane.protocols.migration_model import LIMITS, REQUEST, new_source

ENDED = "the request ended before it was moved"
DIED = "the target died before it said whether it committed"
NOW_MS = 60.0


def waiting() -> SourceMigration:
    migration = new_source()
    assert migration.start(Progress(0, decoding=False)) == ()
    return migration


def offered() -> SourceMigration:
    migration = new_source()
    assert migration.start() == (Send(messages.Offer("m", REQUEST, 4, "f")),), "its epoch was 3"
    return migration


def copying() -> SourceMigration:
    migration = offered()
    assert migration.handle(messages.Accept("m"), 10) == ()
    assert migration.handle(Progress(4, decoding=False), 20) == (Send(messages.Round("m", 1, 0, 4)),)
    return migration


def pausing() -> SourceMigration:
    migration = copying()
    assert migration.handle(Progress(4, decoding=True), 25) == ()
    assert migration.handle(messages.Pulled("m", 1), 30) == (Pause(),)
    return migration


def committing() -> SourceMigration:
    migration = pausing()
    assert migration.handle(Paused((7,), 17, 5), 40) == (Send(messages.FinalMessage("m", (7,), 17, 4, 1)),)
    return migration


def taking_back() -> SourceMigration:
    migration = committing()
    assert migration.handle(Cancel("enough"), 50) == (Send(messages.Abort("m", "enough")),)
    return migration


def abort(reason: str) -> Send:
    return Send(messages.Abort("m", reason))


@pytest.mark.parametrize(
    ("given", "event", "instructions", "state", "reason"),
    [
        (waiting, Ended(), (), SourceState.KEPT, ENDED),
        (waiting, Cancel("never mind"), (), SourceState.KEPT, "never mind"),
        (waiting, TargetLost(), (), SourceState.KEPT, "the target is gone"),
        (offered, Ended(), (abort(ENDED),), SourceState.KEPT, ENDED),
        (offered, Cancel("never mind"), (abort("never mind"),), SourceState.KEPT, "never mind"),
        (offered, TargetLost(), (), SourceState.KEPT, "the target is gone"),
        (offered, messages.Refuse("m", "full"), (), SourceState.KEPT, "full"),
        (copying, Ended(), (abort(ENDED),), SourceState.KEPT, ENDED),
        (copying, Cancel("never mind"), (abort("never mind"),), SourceState.KEPT, "never mind"),
        (copying, TargetLost(), (), SourceState.KEPT, "the target is gone"),
        (copying, messages.Failed("m", "torn"), (), SourceState.KEPT, "torn"),
        (pausing, Ended(), (abort(ENDED),), SourceState.KEPT, ENDED),
        (pausing, Cancel("never mind"), (abort("never mind"), Resume()), SourceState.KEPT, "never mind"),
        (pausing, TargetLost(), (Resume(),), SourceState.KEPT, "the target is gone"),
        (pausing, messages.Failed("m", "torn"), (Resume(),), SourceState.KEPT, "torn"),
        (committing, Cancel("never mind"), (abort("never mind"),), SourceState.TAKING_BACK, ""),
        (committing, TargetLost(), (GiveUp(DIED),), SourceState.LOST, DIED),
        (committing, messages.Failed("m", "torn"), (Resume(),), SourceState.KEPT, "torn"),
        (committing, messages.Committed("m"), (Release(),), SourceState.MOVED, ""),
        (taking_back, TargetLost(), (GiveUp(DIED),), SourceState.LOST, DIED),
        (taking_back, messages.Failed("m", "torn"), (Resume(),), SourceState.KEPT, "torn"),
        (taking_back, messages.Committed("m"), (Release(),), SourceState.MOVED, ""),
    ],
)
def test_what_is_done_about_an_event_and_what_is_told_of_it(
    given: Callable[[], SourceMigration],
    event: SourceEvent,
    instructions: tuple[SourceInstruction, ...],
    state: SourceState,
    reason: str,
) -> None:
    migration = given()
    before = migration.story
    assert migration.handle(event, NOW_MS) == instructions
    migration.validate()
    assert (migration.state, migration.reason) == (state, reason)
    assert migration.story == f"{before}; 60 ms: {state}" + (f" ({reason})" if reason else "")
    if state in FINAL:
        for late in (Tick(), Ended(), Cancel("late"), messages.Committed("m"), messages.Accept("m")):
            assert migration.handle(late, 10 * NOW_MS) == (), "it has ended"


@pytest.mark.parametrize(
    ("given", "event"),
    [
        (offered, Progress(3, decoding=True)),
        (offered, messages.Pulled("m", 1)),
        (copying, messages.Accept("m")),
        (copying, messages.Pulled("m", 2)),
        (copying, Progress(9, decoding=True)),
        (pausing, messages.Pulled("m", 1)),
        (pausing, Progress(9, decoding=True)),
        (committing, messages.Pulled("m", 1)),
        (committing, messages.Accept("m")),
        (taking_back, Cancel("once more")),
    ],
)
def test_what_changes_nothing(given: Callable[[], SourceMigration], event: SourceEvent) -> None:
    migration = given()
    before = (migration.state, migration.story, migration.copied_blocks, migration.rounds)
    assert migration.handle(event, NOW_MS) == ()
    assert (migration.state, migration.story, migration.copied_blocks, migration.rounds) == before


def test_the_story_is_the_whole_way() -> None:
    assert taking_back().story == (
        "migration m: 0 ms: ordered; 0 ms: offered; 10 ms: copying; 30 ms: pausing; 40 ms: committing; "
        "50 ms: taking_back"
    )


@pytest.mark.parametrize(
    ("given", "since_ms", "limit_ms", "instructions", "state"),
    [
        (offered, 0, LIMITS.offer_ms, (abort("the target did not answer the offer"),), SourceState.KEPT),
        (copying, 20, LIMITS.round_ms, (abort("round 1 was not copied in time"),), SourceState.KEPT),
        (committing, 40, LIMITS.commit_ms, (abort("the target did not commit in time"),), SourceState.TAKING_BACK),
        (
            taking_back,
            50,
            LIMITS.take_back_ms,
            (GiveUp("the target did not say whether it committed"),),
            SourceState.LOST,
        ),
    ],
)
def test_each_state_may_last_only_so_long(
    given: Callable[[], SourceMigration],
    since_ms: float,
    limit_ms: float,
    instructions: tuple[SourceInstruction, ...],
    state: SourceState,
) -> None:
    migration = given()
    before = migration.state
    migration.handle(Tick(), since_ms + limit_ms - 1)
    assert migration.state is before
    assert migration.handle(Tick(), since_ms + limit_ms) == instructions
    assert migration.state is state
    assert f"; {since_ms + limit_ms:.0f} ms: {state}" in migration.story


def test_each_round_has_its_own_time_and_the_wait_between_two_has_none() -> None:
    migration = copying()
    assert migration.handle(messages.Pulled("m", 1), 9_000) == ()
    assert (migration.rounds, migration.copied_blocks) == (1, 4)
    assert migration.handle(Tick(), 90_000) == (), "the prompt is still being computed"
    assert migration.handle(Progress(8, decoding=False), 90_000) == (Send(messages.Round("m", 2, 4, 4)),)
    assert migration.handle(Tick(), 90_000 + LIMITS.round_ms) == (abort("round 2 was not copied in time"),)


@pytest.mark.parametrize(("given", "sent_ms"), [(offered, 0), (copying, 20), (committing, 40), (taking_back, 50)])
def test_a_message_is_sent_again_each_time_it_stays_unanswered_for_long(
    given: Callable[[], SourceMigration], sent_ms: float
) -> None:
    migration = given()
    assert migration.handle(Tick(), sent_ms + LIMITS.resend_ms - 1) == ()
    again = migration.handle(Tick(), sent_ms + LIMITS.resend_ms)
    assert len(again) == 1
    assert migration.handle(Tick(), sent_ms + 2 * LIMITS.resend_ms - 1) == ()
    assert migration.handle(Tick(), sent_ms + 2 * LIMITS.resend_ms) == again


@pytest.mark.parametrize(
    ("given", "event", "message"),
    [
        (committing, Paused((7,), 17, 5), "paused without having been asked to; migration m: 0 ms: ordered"),
        (committing, Ended(), "a paused request cannot end by itself; migration m: 0 ms: ordered"),
        (copying, messages.Committed("m"), "the target committed a request that was never sent to it; migration m: 0"),
    ],
)
def test_what_cannot_be_is_a_bug(given: Callable[[], SourceMigration], event: SourceEvent, message: str) -> None:
    with pytest.raises(IllegalTransition, match=message):
        given().handle(event, NOW_MS)


def test_it_is_begun_once() -> None:
    with pytest.raises(IllegalTransition, match="offered cannot become offered; migration m: 0 ms: ordered"):
        offered().start()


def test_it_awaits_a_step_where_only_the_engine_can_lead_on() -> None:
    made = (waiting, offered, copying, pausing, committing, taking_back)
    assert [given.__name__ for given in made if given().awaits_step] == ["pausing"]
    between_rounds = copying()
    between_rounds.handle(messages.Pulled("m", 1), 30)
    assert between_rounds.awaits_step


@pytest.mark.parametrize(("left", "is_paused"), [(2, True), (3, False)])
def test_the_last_blocks_are_copied_while_it_stands_still(left: int, is_paused: bool) -> None:
    migration = new_source(limits=MigrationLimits(last_round_blocks=2))
    migration.start()
    migration.handle(Progress(left, decoding=True), 5)
    expected: SourceInstruction = Pause() if is_paused else Send(messages.Round("m", 1, 0, left))
    assert migration.handle(messages.Accept("m"), 10) == (expected,)


def test_a_transfer_of_a_prefill_goes_only_where_its_table_says() -> None:
    transfer = Transfer("r", "b")
    with pytest.raises(IllegalTransition, match="the transfer of request r cannot go from prefilling to refused"):
        transfer.become(TransferState.REFUSED)
    transfer.become(TransferState.MOVING)
    assert transfer.state is TransferState.MOVING
