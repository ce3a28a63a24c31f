"""Stage partition against enumeration of every plan, and what its pieces promise."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.planning.population import Population
from controlplane.planning.qoe import QoeModel
from controlplane.planning.stage_partition import (
    PROMPT_SLACK,
    PartitionMethod,
    PartitionProblem,
    chain_plan,
    exact_plan,
    find_plan,
    heuristic_plan,
    log_cuts,
    plan_of_sizes,
)
from controlplane.planning.stage_plan import StagePlan
from mesh.errors import ConfigurationError
from tests.examples import examples

MODEL = QoeModel(8.0, 0.05, 1e-4, 1e-8, 2e-4)


def population(seed: int, requests: int = 200, in_flight: float = 500.0) -> Population:
    rng = np.random.default_rng(seed)
    inputs = np.round(rng.lognormal(6, 1.2, requests)) + 1
    outputs = np.round(rng.lognormal(5, 1.0, requests)) + 1
    return Population.of(inputs, outputs, in_flight)


def problem(seed: int, cuts: int = 0, transfer_token_ms: float = 1e-3) -> PartitionProblem:
    people = population(seed)
    candidates = log_cuts(people.longest_tokens)
    if cuts:
        candidates = np.concatenate([candidates[:1], candidates[-cuts:]])
    return PartitionProblem.of(people, MODEL, candidates, transfer_token_ms)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for borders in combinations(range(1, total), parts - 1):
        edges = (0, *borders, total)
        yield tuple(b - a for a, b in pairwise(edges))


def every_quality(asked: PartitionProblem, instances: int) -> list[float]:
    inner = range(1, len(asked.cuts_tokens) - 1)
    return [
        asked.quality(sizes, cuts)
        for stages in range(1, min(instances, len(asked.cuts_tokens) - 1) + 1)
        for cuts in combinations(inner, stages - 1)
        for sizes in compositions(instances, stages)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 5), st.integers(1, 6), st.floats(0, 0.1))
def test_the_exact_plan_is_the_best_of_all(seed: int, instances: int, cuts: int, transfer_token_ms: float) -> None:
    asked = problem(seed, cuts, transfer_token_ms)
    found = exact_plan(asked, instances)
    assert found.quality == pytest.approx(min(every_quality(asked, instances)))
    assert sum(found.instances) == instances


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 5), st.integers(1, 6))
def test_the_chain_is_the_best_of_one_instance_a_stage(seed: int, instances: int, cuts: int) -> None:
    asked = problem(seed, cuts)
    stages = min(instances, len(asked.cuts_tokens) - 1)
    if stages == instances:
        inner = range(1, len(asked.cuts_tokens) - 1)
        best = min(asked.quality((1,) * stages, cuts) for cuts in combinations(inner, stages - 1))
        assert chain_plan(asked, instances).quality == pytest.approx(best)
    assert sum(chain_plan(asked, instances).instances) == instances


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**20), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_given_sizes_get_their_best_boundaries(seed: int, sizes: list[int]) -> None:
    asked = problem(seed, 6)
    inner = range(1, len(asked.cuts_tokens) - 1)
    best = min(asked.quality(tuple(sizes), cuts) for cuts in combinations(inner, len(sizes) - 1))
    assert plan_of_sizes(asked, tuple(sizes)).quality == pytest.approx(best)


def test_more_stages_than_ranges_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 to 6 stages"):
        plan_of_sizes(problem(1, 6), (1,) * 7)


@given(st.integers(0, 2**20), st.integers(1, 40), st.floats(0, 0.1))
@settings(max_examples=examples(40), deadline=None)
def test_the_heuristic_never_beats_the_optimum_nor_loses_to_its_own_chain(
    seed: int, instances: int, transfer_token_ms: float
) -> None:
    asked = problem(seed, transfer_token_ms=transfer_token_ms)
    heuristic = heuristic_plan(asked, instances)
    assert sum(heuristic.instances) == instances
    assert heuristic.quality >= exact_plan(asked, instances).quality * (1 - 1e-12)
    assert heuristic.quality <= chain_plan(asked, instances).quality * (1 + 1e-12)


def test_transfers_that_cost_too_much_leave_one_stage() -> None:
    growing = Population.of(np.ones(50), np.linspace(200, 900, 50), 500.0)
    asked = PartitionProblem.of(growing, MODEL, log_cuts(901), 1e3)
    assert exact_plan(asked, 8) == find_plan(asked, 8, PartitionMethod.SINGLE)


def test_free_transfers_and_mixed_lengths_are_cut() -> None:
    assert exact_plan(problem(1, transfer_token_ms=0), 8).stages > 2


def test_a_set_is_not_divided_into_more_parts_than_requests() -> None:
    lonely = Population.of(np.array([100.0]), np.array([10.0]), 1.0)
    asked = PartitionProblem.of(lonely, MODEL, log_cuts(110), 0.0)
    last = len(asked.cuts_tokens) - 1
    assert asked.stage_cost(8, 0, last) == pytest.approx(asked.stage_cost(1, 0, last))


@pytest.mark.parametrize("method", list(PartitionMethod))
def test_every_method_places_all_instances(method: PartitionMethod) -> None:
    assert sum(find_plan(problem(3), 12, method).instances) == 12


def test_no_instances_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one instance"):
        find_plan(problem(3), 0, PartitionMethod.EXACT)


def test_log_cuts_cover_the_longest() -> None:
    assert log_cuts(9).tolist() == [0, 1, 2, 4, 8, 16]
    assert len(log_cuts(131_072)) == 19
    assert log_cuts(131_072, 4)[-1] == 131_072


def test_a_population_is_what_a_census_counts() -> None:
    people = population(7, requests=40, in_flight=80.0)
    lengths = np.array([0, 100, 500, 1000, people.longest_tokens + 1])
    loads = people.loads_up_to(lengths)
    rng = np.random.default_rng(0)
    members = rng.choice(40, 400_000, p=people.output_tokens / people.output_tokens.sum())
    inputs = people.input_tokens[members]
    now = inputs + people.output_tokens[members] * rng.random(len(members))
    for row, length in enumerate(lengths):
        here = now <= length
        census = np.array([here.sum(), inputs[here].sum(), (inputs[here] ** 2).sum(), now[here].sum()])
        np.testing.assert_allclose(loads[row], census * 80.0 / len(members), rtol=0.03, atol=1e-9)
    assert loads[-1, 0] == pytest.approx(80.0)


def test_crossings_count_those_that_begin_before_and_end_after() -> None:
    people = Population.of(np.array([10, 10, 50]), np.array([10, 80, 10]), 1.0)
    assert (people.crossings(np.array([5, 15, 30, 55, 100])) * 100).tolist() == pytest.approx([0, 2, 1, 2, 0])


@pytest.mark.parametrize(
    ("inputs", "outputs", "in_flight"),
    [([], [], 1.0), ([1], [1, 2], 1.0), ([-1], [1], 1.0), ([1], [0], 1.0), ([1], [1], 0.0)],
)
def test_populations_that_cannot_be_are_refused(inputs: list[int], outputs: list[int], in_flight: float) -> None:
    with pytest.raises(ConfigurationError, match="population"):
        Population.of(np.array(inputs), np.array(outputs), in_flight)


def test_a_length_belongs_to_the_earliest_stage_that_covers_it() -> None:
    plan = StagePlan((1, 2, 1), (100, 1000))
    assert [plan.stage_of(length) for length in (1, 100, 101, 1000, 1001, 10**6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("instances", "boundaries"), [((), ()), ((1,), (5,)), ((1, 0), (5,)), ((1, 1, 1), (5, 5))])
def test_plans_that_cannot_be_are_refused(instances: tuple[int, ...], boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        StagePlan(instances, boundaries)


def every_plan_within(asked: PartitionProblem, instances: int) -> list[float]:
    """Qualities of all plans in which no stage has more than its share of the prompt tokens, and the slack."""
    found = []
    for stages in range(1, min(instances, len(asked.cuts_tokens) - 1) + 1):
        for cuts in combinations(range(1, len(asked.cuts_tokens) - 1), stages - 1):
            edges = (0, *cuts, len(asked.cuts_tokens) - 1)
            shares = [asked.prompt_share[first, last] for first, last in pairwise(edges)]
            for sizes in compositions(instances, stages):
                most = (1 + PROMPT_SLACK) / instances
                if all(share <= most * size for share, size in zip(shares, sizes, strict=True)):
                    found.append(asked.quality(sizes, cuts))
    return found


@settings(deadline=None, max_examples=examples(20))
@given(seed=st.integers(0, 10_000), instances=st.integers(1, 6))
def test_by_prefill_is_the_best_plan_of_those_that_share_the_prompts(seed: int, instances: int) -> None:
    asked = problem(seed, cuts=6)
    plan = find_plan(asked, instances, PartitionMethod.PREFILL)
    assert plan.quality == pytest.approx(min(every_plan_within(asked, instances)))
    assert find_plan(asked, instances, PartitionMethod.EXACT).quality <= plan.quality * (1 + 1e-9)


def test_the_shares_of_the_prompts_are_those_of_the_requests_that_enter() -> None:
    people = Population.of(np.array([10, 30, 60]), np.array([500, 5, 5]), 3.0)
    asked = PartitionProblem.of(people, MODEL, np.array([0, 16, 32, 64, 1024]), 1e-3)
    assert asked.prompt_share[0].tolist() == pytest.approx([0.0, 0.1, 0.4, 1.0, 1.0])
    assert asked.prompt_share[2, 3] == pytest.approx(0.6)
