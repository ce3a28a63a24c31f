"""What a deployed cascade serves at most, while none of its queues empties.

Each tier is simulated by itself, with more requests than it keeps up with. In a run of the whole, the last of three
overloaded tiers gets its first requests late: 120 s of arrivals show 40 % less than what a cascade of DeepSeek-R1 keeps
up with.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.parallelism import Mix
from controlplane.planning.cascade.routing import route
from controlplane.planning.cascade.sample import CascadeSample
from simulator.cascade.deployed import Deployed, serve_tier
from simulator.cascade.replica import drawn_trace, full_batch
from simulator.cascade.tier import Tier

_OVERLOAD = 1.5
"""Arrivals over the rate that a deployment is made for."""
_BATCHES = 6.0
"""So many requests for each that a tier has under way at most."""
_FILLED = 1.5
"""A run is counted once so many for each that is under way have ended: until then short answers end sooner."""
_MIN_REQUESTS, _MAX_REQUESTS = 600, 40_000


def saturated_per_s(sample: CascadeSample, tiers: Sequence[Tier], deployed: Deployed, seed: int = 0) -> float:
    """Requests per second of the whole with which the slowest tier keeps up, for a deployment that is made for the
    sample's rate. What it holds beyond one and a half times that rate is not found.

    Raises `PlanInfeasible` as `serve`.
    """
    routed = route(sample, deployed.thresholds)
    of_tiers: list[float] = []
    for number, (tier, mix) in enumerate(zip(tiers, deployed.mixes, strict=True)):
        here = routed.reached[:, number]
        if not here.any():
            continue
        share = float(here.mean())
        lengths = sample.input_tokens[here], routed.output_tokens[here, number]
        of_tiers.append(_kept_up_per_s(tier, mix, *lengths, _OVERLOAD * share * sample.rate_per_s, seed) / share)
    return min(of_tiers)


def _kept_up_per_s(
    tier: Tier,
    mix: Mix,
    input_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    offered_per_s: float,
    seed: int,
) -> float:
    replicas = {replica.shape: replica for replica in tier.replicas()}
    batch = sum(count * full_batch(replicas[shape], input_tokens, output_tokens) for shape, count in mix)
    count = int(np.clip(_BATCHES * batch, _MIN_REQUESTS, _MAX_REQUESTS))
    trace = drawn_trace(np.random.default_rng(seed), input_tokens, output_tokens, offered_per_s, count)
    ends_s = np.sort(serve_tier(tier, mix, trace, seed=seed))
    filled = ends_s[min(int(_FILLED * batch), count // 4)]
    until_s = max(trace[-1].arrival_s, float(ends_s[count // 2]))  # the latter where far too much is offered
    return float(((ends_s > filled) & (ends_s <= until_s)).sum() / (until_s - filled))
