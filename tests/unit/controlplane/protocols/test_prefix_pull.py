"""Pulls of prefixes, both managers, through any order, loss, repetition, cancellation and death."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.protocols.prefix_pull import source, target
from controlplane.protocols.prefix_pull.limits import PullLimits
from controlplane.protocols.prefix_pull.source import CallEnded, HoldAsked, HoldManager, NotPinned, Pin, Pinned, Unpin
from controlplane.protocols.prefix_pull.target import (
    AskHold,
    CancelFetch,
    EndHold,
    Fetch,
    Fetched,
    Held,
    NotFetched,
    NotHeld,
    ObstacleChanged,
    PullEnded,
    PullFollowed,
    PullManager,
    PullOrdered,
    PullOutcome,
    RequestGone,
    Stopped,
    Submit,
    Tick,
)
from mesh.errors import ConfigurationError
from tests.examples import examples

LIMITS = PullLimits(parallel=2, queued=2, holding=2, least_ms=100.0, most_ms=1_000.0, hold_ms=2_000.0)


def ordered(name: str, key: int = 0, compute_ms: float = 400.0, source_id: str = "a") -> PullOrdered:
    return PullOrdered(name, source_id, key or hash(name), 10, compute_ms)


def kinds(instructions: Sequence[Any]) -> list[str]:
    return [type(each).__name__ for each in instructions]


def asked(manager: PullManager, event: PullOrdered, now_ms: float = 0.0) -> AskHold:
    """The instruction that an order leads to."""
    (ask,) = manager.handle(event, now_ms)
    assert isinstance(ask, AskHold)
    manager.validate()
    return ask


def test_a_pull_asks_fetches_submits_and_lets_go() -> None:
    manager = PullManager("b.1", LIMITS)
    ask = asked(manager, ordered("r"))
    assert ask == AskHold("b.1/pull-1", "a", "r", 10, 200.0, 400.0)
    assert manager.waits("r")
    (fetch,) = manager.handle(Held(ask.pull_id, 8), 50.0)
    assert fetch == Fetch(ask.pull_id, 8, 350.0)
    said = manager.handle(Fetched(ask.pull_id, 7), 80.0)
    assert said == (
        Submit("r"),
        EndHold(ask.pull_id),
        PullEnded(ask.pull_id, "a", PullOutcome.PULLED, "", 7, 80.0, 30.0),
    )
    assert not manager.waits("r")
    assert not manager.pulls


def test_a_source_that_has_none_of_it_or_refuses_costs_nothing_but_the_question() -> None:
    for event in (Held("b.1/pull-1", 0), NotHeld("b.1/pull-1", "too many", is_refusal=True)):
        manager = PullManager("b.1", LIMITS)
        ask = asked(manager, ordered("r"))
        submit, end, ended = manager.handle(event, 5.0)
        assert (submit, end) == (Submit("r"), EndHold(ask.pull_id))
        assert isinstance(ended, PullEnded)
        assert ended.outcome is PullOutcome.REFUSED


def test_a_source_that_holds_more_than_asked_is_asked_for_no_more() -> None:
    manager = PullManager("b.1", LIMITS)
    ask = asked(manager, ordered("r"))
    assert manager.handle(Held(ask.pull_id, 99), 5.0) == (Fetch(ask.pull_id, 10, 395.0),)


def test_a_late_pull_is_stopped_and_its_request_computed_at_once() -> None:
    manager = PullManager("b.1", LIMITS)
    ask = asked(manager, ordered("r"))
    manager.handle(Held(ask.pull_id, 8), 50.0)
    assert manager.handle(Tick(), 399.0) == ()
    assert manager.handle(Tick(), 400.0) == (Submit("r"), CancelFetch(ask.pull_id))
    manager.validate()
    assert manager.handle(Tick(), 900.0) == (), "it is stopping already"
    end, ended = manager.handle(NotFetched(ask.pull_id, "cancelled"), 410.0)
    assert end == EndHold(ask.pull_id)
    assert isinstance(ended, PullEnded)
    assert (ended.outcome, ended.blocks) == (PullOutcome.LATE, 0)


def test_what_arrives_while_it_is_stopped_is_not_a_pull_that_worked() -> None:
    manager = PullManager("b.1", LIMITS)
    ask = asked(manager, ordered("r"))
    manager.handle(Held(ask.pull_id, 8), 50.0)
    manager.handle(Tick(), 400.0)
    *_, ended = manager.handle(Fetched(ask.pull_id, 8), 401.0)
    assert isinstance(ended, PullEnded)
    assert (ended.outcome, ended.blocks) == (PullOutcome.LATE, 8)


def test_a_lost_source_fails_the_pull_wherever_it_stands() -> None:
    manager = PullManager("b.1", LIMITS)
    ask = asked(manager, ordered("r"))
    assert kinds(manager.handle(NotHeld(ask.pull_id, "gone"), 1.0)) == ["Submit", "EndHold", "PullEnded"]
    ask = asked(manager, ordered("s"))
    manager.handle(Held(ask.pull_id, 8), 2.0)
    assert kinds(manager.handle(NotHeld(ask.pull_id, "gone"), 3.0)) == ["Submit", "CancelFetch"]
    *_, ended = manager.handle(NotFetched(ask.pull_id, "cut"), 4.0)
    assert isinstance(ended, PullEnded)
    assert (ended.outcome, ended.reason) == (PullOutcome.FAILED, "gone")


def test_blocks_that_cannot_be_copied_fail_it() -> None:
    manager = PullManager("b.1", LIMITS)
    ask = asked(manager, ordered("r"))
    manager.handle(Held(ask.pull_id, 8), 2.0)
    submit, end, ended = manager.handle(NotFetched(ask.pull_id, "corrupt"), 3.0)
    assert (submit, end) == (Submit("r"), EndHold(ask.pull_id))
    assert isinstance(ended, PullEnded)
    assert (ended.outcome, ended.reason, ended.fetch_ms) == (PullOutcome.FAILED, "corrupt", 1.0)


def test_requests_of_one_prefix_share_a_pull_and_the_last_to_leave_ends_it() -> None:
    manager = PullManager("b.1", LIMITS)
    ask = asked(manager, ordered("r", key=7))
    assert manager.handle(ordered("s", key=7), 1.0) == ()
    assert manager.handle(ordered("s", key=7), 1.0) == (), "a copy"
    manager.validate()
    assert manager.handle(RequestGone("r"), 2.0) == ()
    manager.handle(Held(ask.pull_id, 8), 3.0)
    assert manager.handle(RequestGone("s"), 4.0) == (CancelFetch(ask.pull_id),)
    assert kinds(manager.handle(ordered("t", key=7), 5.0)) == ["AskHold"], "not shared with one that is stopped"
    manager.validate()


def test_who_begins_with_what_is_pulled_already_waits_for_it() -> None:
    manager, chain = PullManager("b.1", LIMITS), [*range(1, 10), 7, 11, 12, 8, 14]
    assert (manager.longest_blocks, manager.bringing(chain)) == (0, None)
    short, long = asked(manager, ordered("r", key=7)), asked(manager, replace(ordered("s", key=8), blocks=13))
    assert manager.longest_blocks == 13
    assert manager.bringing(chain) == long.pull_id, "the longest"
    assert manager.bringing(chain[:12]) == short.pull_id
    assert manager.bringing(chain[:9]) is None, "a prompt that ends before it computes its own"
    assert manager.bringing([*chain[:9], 99]) is None, "another prompt"
    assert manager.handle(PullFollowed("t", short.pull_id), 1.0) == ()
    assert manager.handle(PullFollowed("t", long.pull_id), 1.0) == (), "a request waits for one"
    manager.validate()
    manager.handle(Held(short.pull_id, 10), 2.0)
    assert manager.handle(Fetched(short.pull_id, 10), 3.0)[:2] == (Submit("r"), Submit("t"))
    manager.handle(Held(long.pull_id, 13), 4.0)
    manager.handle(RequestGone("s"), 5.0)
    assert manager.bringing(chain) is None, "what is stopped brings nothing"
    for over in (short.pull_id, long.pull_id):
        assert manager.handle(PullFollowed("u", over), 6.0) == (Submit("u"),)


def test_a_prefix_of_another_length_or_source_is_another_pull() -> None:
    manager = PullManager("b.1", LIMITS)
    asked(manager, ordered("r", key=7))
    asked(manager, ordered("s", key=7, source_id="c"))
    assert len(manager.pulls) == 2


def test_so_many_run_at_once_others_wait_and_more_are_computed() -> None:
    manager = PullManager("b.1", LIMITS)
    first = asked(manager, ordered("r0"))
    asked(manager, ordered("r1"))
    for name in ("r2", "r3"):
        assert manager.handle(ordered(name), 0.0) == ()
    submit, ended = manager.handle(ordered("r4"), 0.0)
    assert submit == Submit("r4")
    assert isinstance(ended, PullEnded)
    assert ended.outcome is PullOutcome.REFUSED
    said = manager.handle(NotHeld(first.pull_id, "gone"), 10.0)
    assert kinds(said) == ["Submit", "EndHold", "PullEnded", "AskHold"]
    assert said[-1] == AskHold("b.1/pull-3", "a", "r2", 10, 195.0, 390.0), "its deadline counts from its order"


def test_one_that_waits_too_long_for_its_turn_is_computed() -> None:
    manager = PullManager("b.1", LIMITS)
    for name in ("r0", "r1", "r2"):
        manager.handle(ordered(name, compute_ms=300.0 if name == "r2" else 900.0), 0.0)
    submit, ended = manager.handle(Tick(), 300.0)
    assert submit == Submit("r2")
    assert isinstance(ended, PullEnded)
    assert ended.outcome is PullOutcome.LATE


def test_nothing_is_pulled_where_no_block_can_be_moved_and_when_the_worker_ends() -> None:
    manager = PullManager("b.1", LIMITS)
    manager.handle(ObstacleChanged("no device"), 0.0)
    assert kinds(manager.handle(ordered("r"), 0.0)) == ["Submit", "PullEnded"]
    manager.handle(ObstacleChanged(""), 0.0)
    ask = asked(manager, ordered("s"))
    assert kinds(manager.handle(Stopped(), 1.0)) == ["EndHold", "PullEnded"], "others answer its request"
    assert kinds(manager.handle(ordered("t"), 2.0)) == ["Submit", "PullEnded"]
    assert manager.handle(Held(ask.pull_id, 8), 3.0) == ()


@pytest.mark.parametrize(
    "wrong", [{"parallel": 0}, {"queued": -1}, {"least_ms": 0.0}, {"hold_ms": 1.0}, {"wait_share": 2}]
)
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PullLimits(**wrong)


def test_a_hold_is_answered_and_let_go_with_its_call() -> None:
    manager = HoldManager(LIMITS)
    assert manager.handle(HoldAsked("h", 8, 50.0), 0.0) == (Pin("h", 8, 50.0),)
    assert manager.handle(HoldAsked("h", 8, 50.0), 0.0) == ()
    assert manager.handle(Pinned("h", 5), 3.0) == (source.Answer("h"),)
    assert manager.handle(Pinned("h", 5), 3.0) == ()
    assert manager.handle(CallEnded("h"), 4.0) == (Unpin("h"),)
    assert manager.handle(CallEnded("h"), 5.0) == ()
    assert manager.hold_ids == ()


def test_a_hold_that_is_let_go_before_it_is_pinned_is_let_go_again() -> None:
    manager = HoldManager(LIMITS)
    manager.handle(HoldAsked("h", 8, 50.0), 0.0)
    assert manager.handle(CallEnded("h"), 1.0) == (Unpin("h"),)
    assert manager.handle(Pinned("h", 5), 2.0) == (Unpin("h"),)


def test_where_there_is_nothing_to_hold_the_peer_is_told() -> None:
    manager = HoldManager(LIMITS)
    for event in (Pinned("h", 0), NotPinned("h", "none of the blocks are here")):
        manager.handle(HoldAsked("h", 8, 0.0), 0.0)
        assert manager.handle(event, 1.0) == (Unpin("h"), source.EndCall("h", "none of the blocks are here"))


def test_holds_are_bounded_in_number_and_time() -> None:
    manager = HoldManager(LIMITS)
    for name in ("g", "h"):
        manager.handle(HoldAsked(name, 8, 0.0), 0.0)
    (refused,) = manager.handle(HoldAsked("i", 8, 0.0), 1.0)
    assert isinstance(refused, source.EndCall)
    manager.handle(Pinned("g", 8), 1.0)
    assert manager.handle(Tick(), 1_999.0) == ()
    assert kinds(manager.handle(Tick(), 2_000.0)) == ["Unpin", "EndCall", "Unpin", "EndCall"]


def test_a_source_that_ends_lets_go_of_everything() -> None:
    manager = HoldManager(LIMITS)
    manager.handle(HoldAsked("h", 8, 0.0), 0.0)
    assert kinds(manager.handle(Stopped(), 1.0)) == ["Unpin", "EndCall"]
    assert kinds(manager.handle(HoldAsked("i", 8, 0.0), 2.0)) == ["EndCall"]


class AnyCourse(RuleBasedStateMachine):
    """Both managers, and between them a network that delays, repeats and loses what is said; engines that answer in any
    order. What a manager was told to begin is answered at some time, as the drivers promise, unless time runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0.0
        self.target = PullManager("b.1", LIMITS)
        self.source = HoldManager(LIMITS)
        self.to_target: list[Any] = []
        self.to_source: list[Any] = []
        self.fetching: set[str] = set()
        self.pinned: set[str] = set()
        self.open_calls: set[str] = set()
        self.orders = 0
        self.wanted: set[str] = set()
        self.submitted: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    @initialize()
    def begin(self) -> None:
        self.source_lives = True

    def tell_target(self, event: Any) -> None:
        for each in self.target.handle(event, self.now_ms):
            match each:
                case AskHold():
                    self.open_calls.add(each.pull_id)
                    self.to_source.append(HoldAsked(each.pull_id, each.blocks, each.wait_ms))
                case Fetch():
                    assert each.pull_id not in self.fetching, "one copy at a time for a pull"
                    assert each.allowed_ms > 0
                    self.fetching.add(each.pull_id)
                case CancelFetch():
                    assert each.pull_id in self.fetching
                case EndHold():
                    assert each.pull_id not in self.fetching, "nothing is read any more when it is let go"
                    self.open_calls.discard(each.pull_id)
                    self.to_source.append(CallEnded(each.pull_id))
                case Submit():
                    self.submitted[each.request_id] += 1
                case PullEnded():
                    self.ended[each.pull_id] += 1
                    assert self.ended[each.pull_id] == 1
        self.target.validate()

    def tell_source(self, event: Any) -> None:
        for each in self.source.handle(event, self.now_ms):
            match each:
                case Pin():
                    self.pinned.add(each.hold_id)
                case Unpin():
                    self.pinned.discard(each.hold_id)
                case source.Answer():
                    self.to_target.append(Held(each.hold_id, 8))
                case source.EndCall():
                    self.to_target.append(NotHeld(each.hold_id, each.reason, is_refusal=True))
        self.source.validate()

    @rule(
        key=st.integers(1, 4),
        compute_ms=st.sampled_from([1.0, 300.0, 5_000.0]),
        comes_ms=st.sampled_from([0.0, 0.0, 300.0]),
    )
    def order(self, key: int, compute_ms: float, comes_ms: float) -> None:
        self.orders += 1
        name = f"r{self.orders}"
        self.wanted.add(name)
        self.tell_target(PullOrdered(name, "a", key, 10, compute_ms, comes_ms))

    @rule(key=st.integers(1, 5))
    def follow(self, key: int) -> None:
        if (pull_id := self.target.bringing([0] * 9 + [key])) is not None:
            self.orders += 1
            name = f"r{self.orders}"
            self.wanted.add(name)
            self.tell_target(PullFollowed(name, pull_id))

    @precondition(lambda self: self.to_target)
    @rule(data=st.data(), keep=st.booleans(), lose=st.booleans())
    def target_hears(self, data: st.DataObject, keep: bool, lose: bool) -> None:
        index = data.draw(st.integers(0, len(self.to_target) - 1))
        event = self.to_target[index] if keep else self.to_target.pop(index)
        if not lose:
            self.tell_target(event)

    @precondition(lambda self: self.to_source)
    @rule(data=st.data(), keep=st.booleans())
    def source_hears(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.to_source) - 1))
        event = self.to_source[index] if keep else self.to_source.pop(index)
        is_stale = isinstance(event, HoldAsked) and event.hold_id not in self.open_calls
        if self.source_lives and not is_stale:  # a call that is over asks for nothing
            self.tell_source(event)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), blocks=st.integers(0, 9))
    def pin_is_answered(self, data: st.DataObject, blocks: int) -> None:
        hold_id = data.draw(st.sampled_from(sorted(self.pinned)))
        self.tell_source(Pinned(hold_id, blocks) if blocks < 9 else NotPinned(hold_id, "no"))

    @precondition(lambda self: self.fetching)
    @rule(data=st.data(), is_there=st.booleans())
    def fetch_ends(self, data: st.DataObject, is_there: bool) -> None:
        pull_id = data.draw(st.sampled_from(sorted(self.fetching)))
        self.fetching.discard(pull_id)
        self.tell_target(Fetched(pull_id, 3) if is_there else NotFetched(pull_id, "broke"))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        if not self.submitted[name]:
            self.wanted.discard(name)
        self.tell_target(RequestGone(name))

    @precondition(lambda self: self.source_lives)
    @rule()
    def source_dies(self) -> None:
        self.source_lives = False
        self.pinned.clear()
        self.source = HoldManager(LIMITS)
        for pull_id in sorted(self.open_calls):
            self.tell_target(NotHeld(pull_id, "the source died"))

    @rule(passed_ms=st.sampled_from([1.0, 120.0, 1_100.0]))
    def time_passes(self, passed_ms: float) -> None:
        self.now_ms += passed_ms
        self.tell_target(Tick())
        self.tell_source(Tick())

    @invariant()
    def nothing_is_submitted_twice_or_after_it_left(self) -> None:
        assert not self.submitted or max(self.submitted.values()) == 1
        assert set(self.submitted) <= self.wanted

    def teardown(self) -> None:
        self.now_ms += LIMITS.hold_ms + 1
        self.tell_target(Tick())
        for pull_id in sorted(self.fetching):
            self.fetching.discard(pull_id)
            self.tell_target(NotFetched(pull_id, "cancelled"))
        self.now_ms += LIMITS.hold_ms + 1
        self.tell_target(Tick())
        for pull_id in sorted(self.fetching):
            self.fetching.discard(pull_id)
            self.tell_target(NotFetched(pull_id, "cancelled"))
        self.tell_source(Tick())
        assert set(self.submitted) == self.wanted, "whatever happens, each request is computed"
        assert not self.target.pulls
        assert not self.open_calls, "each call is ended"
        assert not self.pinned, "whatever is said or not, blocks are let go"


