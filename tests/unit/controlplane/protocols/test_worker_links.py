"""A link lives as long as its worker is in the mesh, and then as long as it has requests."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.worker_links import (
    Event,
    Instruction,
    Joined,
    Leave,
    Left,
    LinkManager,
    Looked,
    Open,
    Reconnect,
    Retire,
    Return,
)

A, A_AGAIN, B = Incarnation("a", "1"), Incarnation("a", "2"), Incarnation("b", "1")
IDLE = Looked({}, ())


def after(*events: Event) -> tuple[Instruction, ...]:
    """What is said last."""
    manager, said = LinkManager(), ()
    for event in events:
        said = manager.handle(event)  # type: ignore[assignment]
        manager.validate()
    return said


def test_a_worker_that_joins_gets_a_link_and_one_alone() -> None:
    assert after(Joined(A)) == (Open(A),)
    assert after(Joined(A), Joined(A)) == ()
    assert after(Joined(A), IDLE) == ()


def test_a_link_to_a_worker_that_left_is_retired_when_its_last_request_has_ended() -> None:
    assert after(Joined(A), Left(A)) == (Leave(A),)
    assert after(Joined(A), Left(A), Looked({A: 1}, ())) == ()
    assert after(Joined(A), Left(A), Looked({A: 1}, ()), Looked({A: 0, B: 1}, ())) == (Retire(A),)
    assert after(Joined(A), Left(A), IDLE, IDLE) == ()


def test_a_worker_that_had_only_lost_its_lease_keeps_its_link() -> None:
    assert after(Joined(A), Left(A), Looked({A: 1}, ()), Joined(A)) == (Return(A),)
    assert after(Joined(A), Left(A), Looked({A: 1}, ()), Joined(A), IDLE) == ()
    assert after(Joined(A), Left(A), IDLE, Joined(A)) == (Open(A),)


def test_a_restarted_worker_has_a_link_of_its_own_beside_the_former_one() -> None:
    assert after(Joined(A), Joined(A_AGAIN)) == (Leave(A), Open(A_AGAIN))
    assert after(Joined(A), Joined(A_AGAIN), Left(A)) == (), "that is known"
    assert after(Joined(A), Joined(A_AGAIN), Looked({A: 1, A_AGAIN: 1}, ())) == ()
    assert after(Joined(A), Joined(A_AGAIN), IDLE) == (Retire(A),)


def test_nobody_leaves_who_is_not_there() -> None:
    assert after(Left(A)) == ()
    assert after(Joined(A), Left(A_AGAIN)) == ()


def test_a_moved_worker_is_spoken_to_at_its_address_once_its_stream_has_no_request() -> None:
    assert after(Joined(A), Joined(B), Looked({A: 1}, {A})) == ()
    assert after(Joined(A), Joined(B), Looked({B: 1}, {A})) == (Reconnect(A),)
    assert after(Joined(A), Left(A), Looked({}, {A})) == (Retire(A),)


WORKERS = st.sampled_from([Incarnation(name, life) for name in "ab" for life in "123"])


class Links(RuleBasedStateMachine):
    """Workers come and go in any order: no request is cut off, and no link is left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = LinkManager()
        self.present: dict[str, Incarnation] = {}
        self.open: set[Incarnation] = set()
        self.used: set[Incarnation] = set()

    @rule(worker=WORKERS)
    def join(self, worker: Incarnation) -> None:
        self.present[worker.instance_id] = worker
        self.carry_out(Joined(worker), {})

    @rule(worker=WORKERS)
    def leave(self, worker: Incarnation) -> None:
        if self.present.get(worker.instance_id) == worker:
            del self.present[worker.instance_id]
        self.carry_out(Left(worker), {})

    @rule(requests=st.dictionaries(WORKERS, st.integers(0, 2)), moved=st.sets(WORKERS))
    def look(self, requests: dict[Incarnation, int], moved: set[Incarnation]) -> None:
        self.carry_out(Looked(requests, moved), requests)
        assert {worker for worker in self.open if not requests.get(worker)} <= set(self.present.values())

    def carry_out(self, event: Event, requests: dict[Incarnation, int]) -> None:
        for instruction in self.manager.handle(event):
            worker = instruction.worker
            match instruction:
                case Open():
                    assert worker not in self.open
                    self.open.add(worker)
                    self.used.add(worker)
                case Return():
                    assert worker in self.open - self.used
                    self.used.add(worker)
                case Leave():
                    self.used.remove(worker)
                case Reconnect():
                    assert worker in self.used
                    assert not requests.get(worker), "requests would be lost with the stream"
                case Retire():
                    assert not requests.get(worker), "requests would be lost with the stream"
                    assert worker not in self.used
                    self.open.remove(worker)

    @invariant()
    def those_in_the_mesh_are_used(self) -> None:
        self.manager.validate()
        assert self.used == set(self.present.values()) <= self.open


TestLinks = Links.TestCase
