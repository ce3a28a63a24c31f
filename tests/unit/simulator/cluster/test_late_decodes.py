"""Policies that choose the decode instance at the end of the prefill."""

from typing import ClassVar

import numpy as np

from controlplane.model.placement import Decision, DecodeChoice, PlacementProblem
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.registry import create_policy
from simulator.cluster.config import ClusterConfig, Failure
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest

SMALL = InstanceConfig(kv_blocks=1000)


class FirstThenLast:
    """Prefills on the first instance, decodes on the last, and remembers when it was asked."""

    name: ClassVar[str] = "first_then_last"
    rule: ClassVar[str] = "the first, then the last"
    parameters = PolicyParameters()

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self.stays_open: list[bool] = []

    def decide(self, problem: PlacementProblem) -> Decision:
        self.stays_open.append(problem.is_decode_chosen_later)
        row = len(problem.snapshot) - 1 if problem.request.is_decoding else int(problem.candidates.argmax())
        return Decision(row, np.zeros(len(problem.snapshot)))

    def decide_decode(self, problem: PlacementProblem, prefill_row: int) -> DecodeChoice:
        self.asked_s.append(problem.request.now_s)
        assert prefill_row == 0
        assert problem.decode_candidates is not None
        return DecodeChoice(int(np.flatnonzero(problem.decode_candidates)[-1]), self.rule)


def run(
    requests: list[TraceRequest], policy: FirstThenLast, **about: object
) -> tuple[ClusterSimulation, dict[int, str]]:
    simulation = ClusterSimulation(requests, ClusterConfig(3, SMALL, **about), LinearCost(), policy)  # type: ignore[arg-type]
    outcomes = simulation.run()
    assert not any(outcome.error for outcome in outcomes)
    return simulation, {number: outcome.instance_id for number, outcome in enumerate(outcomes)}


def test_the_question_comes_a_message_after_the_first_token_and_the_request_moves() -> None:
    policy = FirstThenLast()
    simulation, ended_on = run([TraceRequest(0.0, 250, 20), TraceRequest(5.0, 30, 1)], policy)
    assert policy.stays_open == [True, True]
    # The second one has no token to come.
    (asked_s,) = policy.asked_s
    first_token_s = simulation.ledger.outcomes()[0].first_token_s
    assert first_token_s is not None
    assert asked_s == first_token_s + simulation.config.migration.message_delay_ms / 1000
    assert simulation.migrations.transferred == 1
    assert ended_on == {0: "instance-2", 1: "instance-0"}
    snapshot = simulation.table.snapshot("simulated")
    assert snapshot is not None
    assert snapshot.unreported_decodes.sum() == 0


def test_a_request_that_loses_its_instance_meanwhile_is_not_asked_about_again() -> None:
    policy = FirstThenLast()
    requests = [TraceRequest(0.0, 1000, 400)]
    _, ended_on = run(requests, policy, failures=(Failure(2, 2.0),))
    assert len(policy.asked_s) == 1
    assert ended_on[0] == "instance-1"


def test_arrow_decodes_elsewhere_and_leaves_nothing_behind() -> None:
    requests = [TraceRequest(number / 20, 500, 50) for number in range(60)]
    simulation = ClusterSimulation(requests, ClusterConfig(4, SMALL), LinearCost(), create_policy("arrow"))
    outcomes = simulation.run()
    assert not any(outcome.error for outcome in outcomes)
    assert simulation.migrations.transferred > 50
    assert {outcome.instance_id for outcome in outcomes} == {"instance-1", "instance-3"}
    assert not any(worker.instance.request_ids for worker in simulation.workers.values())
