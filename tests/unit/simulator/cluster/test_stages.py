"""Stage agents in the simulator: requests flow downstream, boundaries move, nothing gets lost, equal runs are equal."""

from dataclasses import replace

import numpy as np
import pytest

from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.agent import StageParameters
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.placement import Stages
from controlplane.policies.stages.refinement import Refinement, RefinementParameters
from simulator.cluster.config import ClusterConfig, Failure
from simulator.cluster.simulation import ClusterSimulation
from simulator.cluster.stages import StageController
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest

MODEL = QoeModel(8.0, 0.05, 1e-4, 1e-8, 2e-4)
CONFIG = ClusterConfig(4, InstanceConfig(kv_blocks=8192), model="m")
LAYOUT = StageLayout("m", 1, (("instance-0", "instance-1"), ("instance-2",), ("instance-3",)), (300, 900))
FROZEN = StageParameters(RefinementParameters(policy=Refinement.FROZEN))


def requests(count: int = 120, seed: int = 0) -> list[TraceRequest]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.05, count))
    inputs, outputs = rng.integers(20, 600, count), rng.integers(50, 700, count)
    return [TraceRequest(float(a), int(i), int(o)) for a, i, o in zip(arrivals, inputs, outputs, strict=True)]


def run(
    config: ClusterConfig = CONFIG, parameters: StageParameters = FROZEN
) -> tuple[list[RequestOutcome], StageController]:
    policy = Stages()
    controller = StageController(LAYOUT, MODEL, policy, parameters)
    outcomes = ClusterSimulation(requests(), config, LinearCost(), policy, controllers=(controller,)).run()
    return outcomes, controller


@pytest.mark.slow
def test_requests_end_in_the_stage_of_their_length() -> None:
    outcomes, controller = run()
    assert not any(outcome.error for outcome in outcomes)
    assert all(outcome.output_tokens == r.output_tokens for outcome, r in zip(outcomes, requests(), strict=True))
    assert controller.moved > 60
    for outcome in outcomes:
        # A handoff takes a moment, in which the request goes on where it is.
        length = outcome.input_tokens + outcome.output_tokens
        stage = LAYOUT.stage_with(outcome.instance_id)
        assert stage is not None
        assert LAYOUT.stage_of(length - 150) <= stage <= LAYOUT.stage_of(length)


@pytest.mark.slow
def test_equal_runs_are_equal() -> None:
    assert run()[0] == run()[0]


@pytest.mark.slow
def test_steps_one_by_one_change_nothing() -> None:
    by_runs, one_by_one = run()[0], run(replace(CONFIG, skip_steps=False))[0]
    assert by_runs == one_by_one


@pytest.mark.slow
def test_boundaries_are_refined_within_their_neighbours() -> None:
    _, controller = run(parameters=StageParameters(RefinementParameters(interval_s=1.0)))
    moved = [(instance_id, tokens) for _, instance_id, tokens in controller.boundaries if np.isfinite(tokens)]
    assert len({tokens for _, tokens in moved}) > 5
    assert {instance_id for instance_id, _ in moved} == {"instance-0", "instance-1", "instance-2"}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_lost_instance_costs_no_request(lost: int) -> None:
    failures = (Failure(lost, at_s=3.0, back_after_s=2.0),)
    outcomes, controller = run(replace(CONFIG, failures=failures))
    assert not any(outcome.error for outcome in outcomes)
    assert len(outcomes) == 120
    for manager in controller.managers.values():
        manager.validate()
        assert manager.agent is not None
        assert manager.agent.sender.load_tokens == 0
