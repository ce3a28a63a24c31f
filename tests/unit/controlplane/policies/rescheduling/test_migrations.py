"""Orders from the moment they are given."""

import pytest

from controlplane.model.migration_order import MigrationOrder
from controlplane.policies.rescheduling.migrations import (
    FIRST_HOLD_S,
    LONGEST_HOLD_S,
    UNSETTLED_S,
    Migrations,
    OrderOutcome,
)
from mesh.errors import IllegalTransition


def order(request_id: str = "r", source: str = "a", target: str = "b") -> MigrationOrder:
    return MigrationOrder(request_id, source, target, "test")


def end(migrations: Migrations, ordered, *, moved: bool, now_s: float) -> None:  # type: ignore[no-untyped-def]
    migrations.end(ordered, moved=moved, message="" if moved else "no room", paused_ms=3.0, now_s=now_s)


def test_an_order_counts_until_both_sides_have_reported_its_end() -> None:
    migrations = Migrations(2, 10)
    ordered = migrations.begin(order(), 10.0, 1)
    assert (migrations.in_flight, ordered.ordered_unix_ms) == (1, 1)
    heard = {"a": 10.5, "b": 10.5}
    migrations.settle(heard.get, 10.6)
    assert migrations.moving() == (ordered.order,)
    end(migrations, ordered, moved=True, now_s=11.0)
    assert (ordered.outcome, ordered.duration_ms) == (OrderOutcome.MOVED, 1000.0)
    assert migrations.in_flight == 0
    heard["a"] = 11.5
    migrations.settle(heard.get, 11.6)
    assert migrations.moving() == (ordered.order,), "the target has not reported since"
    heard["b"] = 11.0
    migrations.settle(heard.get, 11.6)
    assert migrations.moving() == (ordered.order,), "this report may be from before"
    heard["b"] = 11.7
    migrations.settle(heard.get, 11.8)
    assert migrations.moving() == ()


def test_an_order_that_is_under_way_keeps_none_from_being_settled() -> None:
    migrations = Migrations(2, 10)
    under_way = migrations.begin(order("r1"), 0.0, 1)
    end(migrations, migrations.begin(order("r2"), 0.0, 1), moved=True, now_s=1.0)
    migrations.settle({"a": 1.5, "b": 1.5}.get, 1.6)
    assert migrations.moving() == (under_way.order,)


def test_an_end_that_is_never_confirmed_is_taken_for_confirmed() -> None:
    migrations = Migrations(2, 10)
    end(migrations, migrations.begin(order(), 0.0, 1), moved=True, now_s=1.0)
    migrations.settle(lambda _: 0.5, 1.0 + UNSETTLED_S)
    assert len(migrations.moving()) == 1
    migrations.settle(lambda _: 0.5, 1.1 + UNSETTLED_S)
    assert migrations.moving() == ()


def test_sides_that_are_gone_need_not_confirm() -> None:
    migrations = Migrations(2, 10)
    end(migrations, migrations.begin(order(), 0.0, 1), moved=True, now_s=1.0)
    migrations.settle({"a": 1.5}.get, 1.6)
    assert migrations.moving() == ()


def test_a_request_that_stayed_waits_twice_as_long_each_time() -> None:
    migrations, now_s, held_s = Migrations(2, 10), 0.0, []
    for _ in range(9):
        ordered = migrations.begin(order(target=f"t{now_s}"), now_s, 1)
        end(migrations, ordered, moved=False, now_s=now_s)
        assert (ordered.outcome, ordered.message) == (OrderOutcome.STAYED, "no room")
        assert migrations.moving() == ()
        began_s = now_s
        while migrations.held_requests(now_s):
            now_s += FIRST_HOLD_S / 2
        held_s.append(now_s - began_s)
    assert held_s[:3] == [FIRST_HOLD_S, 2 * FIRST_HOLD_S, 4 * FIRST_HOLD_S]
    assert held_s[-1] == LONGEST_HOLD_S
    migrations.settle(lambda _: None, now_s + LONGEST_HOLD_S + 1)
    end(migrations, migrations.begin(order(), now_s, 1), moved=False, now_s=now_s)
    assert not migrations.held_requests(now_s + FIRST_HOLD_S), "long forgotten"


@pytest.mark.parametrize(
    ("later_s", "held_s"), [(LONGEST_HOLD_S, 2 * FIRST_HOLD_S), (LONGEST_HOLD_S + 1, FIRST_HOLD_S)]
)
def test_a_refusal_is_remembered_for_a_while_after_the_wait(later_s: float, held_s: float) -> None:
    migrations = Migrations(2, 10)
    end(migrations, migrations.begin(order(), 0.0, 1), moved=False, now_s=0.0)
    now_s = FIRST_HOLD_S + later_s
    migrations.settle(lambda _: None, now_s)
    end(migrations, migrations.begin(order(), now_s, 1), moved=False, now_s=now_s)
    assert migrations.held_requests(now_s + held_s - 0.1) == {"r"}
    assert migrations.held_requests(now_s + held_s) == frozenset()


def test_a_request_that_has_moved_waits_no_longer() -> None:
    migrations = Migrations(2, 10)
    end(migrations, migrations.begin(order(), 0.0, 1), moved=False, now_s=0.0)
    assert migrations.held_requests(1.0) == {"r"}
    end(migrations, migrations.begin(order(target="c"), 1.0, 1), moved=True, now_s=1.0)
    assert migrations.held_requests(1.0) == frozenset()


def test_a_target_is_left_alone_when_it_refuses_again() -> None:
    migrations = Migrations(2, 10)
    end(migrations, migrations.begin(order("r1"), 0.0, 1), moved=False, now_s=0.0)
    assert migrations.shunned_targets(0.1) == frozenset()
    end(migrations, migrations.begin(order("r2"), 0.1, 1), moved=False, now_s=0.1)
    until_s = 0.1 + 2 * FIRST_HOLD_S
    assert migrations.shunned_targets(until_s - 0.1) == {"b"}
    assert migrations.shunned_targets(until_s) == frozenset()
    for request_id in ("r3", "r4"):
        end(migrations, migrations.begin(order(request_id), 0.2, 1), moved=True, now_s=0.3)
    assert migrations.shunned_targets(0.4) == frozenset()
    assert (migrations.moved_total, migrations.stayed_total) == (2, 2)


def test_what_there_is_no_room_for_cannot_begin() -> None:
    migrations = Migrations(2, 10)
    migrations.begin(order("r1"), 0.0, 1)
    with pytest.raises(IllegalTransition, match="one of them of this request"):
        migrations.begin(order("r1"), 0.0, 1)
    ordered = migrations.begin(order("r2"), 0.0, 1)
    assert migrations.room == 0
    with pytest.raises(IllegalTransition, match="2 of 2"):
        migrations.begin(order("r3"), 0.0, 1)
    end(migrations, ordered, moved=False, now_s=1.0)
    with pytest.raises(IllegalTransition, match="before"):
        end(migrations, ordered, moved=False, now_s=1.0)


def test_orders_are_remembered_by_client_request_and_bounded() -> None:
    migrations = Migrations(100, 3)
    for number in range(4):
        migrations.begin(order(f"req-{number}"), 0.0, number)
    migrations.begin(order("request"), 0.0, 9)
    assert [each.order.request_id for each in migrations.latest(2)] == ["request", "req-3"]
    assert [each.order.request_id for each in migrations.of_request("req")] == ["req-2", "req-3"]
    assert [each.order.request_id for each in migrations.of_request("req-3")] == ["req-3"]
