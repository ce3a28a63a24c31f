"""The rescheduler above its decisions: what is void, what is not ordered, and what is told of balances."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import decode_load, load_of
from controlplane.policies.rescheduling.manager import (
    BalanceChanged,
    Configured,
    Decide,
    Decided,
    FallbackChanged,
    GiveOrder,
    IntervalPassed,
    OrderEnded,
    ReschedulingInstruction,
    ReschedulingManager,
)
from controlplane.policies.rescheduling.migrations import UNSEEN_S
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.problem import Idle
from controlplane.policies.rescheduling.switch import ReschedulerSwitch
from controlplane.policies.rescheduling.view import InstanceReport, ModelReport, decode_view
from mesh.errors import IllegalTransition
from tests.examples import examples

PARAMETERS = ReschedulerParameters()
ALIVE = frozenset("abc")


def report(instance_id: str, *contexts: int, frontend_id: str = "", refusal: str = "") -> InstanceReport:
    running = [
        RunningRequest(f"{instance_id}{number}", tokens, 1, None, frontend_id) for number, tokens in enumerate(contexts)
    ]
    load = decode_load(running, PARAMETERS.horizon)
    return InstanceReport(instance_id, 16_000, 10.0, load, 1.0, refusal)


def model(*reports: InstanceReport, **unreachable: str) -> dict[str, ModelReport]:
    cut = {frontend_id: frozenset(instances) for frontend_id, instances in unreachable.items()}
    return {"m": ModelReport(reports, cut)}


CROWDED = model(report("a", 300, 200), report("b", 10), report("c", 20))


def manager(max_in_flight: int = 8) -> ReschedulingManager:
    made = ReschedulingManager(ReschedulerMode.CURRENT, max_in_flight, 10)
    made.handle(Configured(ReschedulerMode.CURRENT, PARAMETERS), 0.0)
    return made


def begin(manager: ReschedulingManager, models: dict[str, ModelReport] | None = None, now_s: float = 1.0) -> Decide:
    (decide,) = manager.handle(IntervalPassed(CROWDED if models is None else models), now_s)
    assert isinstance(decide, Decide)
    manager.validate()
    return decide


def end(
    manager: ReschedulingManager, decide: Decide, alive: frozenset[str] = ALIVE, may_order: bool = True
) -> tuple[ReschedulingInstruction, ...]:
    told = manager.handle(Decided(decide.decision_id, decide.decide(), alive, may_order), 1.0)
    manager.validate()
    return told


def test_the_leader_orders_and_an_order_ends_once() -> None:
    at = manager()
    decide = begin(at)
    assert decide.model == at.views["m"].model == "m"
    assert [each.instance_id for each in at.views["m"].instances] == ["a", "b", "c"]
    changed, given = at.handle(Decided(decide.decision_id, decide.decide(), ALIVE, unix_ms=77), 1.5)
    assert changed == BalanceChanged("m", at.balances["m"])
    assert isinstance(given, GiveOrder)
    assert given.ordered.order.source_instance_id == "a"
    assert (given.ordered.ordered_s, given.ordered.ordered_unix_ms) == (1.5, 77)
    assert at.migrations.in_flight == 1
    assert at.handle(OrderEnded(given.ordered, True, "well", 3.0), 2.0) == ()
    at.validate()
    assert (given.ordered.message, given.ordered.paused_ms, given.ordered.duration_ms) == ("well", 3.0, 500.0)
    assert (at.migrations.in_flight, at.migrations.moved_total) == (0, 1)
    with pytest.raises(IllegalTransition):
        at.handle(OrderEnded(given.ordered, True), 3.0)


def test_one_that_was_made_to_be_off_decides_nothing() -> None:
    at = ReschedulingManager(ReschedulerMode.OFF, 8, 10)
    assert at.handle(IntervalPassed(CROWDED), 1.0) == ()
    assert at.views == {}


def test_it_decides_as_it_was_made_and_remembers_no_more_than_it_may() -> None:
    at = ReschedulingManager(ReschedulerMode.CURRENT, 8, 1)
    for now_s in (1.0, 2.0):
        told = end(at, begin(at, now_s=now_s))
    (last,) = [each.ordered for each in told if isinstance(each, GiveOrder)]
    assert at.migrations.latest(5) == [last]


def test_what_has_moved_counts_at_its_target_until_both_sides_have_told() -> None:
    at = manager()
    _, given = end(at, begin(at))
    assert isinstance(given, GiveOrder)
    at.handle(OrderEnded(given.ordered, True), 0.5)
    assert begin(at, now_s=2.0).moving == (), "both have told at 1.0"
    at = manager()
    _, given = end(at, begin(at))
    assert isinstance(given, GiveOrder)
    at.handle(OrderEnded(given.ordered, True), 1.0)
    assert begin(at, now_s=2.0).moving == (given.ordered.order,)
    *_, decide = at.handle(IntervalPassed(CROWDED), 12.0)
    assert isinstance(decide, Decide)
    assert decide.moving == (), "long taken for granted"


def test_what_could_not_be_moved_is_held_and_who_refuses_again_is_left_alone() -> None:
    at = manager()
    for refusals in (1, 2):
        _, given = end(at, begin(at, now_s=1.0))
        assert isinstance(given, GiveOrder)
        assert given.ordered.order.target_instance_id == "b"
        at.handle(OrderEnded(given.ordered, False, "no room"), 1.0)
        assert len(begin(at, now_s=1.0).held) == refusals
        may_receive = {each.instance_id: each.may_receive for each in at.views["m"].instances}
        assert may_receive == {"a": True, "b": refusals < 2, "c": True}


@given(st.lists(st.lists(st.integers(1, 400), min_size=6, max_size=6), min_size=1, max_size=30), st.data())
def test_no_request_is_passed_to_and_fro(loads: list[list[int]], data: st.DataObject) -> None:
    """However the contexts of six requests change, in whichever order moves end and are told of, and whoever of them is
    in no report for a while."""
    at, now_s = manager(), 0.0
    places, been = {f"r{number}": "abc"[number % 3] for number in range(6)}, dict[str, set[str]]()
    for contexts in loads:
        now_s += 1.0
        running: dict[str, list[RunningRequest]] = {each: [] for each in "abc"}
        for (request_id, place), tokens in zip(places.items(), contexts, strict=True):
            if tokens % 4 == 0:
                continue  # preempted, or its move has ended before the target's report was made
            running[place].append(RunningRequest(request_id, tokens, 1, None))
        reports = (
            InstanceReport(each, 16_000, 10.0, decode_load(running[each], PARAMETERS.horizon), now_s) for each in "abc"
        )
        (decide,) = (each for each in at.handle(IntervalPassed(model(*reports)), now_s) if isinstance(each, Decide))
        for given_ in at.handle(Decided(decide.decision_id, decide.decide(), ALIVE), now_s):
            if not isinstance(given_, GiveOrder):
                continue
            order = given_.ordered.order
            assert order.target_instance_id not in been.setdefault(order.request_id, set())
            moved = data.draw(st.booleans())
            if moved:
                been[order.request_id].add(order.source_instance_id)
                places[order.request_id] = order.target_instance_id
            at.handle(OrderEnded(given_.ordered, moved), now_s + data.draw(st.sampled_from([0.0, 0.5])))
        at.validate()


@pytest.mark.parametrize("ended_s", [0.5, 1.5])
def test_where_a_request_was_is_forgotten_when_no_report_has_named_it_for_long(ended_s: float) -> None:
    """Before and after both sides have reported since the move: a report may be older than the move and come later."""
    at = manager()

    def left_at(now_s: float, models: dict[str, ModelReport]) -> Mapping[str, frozenset[str]]:
        (decide,) = (each for each in at.handle(IntervalPassed(models), now_s) if isinstance(each, Decide))
        at.validate()
        return decide.left

    nothing = model(report("a"), report("b"), report("c"))
    *_, given_ = end(at, begin(at))
    assert isinstance(given_, GiveOrder)
    left = {given_.ordered.order.request_id: frozenset("a")}
    at.handle(OrderEnded(given_.ordered, True), ended_s)
    seen_s = 2.0
    assert left_at(seen_s, CROWDED) == left
    assert left_at(seen_s + UNSEEN_S / 2, nothing) == left, "it may not be told of yet"
    seen_s += UNSEEN_S / 2 + 1
    assert left_at(seen_s, CROWDED) == left, "it is told of again"
    assert left_at(seen_s + UNSEEN_S, nothing) == left
    assert left_at(seen_s + UNSEEN_S + 1, nothing) == {}


def test_why_nothing_is_moved_is_told_until_something_is() -> None:
    at = manager()
    even = model(report("a", 100), report("b", 100), report("c", 100))
    end(at, begin(at, even))
    assert at.idle == {"m": Idle.BALANCED}
    end(at, begin(at))
    assert at.idle == {}
    end(at, begin(at, even, now_s=2.0))
    assert at.idle == {"m": Idle.BALANCED}
    at.handle(IntervalPassed({}), 3.0)
    at.validate()
    assert at.idle == {}


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 4000), max_size=5), st.none() | st.integers(0, 2)), min_size=1, max_size=7
    ),
    st.sampled_from([ReschedulerMode.CURRENT, ReschedulerMode.TRAJECTORIES]),
    st.integers(1, 4),
)
def test_requests_are_moved_within_their_stage_as_if_there_were_no_other(
    cluster: list[tuple[list[int], int | None]], mode: ReschedulerMode, most: int
) -> None:
    parameters = ReschedulerParameters(migration_fixed_ms=1.0, floor_ms=1.0, migrations=most)
    switch = ReschedulerSwitch(mode)
    switch.configure(mode, parameters)
    reports = [
        replace(_predicted(report(f"i{number}", *contexts)), stage=stage)
        for number, (contexts, stage) in enumerate(cluster)
    ]
    view = decode_view("m", reports, parameters, frozenset(), 1.0)
    decider, _ = switch.rescheduler(view)
    stages = {each.instance_id: each.stage for each in view.instances}
    decided = Decide(1, "m", decider, view.instances, (), frozenset(), {}, {}).decide()
    alone = [decider.decide([each for each in view.instances if each.stage == stage]) for stage in set(stages.values())]
    assert all(stages[each.source_instance_id] == stages[each.target_instance_id] for each in decided.orders)
    assert sorted(decided.gains) == sorted(sorted(gain for each in alone for gain in each.gains)[-most:])
    assert set(decided.orders) <= {order for each in alone for order in each.orders}
    assert (decided.idle is None) == bool(decided.orders)
    assert decided.balance is not None
    held = [each.context_tokens.sum() for each in (instance.load for instance in view.instances)]
    assert decided.balance.mean_tokens == pytest.approx(np.mean(held))


def _predicted(of: InstanceReport) -> InstanceReport:
    assert of.load is not None
    remaining = np.full(len(of.load.request_ids), 3000)
    return replace(of, load=load_of(of.load.request_ids, of.load.context_tokens, remaining, PARAMETERS.horizon))


def test_a_model_that_goes_before_anything_was_decided_takes_nothing_back() -> None:
    at = manager()
    begin(at)
    assert at.handle(IntervalPassed({}), 2.0) == ()
    drained = model(*(report(each, refusal="it drains") for each in "abc"))
    *_, decide = at.handle(IntervalPassed(drained), 3.0)
    assert isinstance(decide, Decide)
    assert end(at, decide) == ()


def test_an_order_whose_source_has_gone_keeps_none_of_the_others_back() -> None:
    at = manager()
    at.handle(Configured(ReschedulerMode.CURRENT, ReschedulerParameters(migrations=2)), 0.0)
    models = model(report("a", 900, 800), report("b", 500, 400), report("c"), report("d"))
    told = end(at, begin(at, models), alive=frozenset("bcd"))
    assert [each.ordered.order.source_instance_id for each in told if isinstance(each, GiveOrder)] == ["b"]


def test_who_does_not_lead_only_looks() -> None:
    at = manager()
    assert [type(each) for each in end(at, begin(at), may_order=False)] == [BalanceChanged]
    assert at.migrations.in_flight == 0


def test_a_source_that_went_while_it_was_decided_is_given_no_order() -> None:
    at = manager()
    assert [type(each) for each in end(at, begin(at), alive=frozenset("bc"))] == [BalanceChanged]


def test_no_more_orders_than_may_be_under_way() -> None:
    at = manager(max_in_flight=1)
    assert len(end(at, begin(at))) == 2
    assert [type(each) for each in end(at, begin(at, now_s=2.0))] == [BalanceChanged]


@pytest.mark.parametrize("other", [ReschedulerMode.OFF, ReschedulerMode.PREDICTED])
def test_what_another_configuration_decided_is_void(other: ReschedulerMode) -> None:
    at = manager()
    decide = begin(at)
    at.handle(Configured(other, PARAMETERS), 1.0)
    assert end(at, decide) == ()
    assert (at.views, at.balances) == ({}, {})


def test_the_same_configuration_again_voids_nothing() -> None:
    at = manager()
    decide = begin(at)
    at.handle(Configured(ReschedulerMode.CURRENT, PARAMETERS), 1.0)
    assert len(end(at, decide)) == 2


def test_a_decision_that_took_longer_than_an_interval_is_void() -> None:
    at = manager()
    late = begin(at)
    decide = begin(at, now_s=2.0)
    assert end(at, late) == ()
    assert len(end(at, decide)) == 2


def test_balances_that_cannot_be_compared_any_more_are_taken_back() -> None:
    at = manager()
    end(at, begin(at), may_order=False)
    drained = model(*(report(each, refusal="it drains") for each in "abc"))
    fallback, decide = at.handle(IntervalPassed(drained), 2.0)
    assert isinstance(fallback, FallbackChanged)
    assert fallback.fallback is not None
    assert isinstance(decide, Decide)
    assert end(at, decide) == (BalanceChanged("m", None),)
    back, decide = at.handle(IntervalPassed(CROWDED), 3.0)
    assert back == FallbackChanged("m", None)
    assert isinstance(decide, Decide)
    end(at, decide, may_order=False)
    assert at.handle(IntervalPassed({}), 4.0) == (BalanceChanged("m", None),), "nobody serves the model any more"
    assert at.views == {}
    at.validate()


def test_nothing_is_moved_to_where_its_frontend_has_no_stream() -> None:
    at = manager()
    models = model(report("a", 300, 200, frontend_id="f"), report("b"), report("c", 100), f="b", g="c")
    told = end(at, begin(at, models))
    assert [each.ordered.order.target_instance_id for each in told if isinstance(each, GiveOrder)] == ["c"]
    nowhere = model(report("a", 300, 200, frontend_id="f"), report("b"), report("c", 100), f="bc")
    at = manager()
    assert not any(isinstance(each, GiveOrder) for each in end(at, begin(at, nowhere)))
