"""The vectorised rescheduler decides what Algorithm 1 says, and what the shell around it needs."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from controlplane.model.migration_order import MigrationOrder
from controlplane.model.running_request import RunningRequest
from controlplane.model.step_costs import StepCosts
from controlplane.policies.rescheduling.decode_load import UNKNOWN, DecodeLoad, decode_load, load_of
from controlplane.policies.rescheduling.parameters import Horizon, ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.problem import Balance, DecodeInstance, Idle, Rescheduling
from controlplane.policies.rescheduling.rescheduler import UNKNOWN_STEPS, Rescheduler
from controlplane.policies.rescheduling.view import InstanceReport, decode_view
from tests.examples import examples
from tests.unit.controlplane.policies.rescheduling.naive_rescheduler import NaiveInstance, NaiveRescheduler

PREDICTED, CURRENT, OFF = ReschedulerMode.PREDICTED, ReschedulerMode.CURRENT, ReschedulerMode.OFF
SMALL = ReschedulerParameters(horizon_steps=4, stride_tokens=10, migration_fixed_ms=5.0)


def told(instance: NaiveInstance, parameters: ReschedulerParameters) -> DecodeInstance:
    """As the worker would report it."""
    load = decode_load(instance.requests, parameters.horizon)
    return DecodeInstance(instance.instance_id, instance.capacity_tokens, instance.step_ms, instance.may_receive, load)


def instance(
    name: str, *requests: tuple[int, int | None], capacity: int = 10_000, receives: bool = True
) -> NaiveInstance:
    """Requests as (context, remaining)."""
    running = tuple(RunningRequest(f"{name}{n}", context, 0, left) for n, (context, left) in enumerate(requests))
    return NaiveInstance(name, capacity, 1.0, receives, running)


def decide(mode: ReschedulerMode, *instances: NaiveInstance, parameters: ReschedulerParameters = SMALL, moving=()):
    return Rescheduler(mode, parameters).decide([told(each, parameters) for each in instances], moving)


def moves(*args, **kwargs) -> list[tuple[str, str, str]]:
    orders = decide(*args, **kwargs).orders
    return [(order.request_id, order.source_instance_id, order.target_instance_id) for order in orders]


requests_strategy = st.lists(st.tuples(st.integers(1, 200), st.none() | st.integers(0, 60)), max_size=6)
parameters_strategy = st.builds(
    ReschedulerParameters,
    theta=st.sampled_from([0.0, 0.1, 0.5]),
    horizon_steps=st.integers(1, 6),
    stride_tokens=st.integers(1, 20),
    decay=st.sampled_from([0.5, 0.9, 1.0]),
    migration_fixed_ms=st.sampled_from([0.0, 5.0, 20.0]),
    migration_token_us=st.sampled_from([0.0, 20.0, 200.0]),
    memory_fraction=st.sampled_from([0.5, 1.0]),
)


@st.composite
def clusters(draw: st.DrawFn) -> list[NaiveInstance]:
    return [
        replace(
            instance(
                f"i{number}-",
                *draw(requests_strategy),
                capacity=draw(st.integers(100, 1500)),
                receives=draw(st.booleans()),
            ),
            step_ms=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        )
        for number in range(draw(st.integers(1, 6)))
    ]


@settings(max_examples=examples(300), deadline=None)
@given(clusters(), parameters_strategy, st.booleans())
def test_it_decides_what_the_printed_algorithm_decides(
    cluster: list[NaiveInstance], parameters: ReschedulerParameters, predicts: bool
) -> None:
    naive = NaiveRescheduler(parameters, predicts=predicts)
    assume(not naive.is_on_the_edge(cluster))
    printed = naive.moves(cluster)
    decided = decide(PREDICTED if predicts else CURRENT, *cluster, parameters=parameters)
    # What is worth less than rounding errors may be seen by one of the two alone.
    noise = 1e-9 * max([1.0, *(move.gain for move in printed)]) + 1e-6
    if not decided.orders:
        assert not printed or printed[0].gain < noise
        return
    (order,), (gain,) = decided.orders, decided.gains
    assert gain == pytest.approx(printed[0].gain if printed else 0.0, rel=1e-9, abs=noise)
    if gain > noise:
        feasible = {(move.request_id, move.source, move.target): move.gain for move in printed}
        key = (order.request_id, order.source_instance_id, order.target_instance_id)
        assert feasible[key] == pytest.approx(gain, rel=1e-9, abs=noise)


@settings(max_examples=examples(100), deadline=None)
@given(clusters(), parameters_strategy, st.integers(2, 4))
def test_several_orders_share_no_instance_and_lower_the_variance_together(
    cluster: list[NaiveInstance], parameters: ReschedulerParameters, most: int
) -> None:
    parameters = ReschedulerParameters(**{**parameters.values(), "migrations": most})
    decided = decide(CURRENT, *cluster, parameters=parameters)
    touched = [each for order in decided.orders for each in (order.source_instance_id, order.target_instance_id)]
    assert len(touched) == len(set(touched)) <= 2 * most
    after = {each.instance_id: list(each.requests) for each in cluster}
    for order in decided.orders:
        (moved,) = [each for each in after[order.source_instance_id] if each.request_id == order.request_id]
        after[order.source_instance_id].remove(moved)
        after[order.target_instance_id].append(moved)
    settled = decide(CURRENT, *(replace(each, requests=tuple(after[each.instance_id])) for each in cluster))
    before = decide(CURRENT, *cluster)
    assert settled.balance is not None
    assert before.balance is not None
    assert settled.balance.variance == pytest.approx(before.balance.variance - sum(decided.gains), abs=1e-6, rel=1e-9)


def test_the_future_decides_where_the_present_is_even() -> None:
    lasting = instance("long", (10, 60), (10, 60), (10, 60), (10, 60))
    ending = instance("short", (40, 8))
    assert moves(CURRENT, lasting, ending) == []
    assert moves(PREDICTED, lasting, ending) == [("long0", "long", "short")]


def test_overload_that_is_about_to_end_moves_nothing() -> None:
    crowded = instance("crowded", (300, 9), (300, 9), (100, 40))
    calm = instance("calm", (100, 40))
    assert moves(CURRENT, crowded, calm) != []
    assert moves(PREDICTED, crowded, calm) == []


def test_a_request_about_to_end_is_not_worth_its_migration() -> None:
    crowded = instance("crowded", (200, 45), (200, 45))
    calm = instance("calm")
    slow = ReschedulerParameters(**{**SMALL.values(), "migration_fixed_ms": 45.0})
    assert len(moves(PREDICTED, crowded, calm)) == 1
    assert moves(PREDICTED, crowded, calm, parameters=slow) == []


def test_what_the_target_could_not_hold_to_the_end_is_not_moved() -> None:
    crowded = instance("crowded", (200, 40), (200, 40))
    # 210 at the target now, 270 at the last point before it ends, of which the memory fraction allows 95 %.
    assert moves(PREDICTED, crowded, instance("calm", (10, 60), capacity=305)) != []
    assert moves(PREDICTED, crowded, instance("calm", (10, 60), capacity=280)) == []
    assert moves(CURRENT, crowded, instance("calm", (10, 60), capacity=280)) != []


def test_a_request_without_prediction_counts_but_stays() -> None:
    crowded = instance("crowded", (200, None), (200, None))
    assert moves(PREDICTED, crowded, instance("calm")) == []
    decided = decide(PREDICTED, crowded, instance("calm"))
    assert decided.overloaded == ("crowded",)
    assert decided.candidates == 0
    assert moves(PREDICTED, instance("crowded", (200, None), (200, 60)), instance("calm")) == [
        ("crowded1", "crowded", "calm")
    ]


def test_an_instance_that_may_not_receive_gets_nothing() -> None:
    assert moves(CURRENT, instance("crowded", (200, 9), (200, 9)), instance("calm", receives=False)) == []


def test_a_request_is_moved_that_runs_on_for_longer_than_its_migration_takes() -> None:
    """5 ms and 1 ms for each of 10 tokens, in steps of 1 ms."""
    parameters = ReschedulerParameters(**{**SMALL.values(), "theta": 0.0, "migration_token_us": 1000.0})
    for remaining, moved in ((15, False), (16, True)):
        crowded = instance("crowded", (10, remaining), (10, remaining))
        assert bool(moves(PREDICTED, crowded, instance("calm"), parameters=parameters)) == moved


def test_what_is_held_stays_although_it_would_be_worth_moving() -> None:
    crowded, calm = (told(each, SMALL) for each in (instance("crowded", (200, 40), (300, 40)), instance("calm")))
    for mode in (CURRENT, PREDICTED):
        (order,) = Rescheduler(mode, SMALL).decide([crowded, calm], held={"crowded0"}).orders
        assert order.request_id == "crowded1"


def test_each_target_is_filled_to_its_own_memory_and_no_more() -> None:
    parameters = ReschedulerParameters(**{**SMALL.values(), "memory_fraction": 1.0})
    crowded, wide = instance("crowded", *[(100, 9)] * 3), instance("wide", (90, 9))
    for capacity, target in ((100, "narrow"), (99, "wide")):
        narrow = instance("narrow", capacity=capacity)
        assert moves(CURRENT, crowded, wide, narrow, parameters=parameters) == [("crowded0", "crowded", target)]


def test_the_least_gain_is_one() -> None:
    assert moves(CURRENT, instance("a", (1, 9), (1, 9)), instance("b")) == [("a0", "a", "b")]


@pytest.mark.parametrize("most", [1, 2])
def test_orders_of_one_interval_are_of_different_pairs_the_best_first(most: int) -> None:
    parameters = ReschedulerParameters(**{**SMALL.values(), "migrations": most})
    crowded = (instance("a", (100, 9), (150, 9), (300, 9)), instance("b", (100, 9), (200, 9), (400, 9)))
    calm = (instance("c"), instance("d"))
    expected = [("b2", "b", "c"), ("a2", "a", "d")]
    assert moves(CURRENT, *crowded, *calm, parameters=parameters) == expected[:most]


def test_balance_is_of_the_loads_with_what_moves_at_its_target() -> None:
    crowded, calm = instance("crowded", (100, 9), (100, 9), (100, 9)), instance("calm", (50, 9))
    gone = MigrationOrder("other", "gone", "calm", "test")
    order = MigrationOrder("crowded0", "crowded", "calm", "test")
    decided = decide(CURRENT, crowded, calm, moving=(gone, order))
    assert decided.mode is CURRENT
    assert decided.balance == Balance(175.0, 625.0, 625.0), "200 and 150"
    arrived = replace(calm, requests=(*calm.requests, crowded.requests[0]))
    assert decide(CURRENT, crowded, arrived, moving=(gone, order)).balance == Balance(175.0, 625.0, 625.0)


def test_frontends_that_are_not_named_reach_all_and_nobody_may_be_left_to_move_to() -> None:
    running = [RunningRequest(f"r{n}", 100, 1, 40, frontend_id=frontend) for n, frontend in enumerate("ffh")]
    crowded = DecodeInstance("crowded", 10_000, 1.0, True, decode_load(running, SMALL.horizon))
    calm = told(instance("calm"), SMALL)
    unreachable = {"f": frozenset({"calm"})}
    (order,) = Rescheduler(CURRENT, SMALL).decide([crowded, calm], unreachable=unreachable).orders
    assert order.request_id == "r2"
    closed = told(instance("calm", receives=False), SMALL)
    assert Rescheduler(CURRENT, SMALL).decide([crowded, closed], unreachable=unreachable).orders == ()


@given(st.integers(0, 10_000))
def test_short_answers_are_moved_too(seed: int) -> None:
    """Four instances with 48, 32, 24 and 16 requests, each with some hundred tokens to go, in default parameters."""
    rng = random.Random(seed)
    running = {
        f"i{count}": [
            RunningRequest(f"{count}-{n}", rng.randrange(100, 400), 1, rng.randrange(100, 400)) for n in range(count)
        ]
        for count in (48, 32, 24, 16)
    }
    horizon = ReschedulerParameters().horizon
    reports = [
        InstanceReport(name, 100_000, 20.0, decode_load(requests, horizon), 0.0) for name, requests in running.items()
    ]
    view = decode_view("m", reports, ReschedulerParameters(), frozenset(), 0.0)
    (order,) = Rescheduler(PREDICTED).decide(view.instances).orders
    assert (order.source_instance_id, order.target_instance_id) == ("i48", "i16")


def test_the_horizon_reaches_as_far_as_anything_runs() -> None:
    horizon = Horizon(steps=32, stride_tokens=256)
    assert [horizon.fitted(longest).stride_tokens for longest in (1, 32, 33, 300, 8192, 9000)] == [
        1,
        1,
        2,
        10,
        256,
        256,
    ]
    assert horizon.fitted(0) == horizon, "where nothing is predicted"


def known(name: str, *requests: tuple[int, int | None], cost: float, capacity: int = 10_000) -> DecodeInstance:
    return replace(told(instance(name, *requests, capacity=capacity), SMALL), costs=StepCosts(context_token_ms=cost))


@pytest.mark.parametrize("mode", [CURRENT, PREDICTED])
def test_a_move_that_saves_the_others_less_than_it_takes_is_not_made(mode: ReschedulerMode) -> None:
    """5 ms and 20 us a token: 9 ms for 200 tokens; the other one saves 200 times the cost in each of 40 steps."""
    remaining = 40 if mode is PREDICTED else UNKNOWN_STEPS
    for cost, moved in ((8.9 / 200 / remaining, False), (9.1 / 200 / remaining, True)):
        crowded, calm = (known(name, *requests, cost=cost) for name, requests in (("a", [(200, 40)] * 2), ("b", [])))
        load = crowded.load if mode is PREDICTED else replace_remaining(crowded.load)
        decided = Rescheduler(mode, SMALL).decide([replace(crowded, load=load), calm])
        assert bool(decided.orders) == moved
        assert decided.idle == (None if moved else Idle.NOT_WORTH_IT)


def replace_remaining(load: DecodeLoad) -> DecodeLoad:
    return load_of(load.request_ids, load.context_tokens, np.full_like(load.remaining_tokens, UNKNOWN), load.horizon)


def test_an_instance_that_runs_out_of_memory_is_relieved_whatever_that_saves() -> None:
    for capacity, moved in ((500, False), (420, True)):
        crowded = known("a", (200, 40), (200, 40), cost=0.0, capacity=capacity)
        assert bool(Rescheduler(CURRENT, SMALL).decide([crowded, known("b", cost=0.0)]).orders) == moved


def test_no_request_goes_back_to_where_it_was_moved_from() -> None:
    crowded, calm = told(instance("a", (200, 40), (300, 40)), SMALL), told(instance("b"), SMALL)
    for mode in (CURRENT, PREDICTED):
        (order,) = Rescheduler(mode, SMALL).decide([crowded, calm], left={"a1": frozenset("b")}).orders
        assert order.request_id == "a0"
        both = {"a0": frozenset("b"), "a1": frozenset("b")}
        decided = Rescheduler(mode, SMALL).decide([crowded, calm], left=both)
        assert (decided.orders, decided.idle) == ((), Idle.NO_ROOM)


def test_what_keeps_still_is_named() -> None:
    even = instance("a", (200, 40)), instance("b", (200, 40))
    assert decide(CURRENT, *even).idle is Idle.BALANCED
    assert decide(CURRENT, instance("a", (200, 40), (9, 40)), instance("b", receives=False)).idle is Idle.NO_TARGET
    assert decide(PREDICTED, instance("a", (200, None)), instance("b")).idle is Idle.NOT_WORTH_IT
    assert decide(CURRENT, instance("a", (200, 40), (300, 40)), instance("b", capacity=100)).idle is Idle.NO_ROOM
    assert decide(CURRENT, instance("a", (200, 40)), instance("b")).idle is Idle.NO_GAIN
    assert decide(CURRENT, instance("a", (200, 40), (200, 40)), instance("b")).idle is None


def test_requests_under_way_count_at_their_target_and_stay_alone() -> None:
    crowded, calm = instance("crowded", (200, 40), (200, 40)), instance("calm")
    order = MigrationOrder("crowded0", "crowded", "calm", "test")
    for mode in (CURRENT, PREDICTED):
        assert len(moves(mode, crowded, calm)) == 1
        assert moves(mode, crowded, calm, moving=(order,)) == []
        # The report from the target is newer than the source's.
        assert moves(mode, crowded, instance("calm", (200, 40)), moving=(order,)) == []
        arrived = replace(instance("calm"), requests=(crowded.requests[0],))
        assert moves(mode, crowded, arrived, moving=(order,)) == []


def test_orders_that_are_settled_or_about_instances_gone_change_nothing() -> None:
    crowded, calm = instance("crowded", (200, 40), (200, 40)), instance("calm")
    gone = MigrationOrder("crowded0", "gone", "calm", "test")
    settled = MigrationOrder("other", "crowded", "calm", "test")
    assert moves(CURRENT, crowded, calm, moving=(gone, settled)) in (
        [("crowded0", "crowded", "calm")],
        [("crowded1", "crowded", "calm")],
    )
    lost_target = MigrationOrder("crowded0", "crowded", "lost", "test")
    assert moves(CURRENT, crowded, calm, moving=(lost_target,)) == []


def test_nothing_is_decided_when_off_alone_or_empty() -> None:
    assert decide(OFF, instance("a", (200, 9)), instance("b")) == Rescheduling(OFF, (), (), (), (), 0, None)
    assert decide(CURRENT) == Rescheduling(CURRENT, (), (), (), (), 0, None)
    assert decide(PREDICTED).balance is None
    assert decide(PREDICTED, instance("a", (200, 9))).orders == ()
    assert decide(PREDICTED, instance("a"), instance("b")).orders == ()


def test_who_carries_exactly_as_much_as_it_may_is_not_overloaded() -> None:
    strict = ReschedulerParameters(**{**SMALL.values(), "theta": 0.0})
    decided = decide(CURRENT, instance("a", (200, 9)), instance("b", (200, 9)), parameters=strict)
    assert (decided.overloaded, decided.underloaded) == ((), ())


def test_an_order_says_why() -> None:
    (order,) = decide(CURRENT, instance("crowded", (100, 9), (100, 9), (100, 9)), instance("calm")).orders
    assert order.reason == (
        "current: crowded carries 300 tokens and calm 0, the mean is 150; moving 100 lowers the variance by 88.9 %"
    )


def test_traces_grow_by_a_token_a_step_until_the_requests_end() -> None:
    load = decode_load(
        [RunningRequest("a", 100, 5, 25), RunningRequest("b", 7, 7, None), RunningRequest("c", 50, 1, 0)], SMALL.horizon
    )
    assert load.future_tokens.tolist() == [157, 110 + 17, 120 + 27, 37, 47]
    assert load.tokens == 157
    assert load.predicted_requests == 2
    last = decode_load([RunningRequest("d", 100, 0, 11), RunningRequest("e", 30, 0, 10)], SMALL.horizon)
    assert last.future_tokens.tolist() == [130, 110, 0, 0, 0]
    assert last.frontends == (), "where there are none"
    nothing = decode_load([], SMALL.horizon)
    assert nothing.future_tokens.tolist() == [0] * 5
    assert {each.dtype for each in (nothing.context_tokens, nothing.remaining_tokens)} == {np.dtype(np.int64)}


def test_weights_of_the_horizon_come_to_one() -> None:
    for decay in (0.5, 1.0):
        beta = ReschedulerParameters(decay=decay, horizon_steps=7).beta()
        assert beta.sum() == pytest.approx(1)
        assert beta[1] == pytest.approx(decay * beta[0])
