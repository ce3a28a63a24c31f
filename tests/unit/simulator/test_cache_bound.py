"""The bound with finite caches: against all choices there are, and against the bound without."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cache_bound import cache_blocks, cache_bound, finite_cache_work, most_hits
from simulator.cluster.config import ClusterConfig, KvReuseConfig
from simulator.cost.linear import LinearCost
from simulator.fluid_bound import fluid_bound, fluid_work
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest
from simulator.traces.source import TraceRecipe, open_trace
from tests.examples import examples


def best_by_trial(prompts: Sequence[frozenset[int]], capacity: int) -> int:
    """Hits of the best choice of what to keep after each prompt, all choices tried."""

    @cache
    def hits(number: int, kept: frozenset[int]) -> int:
        if number == len(prompts):
            return 0
        found = len(prompts[number] & kept)
        there = kept | prompts[number]
        size = min(capacity, len(there))
        return found + max(hits(number + 1, frozenset(choice)) for choice in combinations(sorted(there), size))

    return hits(0, frozenset())


def accesses(prompts: Sequence[frozenset[int]]) -> tuple[list[int], list[int]]:
    numbers, nexts = [], []
    for number, prompt in enumerate(prompts):
        for block in sorted(prompt):
            numbers.append(number)
            nexts.append(next((later for later in range(number + 1, len(prompts)) if block in prompts[later]), -1))
    return numbers, nexts


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.frozensets(st.integers(0, 5), max_size=4), min_size=1, max_size=6), st.integers(0, 4))
def test_no_choice_of_what_to_keep_has_more_hits(prompts: list[frozenset[int]], capacity: int) -> None:
    numbers, nexts = accesses(prompts)
    found = most_hits(np.array(numbers, np.int64), np.array(nexts, np.int64), capacity)
    assert found == best_by_trial(prompts, capacity)


def prompt(at_s: float, *names: int) -> TraceRequest:
    return TraceRequest(at_s, 16 * len(names) + 4, 2, names, 16)


def test_work_by_hand() -> None:
    requests = [prompt(0, 1, 2, 3), prompt(1, 1, 4, 5), prompt(2, 1, 2, 3)]
    assert finite_cache_work(requests, 16, 100) == fluid_work(requests, 16)
    least = finite_cache_work(requests, 16, 2)
    # Kept of the first prompt: the head, which the second asks for, and one of the two others.
    assert least.prompt_tokens == fluid_work(requests, 16).prompt_tokens + 16
    # The shallowest block that can miss is the head: its tokens attend to themselves only.
    assert least.attended_tokens == fluid_work(requests, 16).attended_tokens + 16 * 17 // 2
    nothing = finite_cache_work(requests, 16, 0)
    assert nothing.prompt_tokens == sum(request.input_tokens for request in requests)
    assert nothing.attended_tokens == sum(each.input_tokens * (each.input_tokens + 1) // 2 for each in requests)


def test_more_memory_never_lowers_the_bound() -> None:
    requests = list(open_trace(TraceRecipe("synthetic", seed=2, clip_end_s=60.0, rate_scale=10.0)))
    cluster = ClusterConfig(2, InstanceConfig(kv_blocks=600, max_model_len_tokens=8192))
    works = [finite_cache_work(requests, 16, blocks) for blocks in (0, 300, 1200, 10**6)]
    bounds = [fluid_bound(requests, cluster, LinearCost(), work).requests_per_s for work in works]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1] == pytest.approx(fluid_bound(requests, cluster, LinearCost()).requests_per_s)
    with_hosts = replace(cluster, kv_reuse=KvReuseConfig(host_factor=1.5))
    assert (cache_blocks(cluster), cache_blocks(with_hosts)) == (1200, 3000)
    assert cache_bound(requests, cluster, LinearCost()).requests_per_s == bounds[2]
    assert cache_bound(requests, with_hosts, LinearCost()).requests_per_s >= bounds[2]
