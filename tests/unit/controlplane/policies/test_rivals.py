"""The rivals against their published rules, with numbers worked out by hand."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from controlplane.model.instance import LoadReport
from controlplane.policies.interface import Policy
from controlplane.policies.lmetric_plus import LMetricPlus
from controlplane.policies.registry import create_policy
from controlplane.policies.simulation import QWEN2_7B_ON_H20, QWEN3_30B_A3B_ON_H20, Simulation, SimulationParameters
from tests.unit.controlplane.builders import BLOCK_TOKENS
from tests.unit.controlplane.policies.problems import HELD, LOADS, problem


def bs(load: LoadReport) -> int:
    return load.running_requests + load.queued_requests


@pytest.mark.parametrize(("weight", "scores"), [(0.7, [0.65, 0.85]), (0.4, [0.8, 0.7])])
def test_linear_weighs_misses_against_normalised_batch_size(weight: float, scores: list[float]) -> None:
    # Half of 64 tokens cached beside the largest batch, against nothing beside half of it.
    asked = problem([LoadReport(running_requests=4), LoadReport(running_requests=2)], held=(2, 0), prompt_tokens=64)
    decision = create_policy("linear", {"lambda": weight}).decide(asked)
    assert decision.scores.tolist() == pytest.approx(scores)
    assert decision.row == int(np.argmin(scores))


def test_linear_of_an_idle_cluster_looks_at_the_cache_alone() -> None:
    asked = problem([LoadReport(), LoadReport()], held=(0, 4), prompt_tokens=64)
    assert create_policy("linear", {"lambda": 0.1}).decide(asked).scores.tolist() == pytest.approx([0.1, 0.0])


@pytest.mark.parametrize(("weight", "scores"), [(1.0, [1100.0, 900.0]), (2.0, [1200.0, 1300.0])])
def test_dynamo_weighs_tokens_to_prefill_against_tokens_held(weight: float, scores: list[float]) -> None:
    # 100 uncached beside 1000 held; 100 uncached and 300 queued beside 200 running.
    loads = [LoadReport(running_tokens=1000), LoadReport(running_tokens=200, queued_prefill_tokens=300)]
    decision = create_policy("dynamo", {"prefill_weight": weight}).decide(problem(loads))
    assert decision.scores.tolist() == scores
    assert decision.row == int(np.argmin(scores))


@pytest.mark.parametrize(("allowed", "row"), [(2, 1), (3, 0)])
def test_filter_forgets_the_cache_once_batches_differ_by_more_than_the_range(allowed: int, row: int) -> None:
    asked = problem([LoadReport(running_requests=5), LoadReport(running_requests=2)], held=(2, 0))
    assert create_policy("filter", {"range": allowed}).decide(asked).row == row


def test_filter_takes_the_smaller_batch_of_those_with_the_most_cached() -> None:
    loads = [LoadReport(running_requests=running) for running in (1, 4, 3)]
    assert create_policy("filter").decide(problem(loads, held=(0, 2, 2))).row == 2


@given(LOADS, HELD)
@settings(deadline=None)
def test_filter_follows_its_pseudocode(loads: list[LoadReport], held: list[int]) -> None:
    row = create_policy("filter", {"range": 3}).decide(problem(loads, held)).row
    sizes = [bs(load) for load in loads]
    if max(sizes) - min(sizes) > 3:
        assert sizes[row] == min(sizes)
    else:
        assert (-held[row], sizes[row]) == min((-h, s) for h, s in zip(held, sizes, strict=False))


@given(LOADS, HELD)
@settings(deadline=None)
def test_lmetric_plus_counts_the_request_in_the_batch(loads: list[LoadReport], held: list[int]) -> None:
    decision = LMetricPlus().decide(problem(loads, held))
    scores = [
        (load.queued_prefill_tokens + max(100 - blocks * BLOCK_TOKENS, 0)) * (bs(load) + 1)
        for load, blocks in zip(loads, held, strict=False)
    ]
    assert decision.scores.tolist() == scores
    assert scores[decision.row] == min(scores)


def test_lmetric_plus_prefers_a_big_hit_to_idleness() -> None:
    asked = problem([LoadReport(running_requests=1), LoadReport()], held=(6, 0))
    # 4 x 2 against 100 x 1; the literal product is 4 x 1 against 100 x 0.
    assert LMetricPlus().decide(asked).row == 0
    assert create_policy("lmetric").decide(asked).row == 1


COST = {
    "fixed_ms": 10.0,
    "prefill_token_ms": 0.1,
    "decode_request_ms": 1.0,
    "context_token_ms": 0.01,
    "attended_pair_ms": 0.0,
}


def test_simulation_predicts_the_time_to_first_token() -> None:
    busy = LoadReport(running_requests=2, running_tokens=100, queued_prefill_tokens=3993)
    decision = create_policy("simulation", COST).decide(problem([busy, LoadReport()]))
    # 4093 tokens in chunks of 2048 - 2: 3 steps beside a batch of 10 + 2 x 1 + 100 x 0.01 ms, and 409.3 ms of prefill.
    assert decision.scores.tolist() == pytest.approx([3 * 13 + 409.3, 10 + 10])


def test_simulation_counts_attention_to_cached_tokens() -> None:
    cost = {**dict.fromkeys(COST, 0.0), "attended_pair_ms": 1.0}
    decision = create_policy("simulation", cost).decide(problem([LoadReport()], held=(6,)))
    # 4 tokens attend to 96 cached ones and to 1, 2, 3 and 4 of their own.
    assert decision.scores.tolist() == [4 * 96 + 1 + 2 + 3 + 4]


def test_simulation_computes_at_least_one_token() -> None:
    cost = {**dict.fromkeys(COST, 0.0), "attended_pair_ms": 1.0}
    decision = create_policy("simulation", cost).decide(problem([LoadReport()], held=(6,), prompt_tokens=96))
    assert decision.scores.tolist() == [96 + 1]


def test_simulation_predicts_latency_where_output_is_counted() -> None:
    decision = create_policy("simulation", {**COST, "output_tokens": 5}).decide(problem([LoadReport()]))
    assert decision.scores.tolist() == pytest.approx([20 + 5 * (10 + 1 + 100 * 0.01)])


def test_an_untuned_simulation_chooses_otherwise() -> None:
    loads = [LoadReport(), LoadReport(running_requests=200, running_tokens=600_000)]
    asked = problem(loads, held=(0, 6), prompt_tokens=200)

    def row(parameters: SimulationParameters) -> int:
        return Simulation(parameters).decide(asked).row

    assert row(QWEN3_30B_A3B_ON_H20) == 0
    assert row(QWEN2_7B_ON_H20) == 1


@given(LOADS)
@settings(deadline=None)
def test_random_two_takes_the_smaller_of_two(loads: list[LoadReport]) -> None:
    decision = create_policy("random_two").decide(problem(loads))
    drawn = np.flatnonzero(np.isfinite(decision.scores)).tolist()
    assert len(drawn) == min(2, len(loads))
    assert bs(loads[decision.row]) == min(bs(loads[row]) for row in drawn)


def test_random_two_draws_everyone_alike_and_by_its_seed() -> None:
    asked = problem([LoadReport()] * 4)

    def rows(policy: Policy) -> list[int]:
        return [policy.decide(asked).row for _ in range(400)]

    counts = Counter(rows(create_policy("random_two", {"seed": 7})))
    # Four standard deviations of a binomial of 400 draws at 1/4.
    assert all(65 <= counts[row] <= 135 for row in range(4))
    assert rows(create_policy("random_two", {"seed": 7})) == rows(create_policy("random_two", {"seed": 7}))
    assert rows(create_policy("random_two", {"seed": 7})) != rows(create_policy("random_two", {"seed": 8}))
