"""A synthetic load under which the product fails, and the detector that saves it (LMetric, section 5.2)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from controlplane.policies.registry import create_policy
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.report.report import Latencies, latencies
from simulator.reproductions.lmetric import setup
from simulator.traces.request import TraceRequest

HOTSPOT_CONTENDERS: Mapping[str, setup.Contender] = MappingProxyType(
    {
        "lmetric": setup.Contender("lmetric"),
        "lmetric with its detector": setup.Contender("lmetric_hotspot"),
        "vllm": setup.Contender("least_loaded"),
    }
)

INSTANCES = 16
PREFIX_TOKENS, TAIL_TOKENS, HOT_OUTPUT_TOKENS = 12_288, 64, 400
OTHER_TOKENS, OTHER_OUTPUT_TOKENS = 512, 1_200
"""Long answers keep every instance busy: an idle one has a score of 0 and would be given the hot class at once."""
HOT_SHARE = 0.6
"""Of the requests: far more than the share of the instances that hold the prefix."""
RATE_PER_S = 14.0
WARM_UP_S = 20.0
"""Before the first request of the hot class."""
FIRST_PREFILL_S = 6.0
"""The first one caches the prefix before the others come: a document that is read once and then asked about. Without
that, they would all miss, be spread, and cache it everywhere."""
DURATION_S, QUICK_DURATION_S = 240.0, 120.0
_PREFIX_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class HotspotResult:
    """Latencies and placement of the hot class under one policy."""

    ttft_ms: Latencies
    tpot_ms: Latencies
    largest_share: float
    """Of the hot class: the part that the instance with most of it got."""
    requests: int


def measure_hotspot(contender: setup.Contender, seed: int, quick: bool) -> HotspotResult:
    """More than half of all requests share a long prefix and say much; the others share nothing.

    Their uncached part is so short that the product stays lowest where the prefix is, although the batch there grows to
    many times that of the others: equation 2 is violated, which the paper found in none of its traces.
    """
    requests = hotspot_requests(seed, QUICK_DURATION_S if quick else DURATION_S)
    config, cost = setup.instance_of(setup.CHAT_MODEL)
    cluster = ClusterConfig(instances=INSTANCES, instance=config, seed=seed)
    policy = create_policy(contender.policy, contender.parameters)
    outcomes = ClusterSimulation(requests, cluster, cost, policy).run()
    hot = Counter(
        outcome.instance_id for outcome, request in zip(outcomes, requests, strict=True) if request.prefix_block_ids
    )
    return HotspotResult(
        ttft_ms=latencies(outcome.ttft_ms for outcome in outcomes if not outcome.error),
        tpot_ms=latencies(outcome.tpot_ms for outcome in outcomes if not outcome.error),
        largest_share=max(hot.values()) / hot.total(),
        requests=len(outcomes),
    )


def hotspot_requests(seed: int, duration_s: float) -> list[TraceRequest]:
    """Poisson arrivals; after the warm-up each is of the hot class by chance."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / RATE_PER_S, int(RATE_PER_S * duration_s)))
    is_hot = (rng.random(len(arrivals_s)) < HOT_SHARE) & (arrivals_s > WARM_UP_S + FIRST_PREFILL_S)
    is_hot[np.searchsorted(arrivals_s, WARM_UP_S)] = True
    prefix = tuple(range(1, PREFIX_TOKENS // _PREFIX_BLOCK_TOKENS + 1))
    return [
        TraceRequest(arrival_s, PREFIX_TOKENS + TAIL_TOKENS, HOT_OUTPUT_TOKENS, prefix, _PREFIX_BLOCK_TOKENS)
        if hot
        else TraceRequest(arrival_s, OTHER_TOKENS, OTHER_OUTPUT_TOKENS)
        for arrival_s, hot in zip(arrivals_s.tolist(), is_hot.tolist(), strict=True)
    ]
