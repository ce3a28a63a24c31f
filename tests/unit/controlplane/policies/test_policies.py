"""Each policy against its published rule, written out plainly."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import LoadReport
from controlplane.policies.interface import decides_late, has_pools, is_observer
from controlplane.policies.least_loaded import LeastLoaded
from controlplane.policies.lmetric import LMetric
from controlplane.policies.place import place
from controlplane.policies.registry import OWN_POLICIES, create_policy
from controlplane.policies.round_robin import RoundRobin
from mesh.errors import ConfigurationError
from tests.unit.controlplane.builders import BLOCK_TOKENS, cache, cluster, report, request
from tests.unit.controlplane.policies.problems import problem

LOADS = st.lists(
    st.builds(
        LoadReport,
        running_requests=st.integers(0, 3),
        queued_requests=st.integers(0, 3),
        queued_prefill_tokens=st.integers(0, 500),
    ),
    min_size=1,
    max_size=6,
)
CHAIN = (1, 2, 3, 4, 5, 6)


def loaded(loads: list[LoadReport]) -> ClusterTable:
    table = cluster(*(f"i{row}" for row in range(len(loads))))
    for row, load in enumerate(loads):
        report(table, f"i{row}", load)
    return table


@given(LOADS)
@settings(deadline=None)
def test_least_loaded_takes_the_lowest_of_four_times_queued_plus_running(loads: list[LoadReport]) -> None:
    placement = place(loaded(loads), LeastLoaded(), request())
    scores = [4 * load.queued_requests + load.running_requests for load in loads]
    assert placement.decision.scores.tolist() == scores
    assert scores[placement.decision.row] == min(scores)


def test_least_loaded_counts_its_own_placements_as_queued() -> None:
    table, policy = cluster("a", "b"), LeastLoaded()
    report(table, "b", LoadReport(running_requests=3))
    assert [place(table, policy, request(f"r{n}")).instance.instance_id for n in range(2)] == ["a", "b"]


@given(loads=LOADS, held=st.lists(st.integers(0, len(CHAIN)), min_size=6, max_size=6))
@settings(deadline=None)
def test_lmetric_takes_the_lowest_product_and_among_equals_the_lowest_p_token(
    loads: list[LoadReport], held: list[int]
) -> None:
    table = loaded(loads)
    for row in range(len(loads)):
        cache(table, f"i{row}", *CHAIN[: held[row]])
    placement = place(table, LMetric(), request(prompt_tokens=100, blocks=CHAIN))
    p_token = [
        max(1, load.queued_prefill_tokens + 100 - blocks * BLOCK_TOKENS)
        for load, blocks in zip(loads, held, strict=False)
    ]
    keys = [
        ((load.running_requests + load.queued_requests) * tokens, tokens)
        for load, tokens in zip(loads, p_token, strict=True)
    ]
    assert placement.decision.indicators["p_token"].tolist() == p_token
    assert placement.decision.scores.tolist() == [key[0] for key in keys]
    assert keys[placement.decision.row] == min(keys)


def test_lmetric_p_token_is_at_least_one() -> None:
    table = cluster("a")
    cache(table, "a", *CHAIN)
    placement = place(table, LMetric(), request(prompt_tokens=96, blocks=CHAIN))
    assert placement.decision.indicators["p_token"].tolist() == [1]
    assert placement.cached_tokens == 96


def test_lmetric_weighs_cache_against_load() -> None:
    table = cluster("busy", "free")
    cache(table, "busy", *CHAIN)
    report(table, "free", LoadReport(running_requests=1))
    for running, expected in ((20, "busy"), (30, "free")):
        report(table, "busy", LoadReport(running_requests=running))
        # p_token 4 x 20 = 80 against 100 x 1, then 4 x 30 = 120.
        assert place(table, LMetric(), request(prompt_tokens=100, blocks=CHAIN)).instance.instance_id == expected
        table.ended("r")


def test_round_robin_begins_with_the_first_whatever_it_is_called() -> None:
    assert place(cluster("A", "Z"), RoundRobin(), request()).instance.instance_id == "A"


def test_round_robin_takes_each_in_turn_and_survives_changes_of_the_fleet() -> None:
    table, policy = cluster("a", "b", "c"), RoundRobin()
    chosen = [place(table, policy, request(f"r{n}")).instance.instance_id for n in range(4)]
    assert chosen == ["a", "b", "c", "a"]
    table.lost("b", "1")
    assert place(table, policy, request("r5")).instance.instance_id == "c"
    assert place(table, policy, request("r6", excluded=frozenset({"a"}))).instance.instance_id == "c"


SPLITTING = {"arrow", "static_pd", "static_pd_round_robin"}
"""Prefill on half of the instances, of four on two."""


@pytest.mark.parametrize("name", sorted(set(OWN_POLICIES) - {"random_two"}))
def test_an_idle_cluster_is_used_evenly(name: str) -> None:
    table, policy = cluster("a", "b", "c", "d"), create_policy(name)
    counts: Counter[str] = Counter()
    for number in range(40):
        counts[place(table, policy, request(f"r{number}")).instance.instance_id] += 1
        table.ended(f"r{number}")
    instances = 2 if name in SPLITTING else 4
    assert list(counts.values()) == [40 // instances] * instances


MILLISECOND_TOKENS = {"prefill_fixed_ms": 0.0, "prefill_token_ms": 1.0, "prefill_token_squared_ms": 0.0}
P_TOKEN, BS, CACHED = {"p_token": [130, 68]}, {"bs": [3, 0]}, {"cached_tokens": [0, 32]}
TOTAL, DELAY, RUNNING = {"total_tokens": [530, 0]}, {"prefill_delay_ms": [30, 0]}, {"running_tokens": [500, 0]}

ADDED_MS = {"wait_ms": [3, 0], "prefill_ms": [10, 7], "decode_ms": [2567, 2541], "others_ms": [53, 0]}


@pytest.mark.parametrize(
    ("name", "indicators"),
    [
        ("round_robin", {}),
        ("least_loaded", {"queued_requests": [1, 0], "running_requests": [2, 0]}),
        ("lmetric", P_TOKEN | BS | CACHED),
        ("lmetric_plus", P_TOKEN | BS | CACHED),
        ("penstock", ADDED_MS | CACHED),
        ("lmetric_hotspot", P_TOKEN | BS | CACHED),
        ("linear", BS | CACHED),
        ("dynamo", P_TOKEN | TOTAL | CACHED),
        ("filter", BS | CACHED),
        ("simulation", P_TOKEN | {"running_requests": [2, 0]} | RUNNING | CACHED),
        ("hit_ratio_x_batch", BS | CACHED),
        ("p_token_x_tokens", P_TOKEN | TOTAL | CACHED),
        ("random_two", BS),
        ("stages", TOTAL),
        ("arrow", {"pool": [0, 1], "token_interval_us": [20_000, 0]} | DELAY | RUNNING),
        ("static_pd", DELAY | RUNNING),
        ("static_pd_round_robin", {}),
        ("colocated", DELAY | RUNNING),
    ],
)
def test_a_policy_tells_the_numbers_that_it_has_decided_by(name: str, indicators: dict[str, list[int]]) -> None:
    busy = LoadReport(2, 1, queued_prefill_tokens=30, running_tokens=500, decoding_requests=2, token_interval_ms=20.0)
    predicts = name in ("arrow", "static_pd", "static_pd_round_robin", "colocated")
    policy = create_policy(name, MILLISECOND_TOKENS if predicts else {})
    told = policy.decide(problem([busy, LoadReport()], held=(0, 2))).indicators
    assert {each: values.tolist() for each, values in told.items()} == indicators


def test_every_policy_is_asked_for_the_numbers_that_it_has_decided_by() -> None:
    (asked,) = (
        mark for mark in test_a_policy_tells_the_numbers_that_it_has_decided_by.pytestmark if mark.name == "parametrize"
    )
    assert {name for name, _ in asked.args[1]} == set(OWN_POLICIES)


@pytest.mark.parametrize(
    "name", ["lmetric", "lmetric_plus", "linear", "filter", "hit_ratio_x_batch", "p_token_x_tokens"]
)
def test_of_idle_instances_the_one_with_the_longest_prefix_is_taken(name: str) -> None:
    policy = create_policy(name)
    assert {policy.decide(problem([LoadReport()] * 3, held=(0, 2, 1))).row for _ in range(3)} == {1}


def test_policies_say_what_else_they_can_do() -> None:
    late, watch = {"arrow", "penstock", "static_pd", "static_pd_round_robin"}, {"arrow"}
    made = {name: create_policy(name) for name in OWN_POLICIES}
    assert {name for name, policy in made.items() if decides_late(policy)} == late
    assert {name for name, policy in made.items() if is_observer(policy)} == watch
    assert {name for name, policy in made.items() if has_pools(policy)} == watch


def test_unknown_policies_are_refused_with_the_choice() -> None:
    with pytest.raises(ConfigurationError, match=r"'best'.*round_robin, least_loaded, lmetric"):
        create_policy("best")
