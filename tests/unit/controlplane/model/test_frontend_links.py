from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.frontend_links import FrontendLinks
from tests.unit.controlplane.builders import instance

NAMES = st.frozensets(st.sampled_from("abcde"))
STEPS = st.lists(st.one_of(st.tuples(st.just("report"), NAMES), st.tuples(st.just("instances"), NAMES)), max_size=20)


@given(STEPS)
def test_whatever_the_order_of_reports_and_changes_what_is_not_connected_is_unreachable(
    steps: list[tuple[str, frozenset[str]]],
) -> None:
    links = FrontendLinks()
    connected: frozenset[str] | None = None
    instances = tuple(instance(name) for name in "abc")
    for step, names in steps:
        if step == "report":
            connected = names
            links.report((name, "1") for name in names)
        else:
            instances = tuple(instance(name) for name in sorted(names))
        there = {each.instance_id for each in instances}
        for _ in range(2):
            expected = frozenset() if connected is None else there - connected
            assert links.unreachable("m", instances) == expected


def test_another_incarnation_of_a_connected_worker_can_be_reached() -> None:
    links = FrontendLinks()
    links.report([("a", "2")])
    assert links.unreachable("m", (instance("a", "1"),)) == frozenset()
