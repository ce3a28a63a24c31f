"""Where the requests of a drained instance go."""

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.coordinator.drain import assign

TARGETS = ("a", "b", "c")


def test_the_least_loaded_is_filled_first() -> None:
    plan = assign(["1", "2", "3", "4"], {"a": 3, "b": 0, "c": 1}, {})
    assert plan == {"1": "b", "2": "b", "3": "c", "4": "b"}


def test_one_that_refused_is_asked_again_only_when_all_have() -> None:
    assert assign(["1"], {"a": 0, "b": 5}, {"1": frozenset("a")}) == {"1": "b"}
    assert assign(["1"], {"a": 0, "b": 5}, {"1": frozenset("ab")}) == {"1": "a"}


@given(
    loads=st.dictionaries(st.sampled_from(TARGETS), st.integers(0, 20), min_size=1),
    refused=st.dictionaries(st.sampled_from("12345"), st.frozensets(st.sampled_from(TARGETS))),
)
def test_every_request_gets_a_target_that_may_take_it(
    loads: dict[str, int], refused: dict[str, frozenset[str]]
) -> None:
    plan = assign("12345", loads, refused)
    assert set(plan) == set("12345")
    for request_id, target in plan.items():
        unwilling = refused.get(request_id, frozenset())
        assert target not in unwilling or unwilling >= set(loads)
