"""The bound by hand, and that no simulated schedule beats it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.registry import create_policy
from mesh.errors import ConfigurationError
from simulator.cluster.config import ClusterConfig, InstanceSpec
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.fluid_bound import fluid_bound, fluid_work
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest
from tests.examples import examples

CONFIG = InstanceConfig(
    block_tokens=16, kv_blocks=4000, max_model_len_tokens=8192, max_batch_requests=8, max_step_tokens=108
)
PER_TOKEN = LinearCost(
    fixed_ms=10.0, prefill_token_ms=1.0, decode_request_ms=2.0, context_token_ms=0.0, attended_pair_ms=0.0
)


def test_the_work_is_counted_once_where_prompts_share() -> None:
    shared = (1, 2)
    requests = [TraceRequest(0.0, 48, 4, shared, 16), TraceRequest(1.0, 40, 1, shared, 16), TraceRequest(2.0, 10, 2)]
    work = fluid_work(requests, 16)
    assert (work.requests, work.prompt_tokens, work.decoded_tokens) == (3, 48 + 8 + 10, 3 + 0 + 1)
    assert work.attended_tokens == 48 * 49 // 2 + (8 * 32 + 8 * 9 // 2) + 10 * 11 // 2
    assert work.context_tokens == (50 + 51 + 52) + 12


def test_one_kind_of_step_by_hand() -> None:
    """7 decodes for each prompt token batch: 8 decodes and 100 prompt tokens a step, 10 + 100 + 16 ms."""
    requests = [TraceRequest(0.0, 100, 9)] * 50
    bound = fluid_bound(requests, ClusterConfig(2, CONFIG), PER_TOKEN)
    assert bound.requests_per_s == pytest.approx(2 * 1000 / 126, rel=1e-6)


def test_decoding_alone_by_hand() -> None:
    """A prompt of one token hardly counts; 8 decodes a step cost 10 + 16 ms."""
    requests = [TraceRequest(0.0, 1, 1001)] * 10
    bound = fluid_bound(requests, ClusterConfig(1, CONFIG), PER_TOKEN)
    assert bound.requests_per_s == pytest.approx(1000 / (125 * 26 + 1), rel=1e-3)


def test_memory_limits_the_batch() -> None:
    small = InstanceConfig(
        block_tokens=16, kv_blocks=128, max_model_len_tokens=2048, max_batch_requests=64, max_step_tokens=200
    )
    requests = [TraceRequest(0.0, 500, 1000)] * 10
    bound = fluid_bound(requests, ClusterConfig(1, small), PER_TOKEN)
    # 2048 tokens hold two contexts of 1000 on average.
    assert bound.requests_per_s <= 1000 / (999 / 2 * 14)


def test_different_instances_add_up() -> None:
    requests = [TraceRequest(0.0, 100, 9)] * 50
    twice = LinearCost(20.0, 2.0, 4.0, 0.0, 0.0)
    specs = (InstanceSpec(CONFIG), InstanceSpec(CONFIG, cost=twice))
    bound = fluid_bound(requests, ClusterConfig(2, CONFIG, specs=specs), PER_TOKEN)
    assert bound.requests_per_s == pytest.approx(1.5 * 1000 / 126, rel=1e-6)


def test_without_requests_there_is_no_bound() -> None:
    with pytest.raises(ConfigurationError):
        fluid_bound([], ClusterConfig(1, CONFIG), PER_TOKEN)


@settings(max_examples=examples(25), deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60), st.integers(0, 2)), min_size=5, max_size=60),
    instances=st.integers(1, 3),
    cost=st.sampled_from([PER_TOKEN, LinearCost(), LinearCost(1.0, 0.01, 0.5, 0.01, 1e-4)]),
    policy=st.sampled_from(["lmetric", "round_robin"]),
)
def test_no_schedule_beats_it(
    shapes: list[tuple[int, int, int]], instances: int, cost: LinearCost, policy: str
) -> None:
    """All requests at once: nothing ever waits for an arrival, so the throughput is the best of this schedule."""
    requests = [
        TraceRequest(
            0.0, prompt, answer, tuple(range(100 * group, 100 * group + 4)) if group else (), 16 if group else 0
        )
        for prompt, answer, group in shapes
    ]
    config = ClusterConfig(instances, CONFIG)
    outcomes = ClusterSimulation(requests, config, cost, create_policy(policy)).run()
    served_per_s = len(requests) / max(outcome.finished_s for outcome in outcomes)
    assert served_per_s <= fluid_bound(requests, config, cost).requests_per_s * (1 + 1e-9)
    assert np.isfinite(served_per_s)
