"""Outcomes that do not move: those of the simulator as it was before instances could touch each other."""

import hashlib
from dataclasses import astuple, replace

import pytest

from controlplane.policies.registry import create_policy
from simulator.cluster.config import ClusterConfig, Failure
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest

CONFIG = InstanceConfig(
    block_tokens=16, kv_blocks=300, max_model_len_tokens=4096, max_batch_requests=8, max_step_tokens=256
)
FAILURES = (Failure(1, 3.0, 1.5), Failure(0, 4.125))


def workload(count: int = 150) -> list[TraceRequest]:
    """Bursts of requests whose lengths and shared prefixes come from a linear congruence."""
    word, arrival_s = 7, 0.0
    requests = []
    for _ in range(count):
        word = (word * 1_103_515_245 + 12_345) % (1 << 31)
        arrival_s += 0.0625 * (word >> 8 & 3)
        input_tokens, output_tokens, group = 20 + (word >> 10) % 700, 1 + (word >> 12) % 90, (word >> 20) % 4
        names = tuple(range(100 * group, 100 * group + 1 + (word >> 16) % 6)) if group else ()
        requests.append(TraceRequest(arrival_s, input_tokens, output_tokens, names, 32 if names else 0))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "interval_ms", "failures", "digest"),
    [
        ("lmetric", 0.0, (), "500cc1362da8e982"),
        ("lmetric", 64.0, (), "29a22c93e4c19db5"),
        ("least_loaded", 64.0, FAILURES, "6aaa3c388dc578aa"),
        ("simulation", 16.0, FAILURES, "6200e88f242160c1"),
    ],
)
@pytest.mark.parametrize("skip_steps", [True, False])
def test_outcomes_are_what_they_always_were(
    policy: str, interval_ms: float, failures: tuple[Failure, ...], digest: str, skip_steps: bool
) -> None:
    config = ClusterConfig(3, CONFIG, report_interval_ms=interval_ms, report_delay_ms=2.0, failures=failures)
    config = replace(config, skip_steps=skip_steps)
    outcomes = ClusterSimulation(workload(), config, LinearCost(), create_policy(policy)).run()
    assert not any(outcome.error for outcome in outcomes)
    told = repr([astuple(outcome) for outcome in outcomes])
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == digest
