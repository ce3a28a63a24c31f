"""Which migrations away from an instance begin, wait, are tried again or refused."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.model.incarnation import Incarnation
from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.protocols.migration import messages, source
from controlplane.protocols.migration.limits import ManagerLimits
from controlplane.protocols.migration.source_events import (
    Abort,
    AbortAsked,
    AdoptionAsked,
    AskDecode,
    ConnectionLost,
    DecodeChosen,
    Do,
    Ending,
    Export,
    Exported,
    MigrationEnded,
    MigrationOutcome,
    MoveOrdered,
    MoveWithdrawn,
    NotExported,
    ObstacleChanged,
    PauseFailed,
    PeersChanged,
    Progressed,
    RequestBegan,
    RequestGone,
    RequestPaused,
    SourceManagerEvent,
    SourceManagerInstruction,
    Stopped,
    TransferEnded,
    TransferOrdered,
    TransferResult,
    WakeAfter,
    Withdraw,
)
from controlplane.protocols.migration.source_manager import SourceManager
from tests.examples import examples

LIMITS = ManagerLimits()
PEERS = {name: Incarnation(name, "1") for name in ("b", "c")}
BLOCK_TOKENS = 4


def new_manager(limits: ManagerLimits = LIMITS) -> SourceManager:
    manager = SourceManager(Incarnation("a", "1"), BLOCK_TOKENS, limits)
    manager.handle(PeersChanged(PEERS), 0.0)
    return manager


def order(number: int, *, decodes: bool = True, target: str = "b", is_here: bool = True) -> MoveOrdered:
    return MoveOrdered(number, f"r{number}", target, is_here, decodes)


def exported(export: Export, *, full_blocks: int = 10, emitted: int = 1) -> Exported:
    request = EngineRequest(export.request_id, (1,) * 40, SamplingParams(max_tokens=99))
    return Exported(export.migration_id, request, 0, "f", 40, full_blocks, emitted)


def begun(manager: SourceManager, event: SourceManagerEvent, now_ms: float = 0.0) -> list[str]:
    """Requests whose migration begins with this event."""
    requests = []
    for instruction in manager.handle(event, now_ms):
        if isinstance(instruction, Export):
            manager.handle(exported(instruction), now_ms)
            requests.append(instruction.request_id)
    manager.validate()
    return requests


def end_of(instructions: tuple[SourceManagerInstruction, ...]) -> MigrationEnded:
    return next(each for each in instructions if isinstance(each, MigrationEnded))


def migration_of(manager: SourceManager, event: SourceManagerEvent, now_ms: float = 0.0) -> str:
    """The id of the migration that begins with this event."""
    (export,) = [each for each in manager.handle(event, now_ms) if isinstance(each, Export)]
    manager.handle(exported(export), now_ms)
    return export.migration_id


def test_first_come_first_served_and_never_more_than_there_are_slots() -> None:
    manager = new_manager()
    assert [begun(manager, order(number)) for number in range(5)] == [["r0"], ["r1"], ["r2"], [], []]
    assert begun(manager, RequestGone("r1")) == ["r3"]
    assert begun(manager, messages.Refuse("a.1-1", "full")) == ["r4"]
    assert manager.orders == 3


def test_long_prefills_keep_nobody_waiting_who_decodes() -> None:
    manager = new_manager(ManagerLimits(parallel=1))
    assert begun(manager, order(0, decodes=False)) == ["r0"]
    assert begun(manager, order(1, decodes=False)) == []
    assert begun(manager, order(2)) == ["r2"]
    assert begun(manager, order(3)) == []
    assert begun(manager, RequestBegan("r1")) == []
    assert begun(manager, RequestGone("r2")) == ["r1"], "it decodes now, and was ordered before r3"
    assert begun(manager, RequestGone("r1")) == ["r3"]


@pytest.mark.parametrize("gone", [RequestGone, AbortAsked])
def test_a_request_that_ends_while_its_order_waits_needs_no_slot(gone: type[RequestGone | AbortAsked]) -> None:
    manager = new_manager(ManagerLimits(parallel=1))
    begun(manager, order(0))
    begun(manager, order(1))
    outcome = MigrationOutcome(Ending.ENDED, "the request ended before it was moved")
    assert end_of(manager.handle(gone("r1"), 5.0)) == MigrationEnded(1, "", "r1", "b", outcome)
    assert begun(manager, order(2)) == []
    assert begun(manager, RequestGone("r0")) == ["r2"]


def test_an_order_that_is_withdrawn_leaves_the_queue_or_cancels_its_migration() -> None:
    manager = new_manager(ManagerLimits(parallel=1))
    for number in range(3):
        begun(manager, order(number))
    ended = end_of(manager.handle(MoveWithdrawn(1), 1.0))
    assert ended == MigrationEnded(1, "", "r1", "b", MigrationOutcome(Ending.FAILED, "the order was withdrawn"))
    instructions = manager.handle(MoveWithdrawn(0), 1.0)
    aborted, withdrawn, other_ended, next_one = instructions
    assert aborted == Do("a.1-1", source.Send(messages.Abort("a.1-1", "the order was withdrawn")))
    assert withdrawn == Withdraw("a.1-1", "r0")
    assert isinstance(other_ended, MigrationEnded)
    assert manager.handle(MoveWithdrawn(0), 2.0) == (), "it is over"
    assert next_one == Export("a.1-3", "r2", PEERS["b"])


@pytest.mark.parametrize(
    ("given", "asked", "reason"),
    [
        (None, order(1, is_here=False), "request r1 does not run here; see `penstock status` or ListRequests"),
        (order(1), order(1), "request r1 is being moved already"),
        (None, order(1, target="a"), "request r1 is on a already"),
        (None, order(1, target="d"), "d is no instance that could take it; those of the same model and engine: b, c"),
        (ObstacleChanged("no route"), order(1), "no request can leave this worker: no route"),
        (Stopped(), order(1), "the worker is stopping"),
    ],
)
def test_what_cannot_move_is_refused_at_once(given: SourceManagerEvent | None, asked: MoveOrdered, reason: str) -> None:
    manager = new_manager()
    if given is not None:
        begun(manager, given)
    assert end_of(manager.handle(asked, 0.0)).outcome == MigrationOutcome(Ending.FAILED, reason)


def test_so_many_orders_wait_and_one_more_is_refused_but_transfers_are_not() -> None:
    manager = new_manager(ManagerLimits(parallel=2, queued=3))
    for number in range(5):
        assert not any(isinstance(each, MigrationEnded) for each in manager.handle(order(number), 0.0))
    assert "3 migrations wait here already" in end_of(manager.handle(order(5), 0.0)).outcome.reason
    for number in range(6, 16):
        manager.handle(TransferOrdered(f"r{number}", "b"), 0.0)
    assert manager.orders == 15
    manager.validate()


def test_a_target_that_leaves_while_an_order_waits_for_it() -> None:
    manager = new_manager(ManagerLimits(parallel=1))
    for number in range(3):
        begun(manager, order(number, target="c" if number == 1 else "b"))
    manager.handle(PeersChanged({"b": PEERS["b"]}), 1.0)
    instructions = manager.handle(RequestGone("r0"), 2.0)
    ended = [each for each in instructions if isinstance(each, MigrationEnded)]
    assert [(each.request_id, each.outcome.ending) for each in ended] == [("r0", Ending.ENDED), ("r1", Ending.FAILED)]
    assert ended[1].outcome.reason == "its target left before the migration had its turn"
    assert instructions[-1] == Export("a.1-3", "r2", PEERS["b"])


def test_what_cannot_be_exported_stays_and_an_export_that_comes_too_late_is_withdrawn() -> None:
    manager = new_manager()
    (export,) = manager.handle(order(0), 0.0)
    assert isinstance(export, Export)
    assert end_of(manager.handle(NotExported(export.migration_id, "unknown"), 0.0)).outcome.reason == "unknown"
    (export,) = manager.handle(order(0), 0.0)
    assert isinstance(export, Export)
    manager.handle(RequestGone("r0"), 0.0)
    assert manager.handle(exported(export), 0.0) == (Withdraw(export.migration_id, "r0"),)


def test_a_migration_may_take_only_so_long() -> None:
    manager = new_manager()
    migration_id = migration_of(manager, order(0), 7.0)
    manager.handle(messages.Accept(migration_id), 8.0)
    for at_ms in range(1000, 120_000, 1000):
        assert not any(isinstance(each, MigrationEnded) for each in manager.handle(messages.Pulled("x", 1), at_ms))
        manager.handle(messages.Pulled(migration_id, at_ms // 1000), at_ms)
        manager.handle(Progressed(migration_id, 10 + at_ms // 200, 0), at_ms)
    assert manager.orders == 1
    manager.handle(source.Tick(), 7.0 + LIMITS.migration_ms - 1)
    assert manager.orders == 1
    ended = end_of(manager.handle(source.Tick(), 7.0 + LIMITS.migration_ms))
    assert "more than 120 s" in ended.outcome.reason
    assert ended.outcome.duration_ms == LIMITS.migration_ms


def test_a_request_decodes_once_it_has_emitted_and_all_blocks_from_before_are_told_of() -> None:
    manager = new_manager()
    (export,) = manager.handle(order(0), 0.0)
    assert isinstance(export, Export)
    manager.handle(exported(export, full_blocks=4, emitted=5), 0.0)
    manager.handle(messages.Accept(export.migration_id), 1.0)
    manager.handle(messages.Pulled(export.migration_id, 1), 2.0)
    (sent,) = manager.handle(Progressed(export.migration_id, 9, 6), 3.0)
    assert sent == Do(export.migration_id, source.Send(messages.Round(export.migration_id, 2, 4, 5)))
    assert manager.handle(messages.Pulled(export.migration_id, 2), 4.0) == (), "the engine lags behind: no pause"
    assert manager.handle(Progressed(export.migration_id, 10, 7), 5.0) == (Do(export.migration_id, source.Pause()),)


def paused(manager: SourceManager) -> str:
    """The id of a migration whose request stands still."""
    migration_id = migration_of(manager, order(0))
    manager.handle(messages.Accept(migration_id), 0.0)
    manager.handle(messages.Pulled(migration_id, 1), 0.0)
    sent = manager.handle(RequestPaused(migration_id, (1,), 41, 11, since_ms=10.0), 20.0)
    assert sent == (Do(migration_id, source.Send(messages.FinalMessage(migration_id, (1,), 41, 10, 1))),)
    return migration_id


def test_the_outcome_tells_what_it_took() -> None:
    manager = new_manager()
    migration_id = migration_of(manager, order(1), 5.0)
    refused = end_of(manager.handle(messages.Refuse(migration_id, "full"), 7.0)).outcome
    assert (refused.ending, refused.reason, refused.paused_ms, refused.duration_ms) == (Ending.REFUSED, "full", None, 2)
    ended = end_of(manager.handle(messages.Committed(paused(manager)), 40.0))
    story = "0 ms: ordered; 0 ms: offered; 0 ms: copying; 0 ms: pausing; 20 ms: committing; 40 ms: moved"
    moved = source.SourceState.MOVED
    assert ended.outcome == MigrationOutcome(Ending.MOVED, "", 1, 11, 30.0, 40.0, moved, f"migration a.1-2: {story}")


@pytest.mark.parametrize("target_commits", [True, False])
def test_an_abort_waits_while_the_request_may_be_the_targets(target_commits: bool) -> None:
    manager = new_manager()
    migration_id = paused(manager)
    assert manager.is_paused("r0")
    (sent,) = manager.handle(AbortAsked("r0"), 21.0)
    assert sent == Do(migration_id, source.Send(messages.Abort(migration_id, "the request was taken back")))
    answer = messages.Committed(migration_id) if target_commits else messages.Failed(migration_id, "dropped")
    instructions = manager.handle(answer, 22.0)
    assert (Abort("r0") in instructions) is not target_commits
    assert end_of(instructions).outcome.blocks == (11 if target_commits else 10), "what it has, or what was copied"
    assert not manager.is_paused("r0")


def test_a_client_that_comes_back_ends_a_move_that_was_offered_for_another_frontend() -> None:
    """Found by seed 3652: the target would own the request under an epoch before that of the adoption."""
    manager = new_manager()
    migration_id = migration_of(manager, order(0))
    instructions = manager.handle(AdoptionAsked("r0"), 2.0)
    aborted = messages.Abort(migration_id, "its client has come back to a frontend")
    assert Do(migration_id, source.Send(aborted)) in instructions
    assert end_of(instructions).outcome.state is source.SourceState.KEPT
    migration_id = paused(later := new_manager())
    assert later.handle(AdoptionAsked("r0"), 21.0) == (), "it may be the target's already"
    assert end_of(later.handle(messages.Committed(migration_id), 22.0)).outcome.moved


def test_a_target_that_does_not_answer_is_asked_to_drop_it_and_gets_its_time_to_answer() -> None:
    """`take_back_ms` counts from the question, not from the pause."""
    limits = LIMITS.live
    manager = new_manager()
    paused(manager)
    manager.handle(source.Tick(), 20.0 + limits.commit_ms + 50)
    asked_ms = 20.0 + limits.commit_ms + 50
    instructions = manager.handle(source.Tick(), asked_ms + limits.take_back_ms - 1)
    assert not any(isinstance(each, MigrationEnded) for each in instructions), "it may still answer"
    ended = end_of(manager.handle(source.Tick(), asked_ms + limits.take_back_ms))
    assert ended.outcome.state is source.SourceState.LOST


def test_what_the_engine_cannot_pause_and_whose_target_is_gone_stays() -> None:
    manager = new_manager()
    migration_id = migration_of(manager, order(0))
    manager.handle(messages.Accept(migration_id), 0.0)
    manager.handle(messages.Pulled(migration_id, 1), 0.0)
    instructions = manager.handle(PauseFailed(migration_id, "no pause today"), 1.0)
    assert Do(migration_id, source.Resume()) in instructions
    assert end_of(instructions).outcome.reason == "no pause today"
    other = migration_of(manager, order(1))
    assert end_of(manager.handle(ConnectionLost(other), 2.0)).outcome.reason == "the target is gone"


def test_stopping_ends_what_waits_and_cancels_what_is_under_way() -> None:
    manager = new_manager(ManagerLimits(parallel=1))
    begun(manager, order(0))
    begun(manager, order(1))
    ended = [each for each in manager.handle(Stopped(), 1.0) if isinstance(each, MigrationEnded)]
    assert sorted(each.request_id for each in ended) == ["r0", "r1"]
    assert {(each.outcome.ending, each.outcome.reason) for each in ended} == {(Ending.FAILED, "the worker is stopping")}
    assert manager.orders == 0


def test_what_it_tells_of_a_request_on_its_way() -> None:
    manager = new_manager(ManagerLimits(parallel=1))

    def told(request_id: str) -> tuple[bool, bool, bool, bool]:
        return (
            manager.knows(request_id),
            manager.is_ordered(request_id),
            manager.moved_lately(request_id),
            manager.is_paused(request_id),
        )

    assert told("r0") == (False, False, False, False)
    assert not manager.is_busy
    (export,) = manager.handle(order(0), 0.0)
    assert isinstance(export, Export)
    assert (told("r0"), manager.migration_ids, manager.is_busy) == ((True, True, True, False), ("a.1-1",), True)
    assert not manager.awaits_step("a.1-1"), "nothing is known of its blocks yet"
    manager.handle(order(1), 0.0)
    assert told("r1") == (True, True, False, False), "it waits"
    offer = messages.Offer("a.1-1", exported(export).request, 1, "f")
    assert manager.handle(exported(export), 0.0) == (Do("a.1-1", source.Send(offer)),)
    manager.handle(messages.Accept("a.1-1"), 0.0)
    assert not manager.awaits_step("a.1-1"), "a round is under way"
    manager.handle(messages.Pulled("a.1-1", 1), 0.0)
    assert manager.awaits_step("a.1-1")
    assert not manager.awaits_step("a.1-2"), "there is none"
    manager.handle(RequestPaused("a.1-1", (1,), 41, 11, since_ms=10.0), 20.0)
    assert told("r0") == (True, True, True, True)
    manager.handle(messages.Committed("a.1-1"), 21.0)
    assert told("r0") == (False, False, True, False)
    manager.handle(source.Tick(), 21.0 + LIMITS.remember_ms)
    assert manager.moved_lately("r0")
    manager.handle(source.Tick(), 22.0 + LIMITS.remember_ms)
    assert not manager.moved_lately("r0")


# -- transfers of prefills


def refuse(manager: SourceManager, number: int, now_ms: float) -> tuple[SourceManagerInstruction, ...]:
    """What is done about the refusal of a migration."""
    return manager.handle(messages.Refuse(f"a.1-{number}", "full just now"), now_ms)


def test_a_decode_instance_that_is_full_is_asked_again_after_pauses_that_double() -> None:
    manager, now_ms, pauses = new_manager(), 0.0, []
    assert begun(manager, TransferOrdered("r0", "b")) == ["r0"]
    for number in range(1, 10):
        instructions = refuse(manager, number, now_ms)
        manager.validate()
        wakes = [each for each in instructions if isinstance(each, WakeAfter)]
        if not wakes:
            break
        (wake,) = wakes
        pauses.append(wake.delay_ms)
        assert begun(manager, source.Tick(), now_ms + wake.delay_ms - 1) == []
        now_ms += wake.delay_ms
        assert begun(manager, source.Tick(), now_ms) == ["r0"]
    assert pauses == [100.0, 200.0, 400.0]
    assert instructions[-1] == TransferEnded("r0", "b", TransferResult.FAILED, "full just now")
    assert manager.transfers == 0


def test_the_scheduler_is_asked_after_the_first_token() -> None:
    manager = new_manager()
    assert manager.handle(TransferOrdered("r0", ""), 0.0) == ()
    assert manager.asking == ()
    assert manager.handle(RequestBegan("r0"), 10.0) == (AskDecode("r0"),)
    assert manager.asking == ("r0",)
    assert begun(manager, DecodeChosen("r0", "c"), 11.0) == ["r0"]
    assert manager.asking == ()
    manager.handle(messages.Accept("a.1-1"), 12.0)
    manager.handle(messages.Pulled("a.1-1", 1), 13.0)
    manager.handle(RequestPaused("a.1-1", (1,), 40, 10, since_ms=14.0), 14.0)
    instructions = manager.handle(messages.Committed("a.1-1"), 15.0)
    assert instructions[-1] == TransferEnded("r0", "c", TransferResult.MOVED, "", 5.0)


def test_a_transfer_to_where_nothing_can_move_fails_at_once() -> None:
    manager = new_manager()
    manager.handle(TransferOrdered("r0", ""), 0.0)
    manager.handle(RequestBegan("r0"), 10.0)
    ended, transfer = manager.handle(DecodeChosen("r0", "d"), 12.0)
    reason = "d is no instance that could take it; those of the same model and engine: b, c"
    assert ended == MigrationEnded(None, "", "r0", "d", MigrationOutcome(Ending.FAILED, reason))
    assert transfer == TransferEnded("r0", "d", TransferResult.FAILED, reason, 2.0)


@pytest.mark.parametrize(("error", "result"), [("", []), ("nobody there", [TransferResult.FAILED])])
def test_a_request_that_is_to_stay_stays(error: str, result: list[TransferResult]) -> None:
    manager = new_manager()
    manager.handle(TransferOrdered("r0", ""), 0.0)
    manager.handle(RequestBegan("r0"), 10.0)
    ended = [each for each in manager.handle(DecodeChosen("r0", "", error), 11.0) if isinstance(each, TransferEnded)]
    assert [each.result for each in ended] == result
    assert manager.transfers == 0


def test_a_transfer_whose_request_ends_is_skipped_wherever_it_stands() -> None:
    for at in ("waiting", "asking", "moving", "refused"):
        manager = new_manager()
        manager.handle(TransferOrdered("r0", "" if at in ("waiting", "asking") else "b"), 0.0)
        if at == "asking":
            manager.handle(RequestBegan("r0"), 1.0)
        if at in ("moving", "refused"):
            manager.handle(exported(Export("a.1-1", "r0", PEERS["b"])), 1.0)
        if at == "refused":
            refuse(manager, 1, 2.0)
        ended = [each for each in manager.handle(RequestGone("r0"), 3.0) if isinstance(each, TransferEnded)]
        skipped = TransferEnded("r0", "b", TransferResult.SKIPPED, "the request ended before it was moved")
        assert ended == ([skipped] if at in ("moving", "refused") else [])
        assert manager.transfers == manager.orders == 0
        assert begun(manager, source.Tick(), 60_000.0) == []


def test_a_prefill_for_this_very_instance_is_no_transfer() -> None:
    manager = new_manager()
    assert manager.handle(TransferOrdered("r0", "a"), 0.0) == ()
    assert manager.transfers == 0


class Orders(RuleBasedStateMachine):
    """Hypothesis chooses what happens next; whatever that is, the bounds hold and every order is answered once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0.0
        self.manager = new_manager(ManagerLimits(parallel=2, queued=3))
        self.unanswered: set[int] = set()
        self.exports: list[Export] = []
        self.migrations: list[str] = []
        self.numbers = 0

    def feed(self, event: SourceManagerEvent) -> None:
        for instruction in self.manager.handle(event, self.now_ms):
            match instruction:
                case Export():
                    self.exports.append(instruction)
                case MigrationEnded(order_id, migration_id):
                    if order_id is not None:
                        self.unanswered.remove(order_id)
                    if migration_id in self.migrations:
                        self.migrations.remove(migration_id)
                case AskDecode(request_id):
                    self.feed(DecodeChosen(request_id, "b"))

    @rule(request=st.integers(0, 9), goal=st.sampled_from("bcd"), decodes=st.booleans())
    def order(self, request: int, goal: str, decodes: bool) -> None:
        self.numbers += 1
        self.unanswered.add(self.numbers)
        self.feed(MoveOrdered(self.numbers, f"r{request}", goal, True, decodes))

    @rule(request=st.integers(0, 9), goal=st.sampled_from(["", "b", "d"]))
    def transfer(self, request: int, goal: str) -> None:
        self.feed(TransferOrdered(f"r{request}", goal))

    @rule(request=st.integers(0, 9), event=st.sampled_from([RequestBegan, RequestGone, AbortAsked, AdoptionAsked]))
    def request(self, request: int, event: type[RequestBegan | RequestGone | AbortAsked | AdoptionAsked]) -> None:
        self.feed(event(f"r{request}"))

    @precondition(lambda self: self.exports)
    @rule(succeeds=st.booleans(), full_blocks=st.integers(0, 10))
    def export(self, succeeds: bool, full_blocks: int) -> None:
        export = self.exports.pop(0)
        if succeeds and self.manager.is_ordered(export.request_id):
            self.migrations.append(export.migration_id)
        event = exported(export, full_blocks=full_blocks, emitted=int(full_blocks == 10))
        self.feed(event if succeeds else NotExported(export.migration_id, "unknown"))

    @precondition(lambda self: self.migrations)
    @rule(data=st.data(), number=st.integers(1, 3))
    def target_answers(self, data: st.DataObject, number: int) -> None:
        migration_id = data.draw(st.sampled_from(self.migrations))
        answers: list[SourceManagerEvent] = [
            messages.Accept(migration_id),
            messages.Refuse(migration_id, "full"),
            messages.Pulled(migration_id, number),
            messages.Failed(migration_id, "torn"),
            Progressed(migration_id, 10 + number, number),
            ConnectionLost(migration_id),
        ]
        self.feed(data.draw(st.sampled_from(answers)))

    @rule(ms=st.sampled_from([1.0, 60.0, 300.0, 20_000.0]))
    def pass_time(self, ms: float) -> None:
        self.now_ms += ms
        self.feed(source.Tick())

    @rule(alive=st.booleans())
    def peers(self, alive: bool) -> None:
        self.feed(PeersChanged(PEERS if alive else {"c": PEERS["c"]}))

    @invariant()
    def holds(self) -> None:
        self.manager.validate()

    def teardown(self) -> None:
        self.feed(Stopped())
        assert not self.unanswered, "nobody waits for an answer for ever"


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
