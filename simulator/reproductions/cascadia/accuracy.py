"""The replica model beside the paper's measurements: table 1 and figure 2."""

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.policies.registry import create_policy
from simulator.cascade.tier import ReplicaModel, TierModel
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.traces.request import TraceRequest

Strategy = tuple[int, int, int]
"""(DP, TP, PP)."""

TABLE_1: Mapping[Strategy, float] = {
    (1, 4, 1): 0.21,
    (1, 2, 2): 0.26,
    (1, 1, 4): 0.27,
    (2, 1, 2): 0.33,
    (2, 2, 1): 0.40,
    (2, 4, 1): 0.41,
    (2, 2, 2): 0.55,
}
"""Requests per second, measured by the paper on hardware that it does not name."""
TABLE_1_TOKENS = (1600, 16)
FIGURE_2: Mapping[str, tuple[Strategy, ...]] = {
    "R1-Distill-Qwen-7B": ((4, 1, 1), (2, 2, 1), (2, 1, 2)),
    "Llama-3.3-70B": ((4, 2, 1), (4, 1, 2), (2, 4, 1)),
}
FIGURE_2_INPUT = 512
"""The figure names only the outputs."""
FIGURE_2_OUTPUTS = (512, 1024)
BURST = 192
"""Requests that a replica is given at once."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Saturated throughput of one parallelism strategy for one model."""

    model: str
    strategy: Strategy
    output_tokens: int
    per_s: float
    """All replicas together."""


def table_1() -> tuple[Throughput, ...]:
    """Saturated throughput of each configuration on H100s, the testbed of section 4.1."""
    return tuple(_throughput("Llama-3.1-70B", strategy, *TABLE_1_TOKENS) for strategy in TABLE_1)


def figure_2() -> tuple[Throughput, ...]:
    """Saturated throughput of the strategies that Cascadia's figure 2 compares."""
    return tuple(
        _throughput(model, strategy, FIGURE_2_INPUT, output)
        for model, strategies in FIGURE_2.items()
        for output in FIGURE_2_OUTPUTS
        for strategy in strategies
    )


def _throughput(model: str, strategy: Strategy, input_tokens: int, output_tokens: int) -> Throughput:
    copies, tp, pp = strategy
    fitting = {replica.shape: replica for replica in TierModel(model, "H100").replicas()}
    replica = fitting[ReplicaShape(tp, pp)]
    return Throughput(model, strategy, output_tokens, copies * _burst_per_s(replica, input_tokens, output_tokens))


def _burst_per_s(replica: ReplicaModel, input_tokens: int, output_tokens: int) -> float:
    trace = [TraceRequest(0.0, input_tokens, output_tokens) for _ in range(BURST)]
    config = ClusterConfig(replica.engines, replica.engine, report_interval_ms=0)
    outcomes = ClusterSimulation(trace, config, replica.cost, create_policy("least_loaded")).run()
    return BURST / max(outcome.finished_s for outcome in outcomes)
