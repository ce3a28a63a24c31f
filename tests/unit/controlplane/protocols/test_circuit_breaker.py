"""A breaker under drawn requests and probes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.protocols.circuit_breaker import BreakerLimits, BreakerState, CircuitBreaker
from mesh.errors import IllegalTransition
from tests.examples import examples

LIMITS = BreakerLimits(first_pause_s=0.1, longest_pause_s=2.0, healthy_s=10.0)
EPSILON_S = 1e-9


class BreakerUnderFire(RuleBasedStateMachine):
    """A peer that is well or ill as drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.breaker = CircuitBreaker("peer", self.now_s, LIMITS)
        self.probes_s: list[float] = []

    @rule(duration_s=st.floats(0.0, 15.0))
    def time_passes(self, duration_s: float) -> None:
        self.now_s += duration_s

    @rule()
    def miss(self) -> None:
        was_closed = self.breaker.is_closed
        assert self.breaker.miss(self.now_s) == was_closed
        if was_closed:
            assert self.breaker.state is BreakerState.OPEN, "the first miss opens it"
            pause_s = self.breaker.probe_due_s - self.now_s
            assert LIMITS.first_pause_s - EPSILON_S <= pause_s <= LIMITS.longest_pause_s + EPSILON_S

    @rule()
    def wake(self) -> None:
        self.breaker.wake(self.now_s)

    @precondition(lambda self: self.breaker.state is BreakerState.OPEN and self.breaker.probe_due_s <= self.now_s)
    @rule()
    def probe(self) -> None:
        self.breaker.begin_probe(self.now_s)
        if self.probes_s:
            assert self.now_s - self.probes_s[-1] >= LIMITS.first_pause_s - EPSILON_S, "probes are paced"
        self.probes_s.append(self.now_s)

    @precondition(lambda self: self.breaker.state is BreakerState.HALF_OPEN)
    @rule(ok=st.booleans())
    def probed(self, ok: bool) -> None:
        self.breaker.end_probe(ok, self.now_s)
        assert self.breaker.is_closed == ok

    @invariant()
    def it_is_valid(self) -> None:
        self.breaker.validate()

    @invariant()
    def an_open_breaker_is_probed_within_the_longest_pause(self) -> None:
        if self.breaker.state is BreakerState.OPEN:
            assert self.breaker.probe_due_s <= self.now_s + LIMITS.longest_pause_s + EPSILON_S


TestBreakerUnderFire = BreakerUnderFire.TestCase
TestBreakerUnderFire.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def closed(now_s: float) -> CircuitBreaker:
    breaker = CircuitBreaker("peer", now_s, LIMITS)
    breaker.begin_probe(now_s)
    breaker.end_probe(True, now_s)
    return breaker


def test_a_peer_that_answers_probes_only_is_tried_less_and_less() -> None:
    now_s, breaker, pauses_s = 0.0, closed(0.0), []
    for _ in range(7):
        breaker.miss(now_s)
        pauses_s.append(round(breaker.probe_due_s - now_s, 6))
        now_s = breaker.probe_due_s
        breaker.begin_probe(now_s)
        breaker.end_probe(True, now_s)
    assert pauses_s == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    now_s += LIMITS.healthy_s
    breaker.miss(now_s)
    assert breaker.probe_due_s == pytest.approx(now_s + 0.1), "it was well for long enough"


def test_a_word_from_the_peer_brings_the_probe_forward_but_not_without_bound() -> None:
    breaker = closed(0.0)
    breaker.miss(1.0)
    for now_s in (1.1, 1.4, 2.2):
        breaker.begin_probe(now_s)
        breaker.end_probe(False, now_s)
    breaker.wake(2.21)
    assert breaker.probe_due_s == pytest.approx(2.3)
    breaker.wake(5.0)
    assert breaker.probe_due_s == pytest.approx(2.3), "never put off"


def test_no_probe_while_the_peer_may_be_asked() -> None:
    with pytest.raises(IllegalTransition, match="peer is closed; there is no probe"):
        closed(0.0).begin_probe(1.0)


def test_pauses_double_from_a_tenth_of_a_second_to_two_seconds() -> None:
    breaker, now_s, pauses_s = CircuitBreaker("peer", 0.0), 0.0, []
    for _ in range(7):
        breaker.begin_probe(now_s)
        breaker.end_probe(False, now_s)
        pauses_s.append(round(breaker.probe_due_s - now_s, 6))
        now_s = breaker.probe_due_s
    assert pauses_s == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_ten_seconds_are_long_enough_to_be_well() -> None:
    for well_s, pause_s in ((LIMITS.healthy_s - 1.0, 0.2), (LIMITS.healthy_s, 0.1)):
        breaker = CircuitBreaker("peer", 0.0, LIMITS)
        breaker.begin_probe(0.0)
        breaker.end_probe(False, 0.0)
        breaker.begin_probe(1.0)
        breaker.end_probe(True, 1.0)
        breaker.miss(1.0 + well_s)
        assert breaker.probe_due_s == pytest.approx(1.0 + well_s + pause_s)


def test_who_has_not_been_probed_yet_is_probed_at_once() -> None:
    breaker = CircuitBreaker("peer", 5.0, LIMITS)
    breaker.wake(5.0)
    assert breaker.probe_due_s == 5.0
