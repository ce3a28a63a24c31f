"""Which workers count as frozen, stalled or deaf, and when."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.incarnation import Incarnation
from services.frontend.workers.liveness import (
    DEAF_S,
    IDLE_FREEZE_S,
    LONGEST_LEARNT_S,
    MARGIN,
    Hang,
    Hung,
    LivenessMonitor,
    Probe,
    Sighting,
)

LOOK_S = 0.1
FREEZE_S, STALL_S = 0.5, 10.0
A, B, C = (Incarnation(name, "first") for name in "abc")


class World:
    """Workers that say something at each look, or not, and a probe that is answered, or not."""

    def __init__(self, *workers: Incarnation) -> None:
        self.monitor = LivenessMonitor(FREEZE_S, STALL_S)
        self.now_s = 0.0
        self.messages = dict.fromkeys(workers, 0)
        self.requests = dict.fromkeys(workers, 1)
        self.stalled_s = dict.fromkeys(workers, 0.0)
        self.heard = dict.fromkeys(workers, 1)
        self.unheard = dict.fromkeys(workers, 0)
        self.answers: Callable[[Incarnation], bool] = lambda _: False
        self.hung: list[tuple[float, Hung]] = []
        self.probes: list[Incarnation] = []
        self._open: list[tuple[float, Incarnation]] = []

    def look(self, *heard: Incarnation, after_s: float = LOOK_S) -> None:
        self.now_s += after_s
        for worker in heard:
            self.messages[worker] += 1
        for ends_s, worker in list(self._open):
            if self.now_s >= ends_s - 1e-9:
                self._open.remove((ends_s, worker))
                self.monitor.probed(worker, is_alive=self.answers(worker))
        sightings = {
            worker: Sighting(
                self.requests[worker],
                self.messages[worker],
                self.stalled_s[worker],
                self.heard[worker],
                self.unheard[worker],
            )
            for worker in self.messages
        }
        for finding in self.monitor.look(self.now_s, sightings):
            if isinstance(finding, Probe):
                self.probes.append(finding.worker)
                ends_s = self.now_s + (0.0 if self.answers(finding.worker) else finding.deadline_s)
                self._open.append((ends_s, finding.worker))
            else:
                self.hung.append((self.now_s, finding))
                self.requests[finding.worker] = 0
        self.monitor.validate()

    def look_for(self, seconds: float, *heard: Incarnation) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.look(*heard)


def test_a_frozen_worker_is_found_within_three_quarters_of_a_second() -> None:
    world = World(A, B)
    world.look_for(2.0, A, B)
    frozen_s = world.now_s
    world.look_for(2.0, B)
    ((found_s, hung),) = world.hung
    assert (hung.worker, hung.hang) == (A, Hang.FROZEN)
    assert found_s - frozen_s <= 0.75


def test_the_only_worker_with_requests_is_found_as_well() -> None:
    world = World(A)
    world.look_for(2.0)
    assert [hung.hang for _, hung in world.hung] == [Hang.FROZEN]
    assert world.hung[0][0] <= 0.75


def test_a_worker_that_answers_elsewhere_is_not_frozen_but_its_stream_must_say_something_in_time() -> None:
    world = World(A, B)
    world.answers = lambda _: True
    world.look_for(STALL_S - 0.5, B)
    assert not world.hung
    assert world.probes.count(A) > 10, "asked again and again"
    world.look_for(1.0, B)
    assert [(hung.worker, hung.hang) for _, hung in world.hung] == [(A, Hang.STALLED)]


def test_an_engine_that_makes_no_step_is_found_although_its_process_lives() -> None:
    world = World(A, B)
    for tenths in range(200):
        world.stalled_s[A] = tenths / 10
        world.look(A, B)
    ((found_s, hung),) = world.hung
    assert (hung.worker, hung.hang) == (A, Hang.STALLED)
    assert STALL_S <= found_s <= STALL_S + 2 * LOOK_S
    assert not world.probes


def test_nobody_is_blamed_while_nobody_is_heard() -> None:
    """It is us, or the network around us; and nobody could take the requests."""
    world = World(A, B, C)
    world.look_for(STALL_S - 1.0)
    assert not world.hung
    world.look_for(2.0)
    assert {hung.worker for _, hung in world.hung} == {A, B, C}


def test_two_of_three_may_freeze_together() -> None:
    world = World(A, B, C)
    world.look_for(1.0, A, B, C)
    world.look_for(1.0, C)
    assert {hung.worker for _, hung in world.hung} == {A, B}


def test_a_worker_without_requests_owes_a_sign_of_life_every_second_or_so() -> None:
    world = World(A, B)
    world.requests[A] = 0
    for _ in range(10):
        world.look_for(1.2, B)
        world.look(A, B)
    assert not world.hung
    silent_s = world.now_s
    world.look_for(20.0, B)
    ((found_s, hung),) = world.hung
    assert (hung.worker, hung.hang) == (A, Hang.FROZEN)
    assert found_s - silent_s <= IDLE_FREEZE_S + 2 * LOOK_S


def test_a_worker_that_gets_a_request_is_not_blamed_for_the_silence_before_it() -> None:
    world = World(A, B)
    world.requests[A] = 0
    world.look_for(1.0, B)
    world.requests[A] = 1
    world.look_for(0.2, B)
    assert not world.probes
    world.look_for(0.7, B)
    assert [(hung.worker, hung.hang) for _, hung in world.hung] == [(A, Hang.FROZEN)]


@given(st.lists(st.floats(0.1, 30.0), min_size=1, max_size=30))
def test_a_frontend_that_is_late_itself_blames_nobody(lateness_s: list[float]) -> None:
    """The messages were there all the time, only unread."""
    world = World(A, B)
    for late_s in lateness_s:
        world.look(after_s=late_s)
        world.look(A, B, after_s=0.01)
    assert not world.hung


@given(st.lists(st.integers(1, 9), min_size=5, max_size=60))
def test_a_worker_that_is_heard_irregularly_is_given_more_time(silences: list[int]) -> None:
    """Of up to 0.9 s; each at most a tenth longer than the longest before it, as load grows."""
    world, longest = World(A, B), 2
    for wanted in silences:
        looks = min(wanted, longest + 1)
        longest = max(longest, looks)
        for _ in range(looks):
            world.look(B)
        world.look(A, B)
    assert not world.hung
    assert world.monitor.bound_s(A) <= MARGIN * LONGEST_LEARNT_S


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 15)), max_size=80), st.booleans())
def test_who_is_heard_often_enough_never_counts_as_frozen(turns: list[tuple[bool, bool, int]], answers: bool) -> None:
    world = World(A, B)
    world.answers = lambda _: answers
    for hears_b, b_has_requests, looks in turns:
        world.requests[B] = int(b_has_requests)
        for number in range(looks):
            heard = [A] if number % 2 == 0 else []
            world.look(*heard, *([B] if hears_b else []))
    assert all(hung.worker == B for _, hung in world.hung)


def test_a_frozen_worker_that_comes_back_is_trusted_again_and_found_again() -> None:
    world = World(A, B)
    world.look_for(1.0, B)
    assert len(world.hung) == 1
    world.look(A, B)
    world.requests[A] = 1
    world.look_for(3.0, A, B)
    assert len(world.hung) == 1
    world.look_for(3.0, B)
    assert len(world.hung) == 2


def test_a_worker_that_sends_and_gets_nothing_is_deaf_and_said_to_be_so_once() -> None:
    world = World(A, B)
    world.look_for(5.0, A, B)
    world.unheard[A] = 1
    cut_s = world.now_s
    world.look_for(10.0, A, B)
    ((found_s, hung),) = world.hung
    assert (hung.worker, hung.hang) == (A, Hang.DEAF)
    assert DEAF_S - 1e-6 <= found_s - cut_s <= DEAF_S + 2 * LOOK_S
    world.heard[A] += 1
    world.look_for(DEAF_S - 0.5, A, B)
    assert len(world.hung) == 1, "it has got something: it is trusted again"
    world.look_for(1.0, A, B)
    assert len(world.hung) == 2, "and has not got the rest"


def test_a_deaf_worker_is_found_by_what_it_says_while_idle() -> None:
    """Once a second: the request that it did not get does not make it busy."""
    world = World(A, B)
    world.answers = lambda _: True
    world.unheard[A] = 1
    for _ in range(5):
        world.look_for(0.9, B)
        world.look(A, B)
    ((found_s, hung),) = world.hung
    assert (hung.worker, hung.hang) == (A, Hang.DEAF)
    assert found_s <= DEAF_S + 1.0 + LOOK_S


def test_a_frozen_worker_is_not_called_deaf_as_well() -> None:
    world = World(A, B)
    world.unheard[A] = 1
    world.look_for(20.0, B)
    assert [hung.hang for _, hung in world.hung] == [Hang.FROZEN]


@given(st.lists(st.tuples(st.integers(0, 29), st.integers(0, 3)), max_size=40))
def test_who_gets_something_every_three_seconds_is_not_deaf(turns: list[tuple[int, int]]) -> None:
    """However much is under way to it."""
    world = World(A, B)
    for looks, unheard in turns:
        world.unheard[A] = unheard
        for _ in range(looks):
            world.look(A, B)
        world.heard[A] += 1
        world.look(A, B)
    assert not world.hung
