"""What schedulers tell each other, applied to their tables."""

from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.shared_event import SharedEvent, SharedKind
from tests.examples import examples
from tests.unit.controlplane.builders import cluster, instance, report

INSTANCES = ("a", "b", "c")
REQUESTS = st.sampled_from([f"r{number}" for number in range(4)])


def unreported(table: ClusterTable) -> list[int]:
    snapshot = table.snapshot("m")
    assert snapshot is not None
    return [int(count) for count in snapshot.unreported_requests]


def placed(request_id: str, instance_id: str, origin: str = "other", tokens: int = 10) -> SharedEvent:
    return SharedEvent(SharedKind.PREFILL, request_id, instance_id, tokens, origin)


def ended(request_id: str, instance_id: str, origin: str = "other") -> SharedEvent:
    return SharedEvent(SharedKind.ENDED, request_id, instance_id, 0, origin)


def test_anothers_placement_counts_until_it_is_reported() -> None:
    table = cluster("a", "b")
    assert table.shared(placed("r", "a"), 0.0)
    assert unreported(table) == [1, 0]
    report(table, "a", admitted=("r",))
    assert unreported(table) == [0, 0]


def test_a_placement_that_comes_after_its_report_counts_for_nothing() -> None:
    table = cluster("a", "b")
    report(table, "a", admitted=("r",))
    assert not table.shared(placed("r", "a"), 0.0)
    assert table.shared(placed("r", "b"), 0.0), "placed again elsewhere it does"
    assert unreported(table) == [0, 1]


def test_anothers_ending_of_an_earlier_placement_leaves_the_present_one() -> None:
    table = cluster("a", "b")
    table.placed("r", "b", 10, 0.0)
    assert not table.shared(ended("r", "a"), 0.0)
    assert not table.shared(placed("r", "a"), 0.0), "this scheduler placed it itself since"
    assert unreported(table) == [0, 1]
    assert table.ended("r") == ("b",)


def test_the_placements_of_a_scheduler_that_died_expire_like_its_own() -> None:
    table = cluster("a")
    table.shared(placed("r", "a"), 0.0)
    table.forget_unreported(table.limits.unreported_s + 0.1)
    assert unreported(table) == [0]


def test_an_unknown_instance_is_no_error() -> None:
    assert not cluster("a").shared(placed("r", "nowhere"), 0.0)


def test_a_new_watch_goes_on_with_what_was_placed_and_not_reported() -> None:
    former = cluster("a", "b", "c")
    former.placed("r1", "a", 10, 1.0)
    former.placed("r2", "b", 20, 1.0)
    former.placed("gone", "c", 20, 1.0)
    former.placed_decode("r3", "b", 30, 1.0)
    former.shared(placed("r4", "b"), 1.0)
    table = ClusterTable(ClusterLimits(max_indexed_blocks=10))
    for name in ("a", "b"):
        table.joined(instance(name))
        report(table, name, admitted=("r1",) if name == "a" else ())
    assert table.take_over(former) == 3
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert unreported(table) == [0, 2]
    assert snapshot.unreported_decodes.tolist() == [0, 1]
    assert [event.request_id for event in table.open_placements()] == ["r2", "r3"], "others tell of their own"


@pytest.mark.parametrize("kind", [SharedKind.DECODE, SharedKind.ARRIVING])
def test_decodes_to_come_are_shared_too(kind: SharedKind) -> None:
    table = cluster("a")
    table.shared(SharedEvent(kind, "r", "a", 50, "other"), 0.0)
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert snapshot.unreported_decode_tokens.tolist() == [50]
    table.shared(ended("r", "a"), 0.0)
    assert table.expected_requests() == 0


class TwoSchedulers(RuleBasedStateMachine):
    """Each tells the other of what it places, over links that deliver in order but late; reports reach both, at
    different times."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [cluster(*INSTANCES), cluster(*INSTANCES)]
        self.links: list[deque[SharedEvent]] = [deque(), deque()]
        self.reports: list[deque[tuple[str, str]]] = [deque(), deque()]
        self.open: dict[str, tuple[int, str]] = {}

    def tell(self, scheduler: int, event: SharedEvent) -> None:
        self.links[1 - scheduler].append(event)

    @rule(scheduler=st.integers(0, 1), request=REQUESTS, where=st.sampled_from(INSTANCES))
    def place(self, scheduler: int, request: str, where: str) -> None:
        if request in self.open:
            return
        self.tables[scheduler].placed(request, where, 10, 0.0)
        self.tell(scheduler, placed(request, where, f"s{scheduler}"))
        self.open[request] = (scheduler, where)

    @rule(request=REQUESTS)
    def end(self, request: str) -> None:
        if request in self.open:
            scheduler, _ = self.open.pop(request)
            for where in self.tables[scheduler].ended(request):
                self.tell(scheduler, ended(request, where, f"s{scheduler}"))

    @rule(request=REQUESTS)
    def admit(self, request: str) -> None:
        """The worker reports it; the request runs and later ends, which is no business of these tables."""
        if request in self.open:
            _, where = self.open.pop(request)
            for queue in self.reports:
                queue.append((request, where))

    @rule(scheduler=st.integers(0, 1))
    def hear(self, scheduler: int) -> None:
        if self.links[scheduler]:
            self.tables[scheduler].shared(self.links[scheduler].popleft(), 0.0)

    @rule(scheduler=st.integers(0, 1))
    def see_report(self, scheduler: int) -> None:
        if self.reports[scheduler]:
            request, where = self.reports[scheduler].popleft()
            report(self.tables[scheduler], where, admitted=(request,))

    @invariant()
    def nothing_counts_less_than_nothing(self) -> None:
        for table in self.tables:
            table.validate()
            snapshot = table.snapshot("m")
            assert snapshot is not None
            assert np.all(snapshot.unreported_requests >= 0)
            assert sum(unreported(table)) == table.unreported_requests() <= 4

    def teardown(self) -> None:
        """Once everything has arrived and is old, nothing is counted that is not there."""
        for scheduler in (0, 1):
            while self.links[scheduler]:
                self.hear(scheduler)
            while self.reports[scheduler]:
                self.see_report(scheduler)
        for table in self.tables:
            table.forget_unreported(table.limits.unreported_s + 1.0)
            assert unreported(table) == [0, 0, 0]


TestTwoSchedulers = TwoSchedulers.TestCase
TestTwoSchedulers.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
