"""Who decodes a request whose prompt is computed: whoever that costs everybody the least time."""

from typing import cast

import numpy as np
import pytest

from controlplane.model.cluster import ClusterTable
from controlplane.model.placement import PlacementRequest
from controlplane.model.running_request import RunningRequest
from controlplane.policies import phases
from controlplane.policies.interface import Policy
from controlplane.policies.penstock import Penstock
from controlplane.policies.place import choose_decode, place
from controlplane.policies.rescheduling.decode_choice import RULE, DecodesByWorth
from controlplane.policies.rescheduling.decode_load import decode_load
from controlplane.policies.rescheduling.parameters import ReschedulerParameters
from controlplane.policies.rescheduling.problem import DecodeInstance
from controlplane.policies.rescheduling.trajectory_planner import TrajectoryPlanner
from tests.unit.controlplane.policies.test_phases import ANY, DECODE, PREFILL, fleet

ASKED = PlacementRequest("r", "m", 100, 0.0, (), 50)


def decoding(instance_id: str, *remaining_tokens: int) -> DecodeInstance:
    running = [RunningRequest(f"{instance_id}{left}", 400, 0, left, "") for left in remaining_tokens]
    return DecodeInstance(instance_id, 10_000, 20.0, True, decode_load(running, ReschedulerParameters().horizon))


def by_worth(*running: DecodeInstance) -> Policy:
    return cast(Policy, DecodesByWorth(Penstock(), lambda: running, TrajectoryPlanner()))


def chosen_of(table: ClusterTable, policy: Policy) -> tuple[str, str]:
    """Instance and rule."""
    answer = choose_decode(table, policy, ASKED, "p")
    assert answer is not None
    instances, choice = answer
    return instances[choice.row].instance_id, choice.rule


def test_it_is_left_open_and_then_decoded_where_what_runs_ends_sooner() -> None:
    """Both hold as many tokens now."""
    table = fleet({"p": PREFILL, "short": DECODE, "long": DECODE})
    policy = by_worth(decoding("long", 2000, 2001), decoding("short", 10, 11))
    placed = place(table, policy, ASKED, asks_later=True)
    assert (placed.instance.instance_id, placed.is_decode_open) == ("p", True)
    assert chosen_of(table, policy) == ("short", RULE)


def test_requests_on_their_way_are_seen() -> None:
    table = fleet({"p": PREFILL, "a": DECODE, "b": DECODE})
    policy = by_worth(decoding("a", 500), decoding("b", 500))
    assert sorted(chosen_of(table, policy)[0] for _ in range(2)) == ["a", "b"]


@pytest.mark.parametrize(("others", "rule"), [(DECODE, phases.RULE), (ANY, phases.STAYS)])
def test_where_nothing_is_known_of_what_runs_the_phases_decide(others: object, rule: str) -> None:
    table = fleet({"p": PREFILL if others is DECODE else ANY, "a": others})  # type: ignore[dict-item]
    assert chosen_of(table, by_worth())[1] == rule


def test_without_anything_that_runs_all_are_alike() -> None:
    costs_ms = TrajectoryPlanner().joining_ms([decoding("a"), decoding("b")], 100, np.zeros(2))
    assert costs_ms[0] == costs_ms[1] > 0
