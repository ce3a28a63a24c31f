"""A plan from a goal and a workload in lines."""

import msgspec
import numpy as np
import pytest

from controlplane.model.cascade_goal import CascadeGoal
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import write_workload
from mesh.errors import ConfigurationError
from simulator.cascade.make_plan import make_plan
from tests.unit.simulator.cascade.short_runs import short_runs

GOAL = CascadeGoal("both", 2, ("Llama-3.2-3B@H100", "Llama-3.1-8B@H100"), quality=40.0)


def lines(tiers: int) -> tuple[bytes, ...]:
    rng = np.random.default_rng(3)
    sample = CascadeSample(
        scores=np.clip(rng.normal(60, 12, (40, tiers)), 0, 100),
        input_tokens=rng.integers(20, 400, 40),
        output_tokens=rng.integers(5, 30, (40, tiers)),
        rate_per_s=1.0,
    )
    return tuple(write_workload(tuple(f"model-{tier}" for tier in range(tiers)), sample))


@pytest.mark.parametrize("tiers", [1, 3])
def test_a_goal_with_other_tiers_than_the_workload_is_refused_by_name(tiers: int) -> None:
    with pytest.raises(ConfigurationError, match=f"both names 2 tiers, the workload has {tiers} .*name one for each"):
        make_plan(GOAL, lines(tiers))


@pytest.mark.slow
@short_runs()
def test_one_tier_of_a_cascade_can_be_planned_by_itself() -> None:
    made = make_plan(msgspec.structs.replace(GOAL, tiers=GOAL.tiers[:1]), lines(1)).plan
    assert made.thresholds == ()
    assert made.tiers[0].share == 1.0
    assert made.tiers[0].gpus >= 1