AnyCourse.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestAnyCourse = AnyCourse.TestCase


@given(compute_ms=st.floats(0, 1e9))
def test_what_a_pull_may_take_is_what_computing_takes_within_bounds(compute_ms: float) -> None:
    allowed_ms = LIMITS.allowed_ms(compute_ms)
    assert LIMITS.least_ms <= allowed_ms <= LIMITS.most_ms
    assert allowed_ms in (compute_ms, LIMITS.least_ms, LIMITS.most_ms)


@given(compute_ms=st.floats(0, 1e5), comes_ms=st.floats(0, 1e5))
def test_what_has_yet_to_come_has_that_time_besides(compute_ms: float, comes_ms: float) -> None:
    allowed_ms = LIMITS.allowed_ms(compute_ms, comes_ms)
    assert LIMITS.allowed_ms(compute_ms) <= allowed_ms <= LIMITS.most_ms
    wait_ms = LIMITS.wait_ms(allowed_ms, compute_ms)
    assert allowed_ms / 2 <= wait_ms <= allowed_ms
    ask = asked(PullManager("b.1", LIMITS), replace(ordered("r", compute_ms=compute_ms), comes_ms=comes_ms))
    assert (ask.wait_ms, ask.allowed_ms) == pytest.approx((wait_ms, max(allowed_ms, 1.0)))


def test_a_pull_waits_at_its_source_for_what_is_computed_there() -> None:
    manager = PullManager("b.1", LIMITS)
    ask = asked(manager, replace(ordered("r", compute_ms=400.0), comes_ms=150.0))
    assert (ask.allowed_ms, ask.wait_ms) == (700.0, 500.0)
    assert manager.handle(Tick(), 690.0) == ()
    assert "Submit" in kinds(manager.handle(Tick(), 710.0)), "it is computed, as if nothing had been tried"


def test_the_tables_name_every_state() -> None:
    assert set(target.TRANSITIONS) == set(target.PullState)
    assert set(source.TRANSITIONS) == set(source.HoldState)
