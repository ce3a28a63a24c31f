"""The rescheduler over modelled instances."""

import numpy as np
import pytest

from controlplane.policies.registry import create_policy
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from simulator.cluster.config import ClusterConfig
from simulator.cluster.recording import RecordingConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.rescheduling.controller import ReschedulingController
from simulator.rescheduling.remaining_lengths import Figure7Errors, Oracle
from simulator.traces.request import TraceRequest

PARAMETERS = ReschedulerParameters(interval_s=0.2, horizon_steps=8, stride_tokens=50, migration_fixed_ms=5)
CLUSTER = ClusterConfig(3, InstanceConfig(kv_blocks=512, max_model_len_tokens=4096))
COST = LinearCost(fixed_ms=5.0, context_token_ms=0.001)


def trace() -> list[TraceRequest]:
    """Every third request is long: round robin gives them all to one instance."""
    return [TraceRequest(0.1 * number, 50, 1500 if number % 3 == 0 else 100) for number in range(24)]


def run(controller: ReschedulingController | None) -> tuple[ClusterSimulation, float]:
    """The simulation after its end, and the mean variance of the instances' token loads."""
    controllers = () if controller is None else (controller,)
    simulation = ClusterSimulation(
        trace(), CLUSTER, COST, create_policy("round_robin"), controllers, RecordingConfig(interval_ms=100)
    )
    outcomes = simulation.run()
    assert [outcome.output_tokens for outcome in outcomes] == [request.output_tokens for request in trace()]
    assert not any(outcome.error for outcome in outcomes)
    assert simulation.recording is not None
    return simulation, float(simulation.recording.series().running_tokens.var(axis=1).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "lengths"),
    [
        (ReschedulerMode.CURRENT, None),
        (ReschedulerMode.PREDICTED, Oracle()),
        (ReschedulerMode.PREDICTED, Figure7Errors(0)),
        (ReschedulerMode.TRAJECTORIES, Oracle()),
    ],
)
def test_load_is_evened_out_and_no_token_is_lost(mode: ReschedulerMode, lengths: Oracle | Figure7Errors | None) -> None:
    alone, uneven = run(None)
    controller = ReschedulingController(mode, PARAMETERS, lengths)
    simulation, even = run(controller)
    assert even < uneven / 4
    assert alone.preemptions > simulation.preemptions
    assert controller.manager.migrations.moved_total == len(controller.moves_ms) > 0
    assert controller.manager.migrations.in_flight == 0
    assert np.all(np.diff(controller.ordered_s) >= 0)


def test_off_orders_nothing() -> None:
    controller = ReschedulingController(ReschedulerMode.OFF, PARAMETERS)
    assert run(controller)[1] == run(None)[1]
    assert controller.ordered_s == []
