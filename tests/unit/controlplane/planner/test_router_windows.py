"""Windows of several cascade routers, added up."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.planner.cascade.routers import MAX_ROUTERS, RouterWindows
from controlplane.planning.cascade.observed import ObservedWindow
from controlplane.planning.cascade.workload import WorkloadRequest

WINDOW_S = 300.0


def of(rate_per_s: float, requests: int = 1, seconds: float | None = WINDOW_S) -> ObservedWindow:
    return ObservedWindow(rate_per_s, seconds, (WorkloadRequest(10, (3, 4), (50.0, 90.0)),) * requests)


def test_one_router_is_a_round_of_its_own() -> None:
    routers = RouterWindows()
    for now_s in (300.0, 600.0):
        assert routers.reported("a", of(2.0), ("a",), now_s) == of(2.0)
    assert routers.reported("", of(2.0, seconds=None), (), 900.0) == of(2.0, seconds=None)


def test_two_routers_report_once_a_round_and_their_rates_are_added() -> None:
    routers, rounds = RouterWindows(), []
    for turn in range(3):
        assert routers.reported("a", of(2.0), ("a", "b"), 300.0 * turn) is None
        assert routers.waiting_for == ("b",)
        rounds.append(routers.reported("b", of(3.0, 2), ("a", "b"), 300.0 * turn + 100))
    assert rounds == [of(5.0, 3)] * 3


def test_a_router_that_is_late_is_waited_for_and_forgotten_after_two_windows() -> None:
    routers = RouterWindows()
    assert routers.reported("a", of(2.0), ("a", "b"), 0.0) is None
    assert routers.reported("a", of(4.0), ("a", "b"), 300.0) is None
    assert routers.reported("a", of(5.0), ("a", "b"), 600.0) == of(5.0), "b, if it is there, samples nothing"
    assert routers.reported("a", of(5.0), ("a", "b"), 900.0) == of(5.0)
    assert routers.reported("b", of(1.0), ("a", "b"), 1000.0) is None, "there it is again"
    assert routers.reported("a", of(5.0), ("a", "b"), 1200.0) == of(6.0, 2)


def test_a_router_that_has_left_the_mesh_is_not_waited_for() -> None:
    routers = RouterWindows()
    routers.reported("a", of(2.0), ("a", "b"), 0.0)
    routers.reported("b", of(2.0), ("a", "b"), 10.0)
    assert routers.reported("a", of(4.0), ("a",), 300.0) == of(4.0)


def test_made_up_names_are_bounded() -> None:
    routers = RouterWindows()
    for number in range(2 * MAX_ROUTERS):
        routers.reported(f"router-{number}", of(1.0), ("a", "z"), 0.0)
    assert len(routers._routers) <= MAX_ROUTERS


@given(
    turns=st.lists(st.sampled_from("abc"), min_size=1, max_size=60),
    announced=st.sets(st.sampled_from("abc"), max_size=3),
)
def test_no_router_counts_twice_in_a_round(turns: list[str], announced: set[str]) -> None:
    routers = RouterWindows()
    for turn, name in enumerate(turns):
        made = routers.reported(name, of(1.0), announced, 100.0 * turn)
        assert made is None or 1.0 <= made.rate_per_s <= 3.0
        assert (made is None) == bool(routers.waiting_for)
