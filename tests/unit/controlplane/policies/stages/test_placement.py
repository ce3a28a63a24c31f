"""The placement policy: by length to a stage, there to the instance with the fewest tokens."""

import pytest

from controlplane.model.instance import LoadReport
from controlplane.policies.registry import create_policy
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.placement import OUTSIDE, Stages
from tests.unit.controlplane.policies.problems import problem

TOKENS = (500, 100, 900, 800)


def placed(prompt_tokens: int, *, without: tuple[int, ...] = (), layout: bool = True) -> int:
    policy = create_policy("stages")
    assert isinstance(policy, Stages)
    policy.use_layout("another", None)
    asked = problem([LoadReport(running_tokens=tokens) for tokens in TOKENS], prompt_tokens=prompt_tokens)
    if layout:
        stages = (("i0", "i1"), ("i2", "i3"))
        policy.use_layout(asked.snapshot.model, StageLayout(asked.snapshot.model, 1, stages, (200,)))
    for row in without:
        asked.candidates[row] = False
    return policy.decide(asked).row


@pytest.mark.parametrize(("prompt_tokens", "row"), [(1, 1), (200, 1), (201, 3), (5000, 3)])
def test_by_length_then_by_tokens(prompt_tokens: int, row: int) -> None:
    assert placed(prompt_tokens) == row


def test_a_stage_without_candidates_is_stood_in_for() -> None:
    assert placed(100, without=(0, 1)) == 3
    assert placed(5000, without=(2, 3)) == 1


def test_without_a_plan_all_are_one_stage() -> None:
    assert placed(5000, layout=False) == 1


def test_instances_outside_the_layout_serve_when_nobody_else_can() -> None:
    policy = Stages()
    asked = problem([LoadReport(running_tokens=tokens) for tokens in TOKENS])
    policy.use_layout(asked.snapshot.model, StageLayout(asked.snapshot.model, 1, (("i3",),), ()))
    decision = policy.decide(asked)
    assert decision.row == 3
    assert {name: values.tolist() for name, values in decision.indicators.items()} == {
        "total_tokens": list(TOKENS),
        "stage": [OUTSIDE, OUTSIDE, OUTSIDE, 0],
    }
    asked.candidates[3] = False
    assert policy.decide(asked).row == 1
    policy.use_layout(asked.snapshot.model, None)
    assert "stage" not in policy.decide(asked).indicators


def test_a_rival_takes_the_instances_of_a_stage_in_turn() -> None:
    policy = Stages(round_robin=True)
    asked = problem([LoadReport(running_tokens=tokens) for tokens in TOKENS])
    policy.use_layout(asked.snapshot.model, StageLayout(asked.snapshot.model, 1, (("i0", "i1", "i2"), ("i3",)), (200,)))
    assert [policy.decide(asked).row for _ in range(6)] == [1, 2, 0, 1, 2, 0]
