"""LMetric's product with other indicators, against the rules written out plainly."""

from collections.abc import Sequence

import pytest

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import LoadReport
from controlplane.policies.place import place
from controlplane.policies.products import HitRatioTimesBatch, PTokenTimesTokens
from tests.unit.controlplane.builders import BLOCK_TOKENS, cache, cluster, report, request

CHAIN = (1, 2, 3, 4)


def table_of(loads: Sequence[LoadReport], held_by_b: int = 0) -> ClusterTable:
    table = cluster("a", "b")
    for name, load in zip("ab", loads, strict=True):
        report(table, name, load)
    if held_by_b:
        cache(table, "b", *CHAIN[:held_by_b])
    return table


def test_the_hit_ratio_weighs_the_batch_and_ignores_what_waits() -> None:
    waiting = LoadReport(running_requests=2, queued_prefill_tokens=100_000)
    table = table_of([LoadReport(running_requests=3), waiting])
    decision = place(table, HitRatioTimesBatch(), request()).decision
    assert decision.scores.tolist() == [3.0, 2.0]
    assert decision.row == 1


def test_a_cached_prefix_scales_the_batch_down() -> None:
    table = table_of([LoadReport(running_requests=2), LoadReport(running_requests=3)], held_by_b=2)
    placement = place(table, HitRatioTimesBatch(), request(prompt_tokens=4 * BLOCK_TOKENS, blocks=CHAIN))
    assert placement.decision.scores.tolist() == pytest.approx([2.0, 1.5])
    assert placement.instance.instance_id == "b"


def test_total_tokens_stand_for_the_batch_in_the_other_product() -> None:
    loads = [LoadReport(running_requests=9, running_tokens=100), LoadReport(running_requests=1, running_tokens=900)]
    decision = place(table_of(loads), PTokenTimesTokens(), request(prompt_tokens=50)).decision
    assert decision.scores.tolist() == [50 * 100, 50 * 900]
    assert decision.row == 0


def test_what_is_cached_whole_counts_as_one_token_missed() -> None:
    table = table_of([LoadReport(running_requests=64), LoadReport(running_requests=64)], held_by_b=4)
    decision = place(table, HitRatioTimesBatch(), request(prompt_tokens=4 * BLOCK_TOKENS, blocks=CHAIN)).decision
    assert decision.scores.tolist() == pytest.approx([64.0, 1.0])
    alone = table_of([LoadReport(), LoadReport(running_requests=2)], held_by_b=4)
    decision = place(alone, HitRatioTimesBatch(), request(prompt_tokens=1, blocks=CHAIN)).decision
    assert decision.scores.tolist() == [0.0, 2.0], "a prompt of one token is missed whole"
