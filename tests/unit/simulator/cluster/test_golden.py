"""Outcomes that do not move: those of the simulator as it was before instances could touch each other, and before loads
were evaluated only where they are read. (Two are those since what has ended is taken out of the last report.)
"""

import hashlib
from dataclasses import astuple, replace

import numpy as np
import pytest

from controlplane.policies.registry import create_policy
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from simulator.cluster.config import ClusterConfig, Failure, KvReuseConfig
from simulator.cluster.recording import RecordingConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.rescheduling.controller import ReschedulingController
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


ROOMY = replace(CONFIG, kv_blocks=4000, max_batch_requests=64)
LONG_ANSWERS = [replace(each, output_tokens=5 * each.output_tokens) for each in workload(100)]
NAMELESS = [replace(each, prefix_block_ids=(), block_tokens=0) for each in workload()]
MANY_LONG = [replace(each, arrival_s=each.arrival_s / 3, output_tokens=700) for each in NAMELESS]


@pytest.mark.parametrize(
    ("policy", "requests", "cluster", "preemptions", "digest"),
    [
        ("lmetric", NAMELESS, ClusterConfig(4, ROOMY), 0, "c0590912a9f74a12"),
        ("lmetric", MANY_LONG, ClusterConfig(4, CONFIG, report_interval_ms=64.0), 156, "b44480eb68122680"),
        ("lmetric_hotspot", workload(), ClusterConfig(4, ROOMY, failures=FAILURES), 0, "5e75d91bff9c0e9d"),
        ("penstock", LONG_ANSWERS, ClusterConfig(4, ROOMY), 0, "4ed2fc25db50a769"),
        ("linear", LONG_ANSWERS, ClusterConfig(3, CONFIG, report_interval_ms=0.0), 6, "c7474e43b4a75e28"),
        ("arrow", LONG_ANSWERS, ClusterConfig(4, ROOMY), 0, "a326d966ce530bfe"),
        (
            "lmetric",
            workload(),
            ClusterConfig(4, CONFIG, kv_reuse=KvReuseConfig(pulls=True, host_factor=2.0, host_instances=2)),
            0,
            "22c14c6bdec4a50e",
        ),
    ],
)
def test_outcomes_and_loads_are_what_they_always_were(
    policy: str, requests: list[TraceRequest], cluster: ClusterConfig, preemptions: int, digest: str
) -> None:
    """Times of steps are left out: their sums are numpy's, which adds in another order on other processors."""
    simulation = ClusterSimulation(
        requests, cluster, LinearCost(), create_policy(policy), recording=RecordingConfig(100.0)
    )
    told = digest_of(simulation)
    assert (simulation.preemptions, told) == (preemptions, digest)


def test_moves_are_what_they_always_were() -> None:
    controller = ReschedulingController(ReschedulerMode.CURRENT, ReschedulerParameters())
    simulation = ClusterSimulation(
        LONG_ANSWERS,
        ClusterConfig(4, ROOMY),
        LinearCost(),
        create_policy("random_two"),
        [controller],
        RecordingConfig(100.0),
    )
    assert digest_of(simulation) == "76e9322e83bfa473"


def digest_of(simulation: ClusterSimulation) -> str:
    """Of what becomes of the requests, and of the loads on the way."""
    told = hashlib.sha256(repr([astuple(outcome) for outcome in simulation.run()]).encode())
    assert simulation.recording is not None
    series = simulation.recording.series()
    for samples in (series.times_s, series.running_requests, series.queued_requests, series.running_tokens):
        told.update(np.ascontiguousarray(samples).tobytes())
    told.update(series.kv_fill.tobytes())
    return told.hexdigest()[:16]
