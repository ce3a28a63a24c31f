"""The rescheduler above its decisions: what is void, what is not ordered, and what is told of balances."""

import pytest

from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import decode_load
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
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.view import InstanceReport, ModelReport
from mesh.errors import IllegalTransition

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
    changed, given = end(at, begin(at))
    assert isinstance(changed, BalanceChanged)
    assert isinstance(given, GiveOrder)
    assert given.ordered.order.source_instance_id == "a"
    assert at.migrations.in_flight == 1
    assert at.handle(OrderEnded(given.ordered, True), 2.0) == ()
    at.validate()
    assert (at.migrations.in_flight, at.migrations.moved_total) == (0, 1)
    with pytest.raises(IllegalTransition):
        at.handle(OrderEnded(given.ordered, True), 3.0)


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
