"""Layouts: coverage of stages that die, refined boundaries, assignment of instances."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.planning.stage_plan import StagePlan
from controlplane.policies.stages.layout import StageLayout, assign
from mesh.errors import ConfigurationError

LAYOUT = StageLayout("m", 1, (("a", "b"), ("c",), ("d", "e")), (100, 1000))


@settings(deadline=None)
@given(st.sets(st.sampled_from("abcde")))
def test_every_length_is_covered_while_anybody_lives(alive: set[str]) -> None:
    covering = LAYOUT.covering(alive)
    if not alive:
        assert covering is None
        return
    assert covering is not None
    assert set(covering.instance_ids) == alive
    for length in (1, 100, 101, 1000, 1001, 50_000):
        planned, now = LAYOUT.stage_of(length), covering.stage_of(length)
        survivors = [each for each in LAYOUT.stages[planned] if each in alive]
        if survivors:
            assert covering.stages[now] == tuple(survivors)


def test_a_dead_stage_is_covered_downstream_and_the_last_one_upstream() -> None:
    assert LAYOUT.covering("abde") == StageLayout("m", 1, (("a", "b"), ("d", "e")), (100,))
    assert LAYOUT.covering("abc") == StageLayout("m", 1, (("a", "b"), ("c",)), (100,))
    assert LAYOUT.covering("de") == StageLayout("m", 1, (("d", "e"),), ())


def test_refined_boundaries_are_the_mean_of_what_is_said() -> None:
    assert LAYOUT.refined({"a": 200.0, "b": 300.0, "zz": 1.0}) == StageLayout("m", 1, LAYOUT.stages, (250, 1000))


def test_refined_boundaries_that_would_not_ascend_are_pushed_up() -> None:
    assert LAYOUT.refined({"a": 1.0, "b": 1.0, "c": 1.0}).boundaries_tokens == (1, 2)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcde"), st.floats(1, 1e6)))
def test_refined_boundaries_ascend(said: dict[str, float]) -> None:
    LAYOUT.refined(said)


def test_instances_keep_the_order_of_their_stages() -> None:
    plan = StagePlan((1, 2, 2), (64, 512))
    again = assign(plan, ["c", "a", "e", "b", "d"], model="m", revision=2, before=LAYOUT)
    assert again == StageLayout("m", 2, (("a",), ("b", "c"), ("e", "d")), (64, 512))
    newcomer = assign(plan, ["n", "a", "c", "b", "d"], model="m", revision=2, before=LAYOUT)
    assert newcomer.stages == (("a",), ("b", "c"), ("d", "n")), "it goes where it is needed"
    first = assign(plan, ["h1-a", "h1-b", "h1-c", "h2-a", "h2-b"], model="m", revision=1)
    assert first.stages == (("h1-a",), ("h1-b", "h1-c"), ("h2-a", "h2-b"))


def test_a_plan_is_for_as_many_instances() -> None:
    with pytest.raises(ConfigurationError, match="for 2 instances, there are 1"):
        assign(StagePlan((1, 1), (5,)), ["a"], model="m", revision=1)


@pytest.mark.parametrize(
    ("stages", "boundaries", "why"),
    [
        ((), (), "every stage needs an instance"),
        ((("a",), ()), (5,), "every stage needs an instance"),
        ((("a",), ("a",)), (5,), "every instance one stage"),
        ((("a",), ("b",)), (0,), "2 stages need one boundary less, ascending"),
        ((("a",),), (5,), "1 stages need one boundary less, ascending"),
    ],
)
def test_layouts_that_cannot_be_are_refused(
    stages: tuple[tuple[str, ...], ...], boundaries: tuple[int, ...], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        StageLayout("m", 1, stages, boundaries)
