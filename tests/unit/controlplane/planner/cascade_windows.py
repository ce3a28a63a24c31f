"""Windows of the workload of a cascade of two tiers, and plans for it."""

from typing import Any

import numpy as np

from controlplane.model.cascade_goal import CascadeGoal
from controlplane.model.cascade_record import CascadeRecord
from controlplane.planning.cascade.observed import ObservedWindow
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import read_window, write_workload

MODELS = ("small", "large")
RECORD = CascadeRecord("both", MODELS, (50.0,), judges=("exact",))
GOAL = CascadeGoal("both", 4, ("Llama-3.2-3B@H100", "Llama-3.1-8B@H100"), quality=60.0, judge_s=0.1)


def window(rate_per_s: float = 2.0, score: float = 50.0, requests: int = 40, seed: int = 1) -> CascadeSample:
    rng = np.random.default_rng(seed)
    scores = np.clip(np.stack([rng.normal(score, 5, requests), rng.normal(90, 3, requests)], axis=1), 0, 100)
    return CascadeSample(
        scores, rng.integers(90, 110, requests), rng.integers(20, 24, (requests, 2)), rate_per_s=rate_per_s
    )


def lines(sample: CascadeSample) -> tuple[bytes, ...]:
    return tuple(write_workload(MODELS, sample))


def observed(sample: CascadeSample) -> ObservedWindow:
    return ObservedWindow(sample.rate_per_s, None, read_window(lines(sample)).requests)


def plan_with(threshold: float, **changes: Any) -> CascadePlan:
    tiers = tuple(PlannedTier(model, 1, (PlannedReplicas(1),), 1.0, 1.0) for model in MODELS)
    fields: dict[str, Any] = {"name": "both", "tiers": tiers, "thresholds": (threshold,), "gpus": 4}
    return CascadePlan(**{**fields, "quality": 80.0, "latency_p95_s": 1.0, "rate_per_s": 2.0, **changes})
