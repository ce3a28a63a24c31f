"""Ties of one model are broken in turn, whatever other models do meanwhile."""

import pytest

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.policies.registry import OWN_POLICIES, create_policy
from controlplane.policies.selection import MAX_MODELS, RoundRobinCounter
from tests.unit.controlplane.builders import instance, report, request
from tests.unit.controlplane.policies.problems import asked

DRAWS_BY_CHANCE = {"random_two"}


@pytest.mark.parametrize("name", sorted(OWN_POLICIES.keys() - DRAWS_BY_CHANCE))
def test_requests_of_two_models_in_turn_spread_over_the_idle_instances_of_each(name: str) -> None:
    table = ClusterTable(ClusterLimits(max_indexed_blocks=10))
    for model in ("m", "n"):
        for number in range(2):
            table.joined(instance(f"{model}{number}", model=model))
            report(table, f"{model}{number}")
    policy = create_policy(name)
    chosen = {"m": set[int](), "n": set[int]()}
    for number in range(4):
        for model, rows in chosen.items():
            rows.add(policy.decide(asked(table, request(f"r{number}", model=model))).row)
    splits = name in ("arrow", "static_pd", "static_pd_round_robin")  # one instance of two is for prefill
    assert {model: len(rows) for model, rows in chosen.items()} == dict.fromkeys(chosen, 1 if splits else 2)


def test_turns_of_models_that_come_and_go_are_bounded() -> None:
    turns = RoundRobinCounter()
    for number in range(MAX_MODELS + 5):
        assert turns.next(f"m{number}") == 1
    assert turns.next(f"m{MAX_MODELS + 4}") == 2
    assert turns.last("m0") == 0
