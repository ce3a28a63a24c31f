"""Arrow over modelled instances: instances follow the load, and come back."""

import pytest

from controlplane.policies.arrow.policy import Arrow
from controlplane.policies.registry import create_policy
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.report.outcome import RequestOutcome
from simulator.report.report import Slo
from simulator.traces.request import TraceRequest

SLO = Slo(ttft_ms=2000, tpot_ms=60)
CLUSTER = ClusterConfig(4, InstanceConfig(kv_blocks=8000))


def attainment(outcomes: list[RequestOutcome]) -> float:
    return sum(SLO.is_met_by(outcome) for outcome in outcomes) / len(outcomes)


def run(requests: list[TraceRequest], policy: str, **parameters: float) -> tuple[list[RequestOutcome], set[int]]:
    """Outcomes, and how many instances were for prefill at the times that the policy looked."""
    chosen = create_policy(policy, parameters)
    prefilling: set[int] = set()
    if isinstance(chosen, Arrow):
        original = chosen.observe

        def observe(snapshot, now_s: float) -> None:  # type: ignore[no-untyped-def]
            original(snapshot, now_s)
            pools = chosen.pools(snapshot.model)
            prefilling.add(sum(pool in ("prefill", "decode_to_prefill") for pool in pools.values()))

        chosen.observe = observe  # type: ignore[method-assign]
    return ClusterSimulation(requests, CLUSTER, LinearCost(), chosen).run(), prefilling


@pytest.mark.slow
def test_a_burst_of_prompts_borrows_decode_instances_and_meets_more_slos_than_a_fixed_split() -> None:
    burst = [TraceRequest(5.0 + number / 50, 2000, 20) for number in range(40)]
    before = [TraceRequest(number / 4, 200, 40) for number in range(20)]
    requests = sorted([*before, *burst], key=lambda request: request.arrival_s)
    with_arrow, prefilling = run(requests, "arrow", ttft_ms=2000, tpot_ms=60)
    fixed, _ = run(requests, "static_pd")
    assert max(prefilling) == 3
    assert attainment(with_arrow) > attainment(fixed) + 0.1


@pytest.mark.slow
def test_much_decoding_borrows_idle_prefill_instances() -> None:
    requests = [TraceRequest(number / 40, 100, 900) for number in range(160)]
    outcomes, prefilling = run(requests, "arrow", ttft_ms=2000, tpot_ms=60, low_load=0.1)
    assert min(prefilling) == 1
    assert not any(outcome.error for outcome in outcomes)
