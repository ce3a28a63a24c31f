"""What a replica of a running mesh sustains, by its profile and the requests that ended lately (pure).

Apart from `curve`, so that it can be called in a process of its own by its name.
"""

from typing import Final

import numpy as np

from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.planning.autoscale.profiled_capacity import CapacityCase
from simulator.autoscale.curve import Lengths, SloLimits, capacity_curve
from simulator.cascade.profiled import ProfiledTier

POOL: Final = 8
"""Replicas that are simulated together: many equal ones even out what a single one cannot."""
REQUESTS: Final = 1500
"""At each rate; a quarter of an hour of a busy replica."""
POLICY: Final = "least_loaded"


def profiled_curve(case: CapacityCase, seed: int, requests: int = REQUESTS) -> CapacityCurve:
    """Simulated under the least loaded placement. Raises `PlanInfeasible` where a replica refuses such requests, and
    `ConfigurationError` for a profile that makes no replica."""
    profile, policy = case.profile, case.policy
    (replica,) = ProfiledTier((profile,), max_gpus=profile.shape.gpus).replicas()
    lengths = Lengths(
        np.array([each.input_tokens for each in case.lengths], np.int64),
        np.array([each.output_tokens for each in case.lengths], np.int64),
    )
    limits = SloLimits(policy.ttft_ms, policy.tpot_ms, policy.e2e_ms)
    return capacity_curve(replica, lengths, limits, pool=POOL, requests=requests, policy=POLICY, seed=seed)
