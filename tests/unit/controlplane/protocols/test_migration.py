"""Both sides of a migration over a network that loses, doubles and delays, with crashes at any moment."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.protocols.migration import messages, source, target
from controlplane.protocols.migration.limits import MigrationLimits
from controlplane.protocols.migration.source import SourceMigration, SourceState
from controlplane.protocols.migration.target import TargetMigration, TargetState
from mesh.errors import IllegalTransition
from tests.examples import examples
from tests.unit.controlplane.protocols.migration_model import LIMITS, REQUEST, TwoInstances, new_source


class Chaos(RuleBasedStateMachine):
    """Hypothesis chooses what happens next."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = TwoInstances()

    @precondition(lambda self: self.pair.to_target)
    @rule(data=st.data(), keep=st.booleans())
    def arrive_at_target(self, data: st.DataObject, keep: bool) -> None:
        self.pair.arrive_at_target(data.draw(st.integers(0, len(self.pair.to_target) - 1)), keep=keep)

    @precondition(lambda self: self.pair.to_source)
    @rule(data=st.data(), keep=st.booleans())
    def arrive_at_source(self, data: st.DataObject, keep: bool) -> None:
        self.pair.arrive_at_source(data.draw(st.integers(0, len(self.pair.to_source) - 1)), keep=keep)

    @precondition(lambda self: self.pair.to_target or self.pair.to_source)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        queues: list[list[Any]] = [self.pair.to_target, self.pair.to_source]
        queue = data.draw(st.sampled_from([queue for queue in queues if queue]))
        queue.pop(data.draw(st.integers(0, len(queue) - 1)))

    @rule(ms=st.sampled_from([1.0, 120.0, 600.0, 1200.0, 40_000.0]))
    def pass_time(self, ms: float) -> None:
        self.pair.pass_time(ms)

    @precondition(lambda self: self.pair.may_step)
    @rule()
    def step(self) -> None:
        self.pair.step()

    @precondition(lambda self: self.pair.may_step)
    @rule()
    def end_by_itself(self) -> None:
        self.pair.end_by_itself()

    @precondition(lambda self: self.pair.reserving)
    @rule(enough=st.booleans())
    def reserve(self, enough: bool) -> None:
        self.pair.reserve(enough)

    @precondition(lambda self: self.pair.pulls)
    @rule(whole=st.booleans())
    def pull(self, whole: bool) -> None:
        self.pair.pull(whole)

    @rule()
    def cancel(self) -> None:
        self.pair.cancel()

    @precondition(lambda self: self.pair.source is not None)
    @rule()
    def crash_source(self) -> None:
        self.pair.crash_source()

    @precondition(lambda self: self.pair.target is not None)
    @rule()
    def crash_target(self) -> None:
        self.pair.crash_target()

    @invariant()
    def holds(self) -> None:
        self.pair.check()

    def teardown(self) -> None:
        self.pair.settle()


