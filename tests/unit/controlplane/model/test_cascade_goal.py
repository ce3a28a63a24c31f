"""Which goals can be kept in the state store and planned for."""

from math import inf, nan
from typing import Any

import msgspec
import pytest

from controlplane.model.cascade_goal import CascadeGoal
from mesh.errors import ConfigurationError


def goal(**fields: Any) -> CascadeGoal:
    return CascadeGoal(**{"cascade": "both", "gpus": 1, "tiers": ("a@b",), **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"latency_s": inf},
        {"latency_s": nan},
        {"latency_s": 0.0},
        {"quality": nan},
        {"quality": 100.5},
        {"quality": 80.0, "latency_s": 1.0},
        {"quality": 80.0, "judge_s": inf},
        {"quality": 80.0, "judge_s": nan},
        {"quality": 80.0, "judge_s": -1.0},
        {"quality": 80.0, "gpus": 0},
        {},
    ],
)
def test_a_goal_that_no_plan_can_be_made_for_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        goal(**fields).checked()


@pytest.mark.parametrize("fields", [{"quality": 80.0, "judge_s": 0.5}, {"latency_s": 2.5}])
def test_other_goals_are_read_as_they_were_written(fields: dict[str, Any]) -> None:
    made = goal(**fields).checked()
    assert msgspec.json.decode(msgspec.json.encode(made), type=CascadeGoal) == made
