"""How many replicas there are to be, over loads, faults and changes of leader."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.replica_kind import KindReplicas, ReplicaKind
from controlplane.planning.autoscale.capacity import CapacityCurve, SeenCapacity
from controlplane.planning.autoscale.events import (
    Adopted,
    AutoscaleInstruction,
    CapacityKnown,
    Led,
    Observed,
    PolicySet,
    Refused,
    Scale,
    Seen,
    Tick,
)
from controlplane.planning.autoscale.manager import AutoscaleManager
from mesh.errors import ConfigurationError

POLICY = AutoscalePolicy(
    "m", ttft_ms=1000, maximum=10, cold_start_s=60, capacity_per_s=2.0, interval_s=10, settle_s=60, idle_s=120
)


MIXED = AutoscalePolicy(
    "m",
    ttft_ms=1000,
    maximum=10,
    cold_start_s=60,
    interval_s=10,
    settle_s=60,
    idle_s=120,
    kinds=(ReplicaKind(1.0, 2.0, "A10"), ReplicaKind(1.5, 9.0, "H100", tp=2, maximum=1)),
)


@dataclass
class Planner:
    """A manager and an actuator that does at once what is asked."""

    policy: AutoscalePolicy = POLICY
    now_s: float = 0.0
    serving: int = 1
    scales: list[Scale] = field(default_factory=list)
    follows: bool = True

    def __post_init__(self) -> None:
        self.manager = AutoscaleManager()
        self.manager.handle(PolicySet("m", self.policy), self.now_s)
        self.manager.handle(Led(True), self.now_s)

    def take(self, found: tuple[AutoscaleInstruction, ...]) -> None:
        for each in found:
            if isinstance(each, Scale):
                self.scales.append(each)
                if self.follows:
                    self.serving = each.replicas
        self.manager.validate()

    def interval(self, arrivals: int, waiting: int = 0, kept: int | None = None) -> None:
        self.now_s += self.policy.interval_s
        ended = arrivals
        for event in (
            Seen("m", {f"m-{number}": number for number in range(self.serving)}),
            Observed("m", arrivals, ended, ended if kept is None else kept, waiting),
            Tick(),
        ):
            self.take(self.manager.handle(event, self.now_s))


def test_replicas_follow_the_load_up_at_once_and_down_when_settled() -> None:
    here = Planner()
    for _ in range(6):
        here.interval(100)
    assert here.serving == 7, "10 requests/s, 30 % above while errors are unknown, 2 a replica"
    at_peak = here.now_s
    while here.serving > 1 and here.now_s < at_peak + 600:
        here.interval(10)
    assert here.serving == 1
    downs = [each for each in here.scales if each.leave_first]
    assert downs[0].leave_first[:2] == ("m-0", "m-1"), "the least loaded go first"
    assert len(here.scales) < 14, "no to and fro"


def test_a_replica_goes_only_after_it_was_not_needed_for_long() -> None:
    here = Planner()
    here.interval(100)
    highest = here.serving
    settled = here.now_s + POLICY.settle_s
    while here.now_s < settled - POLICY.interval_s:
        here.interval(1)
    assert here.serving == highest


def test_zero_and_back_by_a_request_at_the_door() -> None:
    here = Planner(msgspec.structs.replace(POLICY, minimum=0))
    here.interval(20)
    while here.serving and here.now_s < 1000:
        here.interval(0)
    assert here.serving == 0
    assert here.now_s >= POLICY.idle_s
    here.take(here.manager.handle(Observed("m", 1, waiting=1), here.now_s + 0.1))
    assert here.scales[-1].replicas == 1, "without waiting for the interval to end"
    assert "waits at the door" in here.scales[-1].why


def test_without_reports_nothing_changes() -> None:
    here = Planner()
    for _ in range(5):
        here.interval(100)
    before = list(here.scales)
    for _ in range(100):
        here.now_s += 10
        here.take(here.manager.handle(Tick(), here.now_s))
    assert here.scales == before
    status = here.manager.status("m")
    assert status is not None
    assert "nobody reports" in status.why


def test_another_leader_begins_with_what_stands_and_a_follower_says_nothing() -> None:
    first, second = Planner(), Planner()
    second.manager.handle(Led(False), 0)
    for _ in range(4):
        first.interval(100)
        second.serving = first.serving
        second.interval(100)
    assert not second.scales
    second.manager.handle(Adopted("m", first.serving), second.now_s)
    second.manager.handle(Led(True), second.now_s)
    second.interval(100)
    assert not second.scales, "the same load needs the same replicas"


def test_a_refusal_is_shown_and_not_answered_by_wanting_more() -> None:
    here = Planner(follows=False)
    here.interval(100)
    here.manager.handle(Refused("m", "no GPUs"), here.now_s)
    for _ in range(20):
        here.interval(100)
    assert {each.replicas for each in here.scales} <= {5, 6, 7}
    status = here.manager.status("m")
    assert status is not None
    assert status.refused == "no GPUs"


def test_a_dry_run_decides_and_changes_nothing() -> None:
    here = Planner(msgspec.structs.replace(POLICY, dry_run=True))
    here.interval(100)
    status = here.manager.status("m")
    assert not here.scales
    assert status is not None
    assert status.wanted == 7


def test_the_budget_bounds_replicas() -> None:
    here = Planner(msgspec.structs.replace(POLICY, price_per_hour=3.0, gpus=2, budget_per_hour=20.0))
    here.interval(100)
    assert here.serving == 3
    assert "budget" in here.scales[-1].why


def test_of_kinds_the_cheapest_mix_is_wanted_and_what_it_replaces_stays_until_it_serves() -> None:
    here = Planner(MIXED)
    here.interval(10)
    assert [str(each) for each in here.scales[-1].kinds] == ["1 x A10 TP=1"], "1 request/s, 30 % above"
    for _ in range(6):
        here.interval(60)
    assert {each.key: each.replicas for each in here.scales[-1].kinds} == {("H100", 2, 1): 1}
    beside = next(each for each in here.scales if ("H100", 2, 1) in {kind.key for kind in each.kinds})
    assert beside.replicas > 1, "both, until the large one serves"
    status = here.manager.status("m")
    assert status is not None
    assert status.cost_per_hour == 3.0
    assert status.kinds == (KindReplicas(1, "H100", 2),)
    assert "1 x H100 TP=2 sustain 9 for 3 an hour" in status.why
    wanted = len(here.scales)
    for _ in range(5):
        here.interval(60)
    assert len(here.scales) == wanted, "no to and fro"


def test_another_leader_goes_on_with_the_kinds_that_stand() -> None:
    here = Planner(MIXED)
    stands = (KindReplicas(3, "A10"),)
    here.serving = 3
    here.manager.handle(Adopted("m", 3, stands), here.now_s)
    here.interval(10)
    assert not here.scales, "kept until they were not needed for long"
    while len(here.scales) < 1 and here.now_s < 200:
        here.interval(10)
    assert here.scales[-1].kinds == (KindReplicas(1, "A10"),)


def test_what_a_replica_sustains_is_learnt_from_what_it_was_seen_to() -> None:
    seen = SeenCapacity()
    seen.saw(2.0, kept=True)
    assert seen.capacity_per_s == 3.0
    seen.saw(4.0, kept=False)
    assert seen.capacity_per_s == pytest.approx(3.6)
    seen.saw(1.5, kept=False)
    seen.validate()
    assert seen.capacity_per_s == pytest.approx(1.35)
    here = Planner(msgspec.structs.replace(POLICY, capacity_per_s=None))
    here.interval(20)
    here.interval(60, kept=30)
    here.interval(60, kept=30)
    assert here.serving >= 2, "half of them missed the SLO at 6 requests/s on one"


def test_capacity_of_a_curve_is_where_the_share_is_crossed() -> None:
    curve = CapacityCurve((1.0, 2.0, 3.0), (1.0, 0.99, 0.5), (1.0, 2.0, 3.0), 2.5)
    assert curve.capacity_per_s(0.99) == 2.0
    assert 2.0 < curve.capacity_per_s(0.98) < 2.1
    assert curve.share_at(5.0) == 0.0
    here = Planner(msgspec.structs.replace(POLICY, capacity_per_s=None))
    here.manager.handle(CapacityKnown("m", curve), 0)
    here.interval(100)
    assert here.serving == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttft_ms": None},
        {"share": 1.0},
        {"minimum": 11},
        {"quantile": 0.2},
        {"price_per_hour": 1.0, "budget_per_hour": 0.5},
        {"cold_start_s": 0.0},
        {"interval_s": 0.0},
        {"kinds": MIXED.kinds},
        {"kinds": MIXED.kinds * 2, "capacity_per_s": None},
        {"kinds": MIXED.kinds[1:], "capacity_per_s": None, "minimum": 2},
        {"kinds": (ReplicaKind(0.0, 1.0),), "capacity_per_s": None},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        msgspec.structs.replace(POLICY, **wrong).checked()


EVENTS = st.one_of(
    st.builds(Observed, st.just("m"), st.integers(0, 400), st.integers(0, 400), st.integers(0, 400), st.integers(0, 9)),
    st.builds(Seen, st.just("m"), st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9))),
    st.builds(Adopted, st.just("m"), st.integers(0, 10)),
    st.builds(Refused, st.just("m"), st.sampled_from(["", "no GPUs"])),
    st.builds(Led, st.booleans()),
    st.just(Tick()),
    st.builds(
        PolicySet,
        st.just("m"),
        st.sampled_from(
            [None, POLICY, MIXED, msgspec.structs.replace(POLICY, minimum=0, capacity_per_s=None, maximum=4)]
        ),
    ),
)


@given(st.lists(st.tuples(st.floats(0, 40), EVENTS), max_size=60))
def test_whatever_happens_only_a_leader_scales_and_within_the_bounds(
    story: list[tuple[float, Observed | Seen | Adopted | Refused | Led | Tick | PolicySet]],
) -> None:
    manager, now_s, leads, policy = AutoscaleManager(), 0.0, False, None
    for pause_s, event in story:
        now_s += pause_s
        if isinstance(event, Led):
            leads = event.is_leading
        if isinstance(event, PolicySet):
            policy = event.policy
        for each in manager.handle(event, now_s):
            if isinstance(each, Scale):
                assert leads
                assert policy is not None
                assert policy.minimum <= each.replicas <= policy.most
        manager.validate()