class ChaosFromPrefill(Chaos):
    """The same, ordered before the prompt is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = TwoInstances(is_fresh=True)


TestChaos = Chaos.TestCase
TestChaos.settings = settings(max_examples=examples(200), stateful_step_count=60, deadline=None)
TestChaosFromPrefill = ChaosFromPrefill.TestCase
TestChaosFromPrefill.settings = settings(max_examples=examples(200), stateful_step_count=60, deadline=None)


def usual_course(pair: TwoInstances) -> None:
    """One thing that happens when nothing goes wrong."""
    if pair.to_target:
        pair.arrive_at_target()
    elif pair.reserving:
        pair.reserve(True)
    elif pair.pulls:
        pair.pull(True)
    elif pair.to_source:
        pair.arrive_at_source()
    elif pair.may_step:
        pair.step()
    else:
        pair.pass_time(50.0)


def lose_all(pair: TwoInstances) -> None:
    pair.to_target.clear()
    pair.to_source.clear()


def double_all(pair: TwoInstances) -> None:
    pair.to_target.extend(list(pair.to_target))
    pair.to_source.extend(list(pair.to_source))


FAULTS: dict[str, Callable[[TwoInstances], None]] = {
    "none": lambda pair: None,
    "lose": lose_all,
    "double": double_all,
    "cancel": TwoInstances.cancel,
    "short delay": lambda pair: pair.pass_time(LIMITS.commit_ms + 1),
    "long delay": lambda pair: pair.pass_time(LIMITS.verdict_ms + 1),
    "silence": lambda pair: pair.pass_time(LIMITS.idle_ms + 1),
    "source crashes": lambda pair: pair.crash_source() if pair.source else None,
    "target crashes": lambda pair: pair.crash_target() if pair.target else None,
    "torn transfer": lambda pair: pair.pull(False) if pair.pulls else None,
    "request ends": lambda pair: pair.end_by_itself() if pair.may_step else None,
}
USUAL_STEPS = 16


@pytest.mark.slow
@pytest.mark.parametrize("second", sorted(FAULTS))
@pytest.mark.parametrize("first", sorted(FAULTS))
def test_any_two_faults_at_any_two_moments(first: str, second: str) -> None:
    for first_step, second_step in itertools.product(range(USUAL_STEPS), repeat=2):
        pair = TwoInstances()
        for step in range(USUAL_STEPS + 4):
            if step == first_step:
                FAULTS[first](pair)
            if step == second_step:
                FAULTS[second](pair)
            pair.check()
            usual_course(pair)
            pair.check()
        pair.settle()


def test_the_usual_course_moves_the_request() -> None:
    pair = TwoInstances()
    for _ in range(USUAL_STEPS):
        usual_course(pair)
    assert pair.source is not None
    assert pair.source.state is SourceState.MOVED
    assert pair.activations == 1


def accepted(limits: MigrationLimits = LIMITS) -> SourceMigration:
    migration = new_source(limits=limits)
    migration.start()
    migration.handle(source.Progress(10, decoding=True), 0)
    return migration


def test_an_undisturbed_migration_copies_while_decoding_and_pauses_for_the_tail() -> None:
    migration = accepted()
    assert migration.handle(messages.Accept("m"), 1) == (source.Send(messages.Round("m", 1, 0, 10)),)
    assert migration.handle(source.Progress(15, decoding=True), 2) == ()
    assert migration.handle(messages.Pulled("m", 1), 3) == (source.Send(messages.Round("m", 2, 10, 5)),)
    migration.handle(source.Progress(16, decoding=True), 4)
    assert migration.handle(messages.Pulled("m", 2), 5) == (source.Pause(),)
    (sent,) = migration.handle(source.Paused((1, 2), 66, 17), 6)
    assert sent == source.Send(messages.FinalMessage("m", (1, 2), 66, first_block=15, block_count=2))
    assert migration.handle(messages.Committed("m"), 7) == (source.Release(),)
    assert migration.state is SourceState.MOVED


def test_rounds_follow_the_prefill_and_the_pause_waits_for_the_first_token() -> None:
    migration = new_source()
    migration.start()
    assert migration.handle(messages.Accept("m"), 0) == ()
    (sent,) = migration.handle(source.Progress(4, decoding=False), 1)
    assert sent == source.Send(messages.Round("m", 1, 0, 4))
    assert migration.handle(messages.Pulled("m", 1), 2) == ()
    (sent,) = migration.handle(source.Progress(5, decoding=False), 3)
    assert sent == source.Send(messages.Round("m", 2, 4, 1))
    migration.handle(messages.Pulled("m", 2), 4)
    assert migration.handle(source.Progress(5, decoding=True), 5) == (source.Pause(),)


def test_nothing_is_offered_before_something_is_computed() -> None:
    migration = new_source()
    assert migration.start(source.Progress(0, decoding=False)) == ()
    assert migration.handle(source.Tick(), 60_000) == ()
    (sent,) = migration.handle(source.Progress(1, decoding=False), 60_000)
    assert isinstance(sent, source.Send)
    assert isinstance(sent.message, messages.Offer)
    assert migration.handle(source.Tick(), 60_000 + LIMITS.resend_ms) == (sent,)
    assert migration.handle(messages.Accept("m"), 60_200) == (source.Send(messages.Round("m", 1, 0, 1)),)


@pytest.mark.parametrize("event", [source.Ended(), source.Cancel("taken back"), source.TargetLost()])
def test_what_was_never_offered_needs_no_word_to_the_target(event: source.SourceEvent) -> None:
    migration = new_source()
    migration.start(source.Progress(0, decoding=False))
    assert migration.handle(event, 1) == ()
    assert migration.state is SourceState.KEPT


def test_rounds_of_the_prefill_do_not_use_up_those_of_the_decode() -> None:
    limits = MigrationLimits(max_rounds=2, last_round_blocks=0)
    migration = new_source(limits=limits)
    migration.start(source.Progress(1, decoding=False))
    migration.handle(messages.Accept("m"), 1)
    for number in range(1, 6):
        migration.handle(messages.Pulled("m", number), number)
        (sent,) = migration.handle(source.Progress(number + 1, decoding=False), number)
        assert sent == source.Send(messages.Round("m", number + 1, number, 1))
    migration.handle(source.Progress(9, decoding=True), 7)
    assert migration.handle(messages.Pulled("m", 6), 8) == (source.Send(messages.Round("m", 7, 6, 3)),)


def test_stop_and_copy_is_the_same_protocol_without_rounds() -> None:
    migration = accepted(MigrationLimits(max_rounds=0))
    assert migration.handle(messages.Accept("m"), 1) == (source.Pause(),)


def test_a_request_that_decodes_faster_than_it_is_copied_is_paused_after_the_last_round() -> None:
    migration = accepted(MigrationLimits(max_rounds=2))
    migration.handle(messages.Accept("m"), 1)
    migration.handle(source.Progress(30, decoding=True), 2)
    migration.handle(messages.Pulled("m", 1), 3)
    migration.handle(source.Progress(50, decoding=True), 4)
    assert migration.handle(messages.Pulled("m", 2), 5) == (source.Pause(),)


@pytest.mark.parametrize("answer", [messages.Refuse("m", "full"), messages.Failed("m", "full")])
def test_a_refused_migration_leaves_the_request_running(answer: messages.Refuse | messages.Failed) -> None:
    migration = accepted()
    assert migration.handle(answer, 1) == ()
    assert migration.state is SourceState.KEPT
    assert migration.reason == "full"


def committing() -> SourceMigration:
    migration = accepted(MigrationLimits(max_rounds=0))
    migration.handle(messages.Accept("m"), 0)
    migration.handle(source.Paused((1,), 41, 11), 0)
    return migration


def test_a_failed_commit_resumes() -> None:
    assert committing().handle(messages.Failed("m", "torn"), 1) == (source.Resume(),)


def test_a_silent_target_is_asked_to_drop_it_and_then_the_request_is_given_up() -> None:
    migration = committing()
    (sent,) = migration.handle(source.Tick(), LIMITS.commit_ms)
    assert isinstance(sent, source.Send)
    assert isinstance(sent.message, messages.Abort)
    (lost,) = migration.handle(source.Tick(), LIMITS.verdict_ms)
    assert isinstance(lost, source.GiveUp)


def test_a_target_that_had_committed_unheard_keeps_it() -> None:
    migration = committing()
    migration.handle(source.Tick(), LIMITS.commit_ms)
    assert migration.handle(messages.Committed("m"), LIMITS.commit_ms + 1) == (source.Release(),)


def test_an_unanswered_message_is_sent_again() -> None:
    migration = new_source()
    (first,) = migration.start()
    assert migration.handle(source.Tick(), LIMITS.resend_ms - 1) == ()
    assert migration.handle(source.Tick(), LIMITS.resend_ms) == (first,)


def test_a_bug_tells_the_story() -> None:
    with pytest.raises(IllegalTransition, match=r"never sent to it; migration m: 0 ms: ordered"):
        new_source().handle(messages.Committed("m"), 1)


def test_a_late_reservation_of_an_aborted_migration_is_freed() -> None:
    offer = messages.Offer("m", REQUEST, 4, "f")
    migration = TargetMigration(offer, limits=LIMITS, now_ms=0)
    migration.start()
    migration.handle(messages.Abort("m", "never mind"), 1)
    assert migration.state is TargetState.DISCARDED
    assert migration.handle(target.Reserved(), 2) == (target.Discard(),)


def test_a_doubled_answer_to_an_earlier_round_counts_for_nothing() -> None:
    migration = accepted()
    migration.handle(messages.Accept("m"), 1)
    migration.handle(source.Progress(15, decoding=True), 2)
    migration.handle(messages.Pulled("m", 1), 3)
    assert migration.handle(messages.Pulled("m", 1), 4) == ()
    assert migration.copied_blocks == 10
