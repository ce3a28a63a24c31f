"""Candidates for one duty under drawn interleavings: slow answers, lost leases, pauses, clocks that differ, a store
that loses everything."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh.errors import IllegalTransition, StaleLeader
from mesh.leadership_state import (
    Announce,
    Candidate,
    Fence,
    Instruction,
    LeaderRecord,
    Lock,
    Phase,
    ReadEpoch,
    Step,
    Unlock,
    Verify,
    WriteEpoch,
)
from mesh.store.keyspace import KeySpace
from tests.examples import examples

DUTY = "tests"
KEY, EPOCH_KEY = "/leaders/tests", "/epochs/tests"
TTL_S = 3.0
CANDIDATES = 3
Answer = Callable[[], list[Instruction]]


@dataclass
class Process:
    """A candidate, its clocks, and what is on the way between it and the store."""

    number: int
    lag_s: float
    """How far its clocks are behind."""
    candidate: Candidate
    lease: str = ""
    lock_revision: int = 0
    requests: list[Instruction] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def now_s(self, true_s: float) -> float:
        return true_s - self.lag_s


def encoded(process: Process, epoch: int) -> bytes:
    return msgspec.json.encode(LeaderRecord(DUTY, f"m{process.number}", f"i{process.number}", epoch=epoch))


class ManyCandidates(RuleBasedStateMachine):
    """Requests reach the store in order and its answers come back in order; anything may happen in between."""

    def __init__(self) -> None:
        super().__init__()
        self.true_s = 1000.0
        self.store = KeySpace()
        self.grants = 0
        self.is_wiped = False
        self.fence = Fence()
        self.accepted: list[tuple[int, str]] = []
        self.leaders: dict[int, str] = {}
        self.processes = [
            Process(number, lag_s, Candidate(DUTY, f"i{number}")) for number, lag_s in enumerate((0.0, 50.0, 300.0))
        ]

    def do(self, process: Process, instructions: list[Instruction]) -> None:
        process.requests += instructions

    def process(self, number: int) -> Process:
        return self.processes[number]

    # -- the store

    def at_store(self, process: Process, request: Instruction) -> None:
        candidate, now_s = process.candidate, process.now_s(self.true_s)
        match request:
            case Lock(attempt):
                self.grants += 1
                lease = f"lease-{self.grants}"
                self.store.grant_lease(lease, TTL_S, self.true_s)
                revision = self.store.compare_and_swap(KEY, 0, encoded(process, 0), lease)
                if revision is None:
                    self.store.revoke_lease(lease)
                    process.answers.append(partial(candidate.locked, attempt, None))
                else:
                    process.lease, process.lock_revision = lease, revision
                    process.answers.append(partial(candidate.locked, attempt, now_s + TTL_S))
            case ReadEpoch(attempt):
                entry = self.store.get(EPOCH_KEY)
                epoch, revision = (int(entry.value), entry.mod_revision) if entry else (0, 0)
                process.answers.append(partial(candidate.read, attempt, epoch, revision, int(1000 * now_s)))
            case WriteEpoch(attempt, epoch, expected):
                written = self.store.compare_and_swap(EPOCH_KEY, expected, str(epoch).encode())
                process.answers.append(partial(candidate.fenced, attempt, written is not None))
            case Announce(attempt, epoch):
                alive = self.store.refresh_lease(process.lease, self.true_s)
                ok = alive and self.store.compare_and_swap(
                    KEY, process.lock_revision, encoded(process, epoch), process.lease
                )
                process.answers.append(partial(candidate.announced, attempt, bool(ok)))
            case Verify(attempt):
                process.answers.append(partial(candidate.verified, attempt, self.holder()))
            case Unlock():
                if self.store.refresh_lease(process.lease, self.true_s):
                    self.store.revoke_lease(process.lease)
            case _:
                pass

    def holder(self) -> LeaderRecord | None:
        entry = self.store.get(KEY)
        return None if entry is None else msgspec.json.decode(entry.value, type=LeaderRecord)

    # -- what happens

    @rule(duration_s=st.floats(0.01, 2.0))
    def time_passes(self, duration_s: float) -> None:
        self.true_s += duration_s
        self.store.expire_leases(self.true_s)

    @rule(number=st.integers(0, CANDIDATES - 1))
    def retries(self, number: int) -> None:
        process = self.process(number)
        self.do(process, process.candidate.retry())

    @rule(number=st.integers(0, CANDIDATES - 1))
    def the_store_takes_a_request(self, number: int) -> None:
        process = self.process(number)
        if process.requests:
            self.at_store(process, process.requests.pop(0))

    @rule(number=st.integers(0, CANDIDATES - 1))
    def an_answer_arrives(self, number: int) -> None:
        process = self.process(number)
        if process.answers:
            self.do(process, process.answers.pop(0)())

    @rule(number=st.integers(0, CANDIDATES - 1))
    def everything_under_way_is_carried_out(self, number: int) -> None:
        for _ in range(20):
            self.the_store_takes_a_request(number)
            self.an_answer_arrives(number)

    @rule(number=st.integers(0, CANDIDATES - 1))
    def hears_of_the_key(self, number: int) -> None:
        process = self.process(number)
        self.do(process, process.candidate.heard(self.holder()))

    @rule(number=st.integers(0, CANDIDATES - 1))
    def renews(self, number: int) -> None:
        process = self.process(number)
        if process.lease and self.store.refresh_lease(process.lease, self.true_s):
            process.candidate.renewed(process.now_s(self.true_s) + TTL_S)
        elif process.lease:
            process.lease = ""
            self.do(process, process.candidate.lease_lost(process.candidate._attempt))

    @rule(number=st.integers(0, CANDIDATES - 1))
    def the_store_fails(self, number: int) -> None:
        process = self.process(number)
        if process.requests and not isinstance(process.requests[0], Unlock):
            process.requests.pop(0)
            self.do(process, process.candidate.failed(process.candidate._attempt))

    @precondition(lambda self: not self.is_wiped)
    @rule()
    def the_store_is_wiped(self) -> None:
        self.is_wiped = True
        self.store = KeySpace(start_revision=self.store.revision + 1)

    @rule(number=st.integers(0, CANDIDATES - 1))
    def gives_an_order(self, number: int) -> None:
        """To a worker that remembers; a paused leader orders without looking at its clock again."""
        candidate, name = self.process(number).candidate, f"m{number}"
        if candidate.phase is not Phase.LEADING:
            return
        try:
            self.fence.check(DUTY, candidate.epoch, name)
        except StaleLeader:
            self.do(self.process(number), candidate.refused(self.fence.highest(DUTY)))
        else:
            self.accepted.append((candidate.epoch, name))

    # -- what must hold

    @invariant()
    def all_are_valid(self) -> None:
        for each in self.processes:
            each.candidate.validate()

    @invariant()
    def at_most_one_acts(self) -> None:
        acting = [each for each in self.processes if each.candidate.leads(each.now_s(self.true_s))]
        if not self.is_wiped:
            assert len(acting) <= 1
        for each in acting:
            if not self.is_wiped:
                assert self.leaders.setdefault(each.candidate.epoch, f"m{each.number}") == f"m{each.number}"

    @invariant()
    def orders_are_of_one_leader_after_another(self) -> None:
        epochs = [epoch for epoch, _ in self.accepted]
        assert epochs == sorted(epochs)
        assert len(set(self.accepted)) == len(set(epochs)), "two leaders gave orders in one epoch"

    def teardown(self) -> None:
        """With a store that answers there is a leader soon, and its orders are taken."""
        for round_number in range(200):
            self.time_passes(0.5)
            for number in range(CANDIDATES):
                self.renews(number)
                self.hears_of_the_key(number)
                self.retries(number)
                self.everything_under_way_is_carried_out(number)
            before = len(self.accepted)
            for number in range(CANDIDATES):
                self.gives_an_order(number)
            acting = [each for each in self.processes if each.candidate.leads(each.now_s(self.true_s))]
            if len(acting) == 1 and len(self.accepted) > before:
                return
            assert round_number < 150, "nobody leads"


TestManyCandidates = ManyCandidates.TestCase
TestManyCandidates.settings = settings(max_examples=examples(80), stateful_step_count=60, deadline=None)


def leading(candidate: Candidate, epoch: int = 0, unix_ms: int = 5) -> Candidate:
    candidate.retry()
    candidate.locked(1, 10.0)
    candidate.read(1, epoch, 1, unix_ms)
    candidate.fenced(1, True)
    candidate.announced(1, True)
    return candidate


def test_the_epoch_is_above_the_last_one_and_the_wall_clock_and_all_that_was_heard() -> None:
    assert leading(Candidate(DUTY, "a"), epoch=7, unix_ms=3).epoch == 8
    assert leading(Candidate(DUTY, "a"), epoch=7, unix_ms=90).epoch == 90
    heard = Candidate(DUTY, "a")
    heard.heard(LeaderRecord(DUTY, "b", "b", epoch=100))
    heard.heard(None)
    heard.locked(1, 10.0)
    heard.read(1, 0, 0, 90)
    assert heard.epoch == 101, "over a store that has lost its data and with a clock that lags"


def test_a_leader_does_not_act_beyond_its_lease() -> None:
    candidate = leading(Candidate(DUTY, "a"))
    assert candidate.leads(9.9)
    assert not candidate.leads(10.0)
    candidate.renewed(12.0)
    assert candidate.leads(11.9)


def test_an_answer_of_a_former_attempt_changes_nothing() -> None:
    candidate = Candidate(DUTY, "a")
    candidate.retry()
    candidate.failed(1)
    candidate.retry()
    assert candidate.locked(1, 10.0) == []
    assert candidate.phase is Phase.LOCKING


def test_a_step_that_there_is_not_tells_its_story() -> None:
    candidate = leading(Candidate(DUTY, "a"))
    candidate.resign()
    with pytest.raises(IllegalTransition, match="candidate a for tests, attempt 1, is resigned; there is no locked"):
        candidate._move(Step.LOCKED)


def test_a_fence_refuses_former_leaders_and_a_second_one_of_the_same_epoch() -> None:
    fence = Fence()
    fence.check(DUTY, 5, "a")
    fence.check(DUTY, 5, "a")
    with pytest.raises(StaleLeader, match="order of b as leader of tests in epoch 5 is refused: a leads since epoch 5"):
        fence.check(DUTY, 5, "b")
    fence.check(DUTY, 6, "b")
    with pytest.raises(StaleLeader):
        fence.check(DUTY, 5, "a")
    fence.check("other", 1, "a")
    assert (fence.highest(DUTY), fence.highest("other")) == (6, 1)
