"""Replaying a recorded sequence of problems gives the recorded decisions, whatever happened to the table since."""

import numpy as np
import pytest

from controlplane.model.instance import LoadReport
from controlplane.model.placement import PlacementProblem
from controlplane.policies.registry import OWN_POLICIES, create_policy
from tests.unit.controlplane.builders import cache, cluster, report, request
from tests.unit.controlplane.policies.problems import asked

INSTANCES = 8
PROBLEMS = 300


@pytest.fixture(scope="module")
def recorded() -> list[PlacementProblem]:
    """Loads, caches and the set of candidates change; a hot prefix takes half of the requests."""
    random = np.random.default_rng(3)
    ids = [f"i{row}" for row in range(INSTANCES)]
    table = cluster(*ids)
    problems = []
    for number in range(PROBLEMS):
        running, queued, prefill, context = (int(value) for value in random.integers(0, (30, 4, 4000, 20_000)))
        report(table, ids[number % INSTANCES], LoadReport(running, queued, prefill, context))
        table.staled(ids[int(random.integers(1, INSTANCES))], "1", bool(random.random() < 0.2))
        family = 0 if random.random() < 0.5 else int(random.integers(1, 20))
        chain = tuple(1000 * family + block for block in range(1, 21))
        if random.random() < 0.1:
            cache(table, ids[int(random.integers(INSTANCES))], *chain[: int(random.integers(1, 20))])
        problems.append(asked(table, request(f"r{number}", prompt_tokens=400, blocks=chain, now_s=number / 4)))
    return problems


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OWN_POLICIES))
def test_the_same_problems_give_the_same_decisions(name: str, recorded: list[PlacementProblem]) -> None:
    first, second = create_policy(name), create_policy(name)
    decisions = [first.decide(problem) for problem in recorded]
    again = [second.decide(problem) for problem in recorded]
    assert [d.row for d in decisions] == [d.row for d in again]
    assert all(np.array_equal(d.scores, e.scores) for d, e in zip(decisions, again, strict=True))
    assert all(problem.candidates[d.row] for problem, d in zip(recorded, decisions, strict=True))
    assert len({d.row for d in decisions}) > 1
