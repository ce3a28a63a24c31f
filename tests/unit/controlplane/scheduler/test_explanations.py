"""Why recent requests went where they went."""

from controlplane.policies.lmetric import LMetric
from controlplane.policies.place import place
from controlplane.scheduler.explanations import Explanations
from tests.unit.controlplane.builders import cluster, request


def fill(explanations: Explanations, placements: int, instances: int = 2) -> None:
    table, policy = cluster(*(f"i{n}" for n in range(instances))), LMetric()
    for number in range(placements):
        explanations.add(place(table, policy, request(f"r{number}")), placed_unix_ms=number)


def test_a_record_holds_the_reasons() -> None:
    explanations = Explanations(10, 1 << 20)
    fill(explanations, 1)
    record = explanations.get("r0")
    assert record is not None
    assert record.policy == "lmetric"
    assert record.chosen_instance_id in {"i0", "i1"}
    assert record.indicators["p_token"].tolist() == [100, 100]
    assert record.scores.tolist() == [0.0, 0.0]
    assert record.prompt_tokens == 100
    assert explanations.get("stranger") is None


def test_the_oldest_are_forgotten_by_number() -> None:
    explanations = Explanations(3, 1 << 20)
    fill(explanations, 5)
    assert [explanations.get(f"r{n}") is not None for n in range(5)] == [False, False, True, True, True]


def test_the_oldest_are_forgotten_by_memory() -> None:
    explanations = Explanations(1000, 50_000)
    fill(explanations, 100, instances=100)
    assert 1 <= len(explanations) < 50_000 / (100 * 8 * 3)
    assert explanations.get("r99") is not None


def test_a_request_placed_twice_is_explained_by_the_last_placement() -> None:
    explanations = Explanations(10, 1 << 20)
    fill(explanations, 2)
    fill(explanations, 1)
    assert len(explanations) == 2
    record = explanations.get("r0")
    assert record is not None
    assert record.placed_unix_ms == 0
