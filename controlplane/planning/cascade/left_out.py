"""A plan for a cascade of which some tiers were left out, because nobody knows what they answer."""

from collections.abc import Sequence

import msgspec

from controlplane.planning.cascade.plan import CascadePlan, PlannedTier
from controlplane.planning.cascade.routing import ESCALATE_ALL


def with_left_out(plan: CascadePlan, models: Sequence[str]) -> CascadePlan:
    """The plan for all models of the cascade, smallest first: those that it does not have get no GPUs and are skipped,
    and where there are none of its own above, its largest tier accepts everything."""
    planned = {tier.model: tier for tier in plan.tiers}
    accepted_from = dict(zip((tier.model for tier in plan.tiers), (*plan.thresholds, 0.0), strict=True))
    return msgspec.structs.replace(
        plan,
        tiers=tuple(planned.get(model) or _without_gpus(plan, model) for model in models),
        thresholds=tuple(accepted_from.get(model, ESCALATE_ALL) for model in models[:-1]),
    ).checked()


def _without_gpus(plan: CascadePlan, model: str) -> PlannedTier:
    has_means = plan.latency_mean_s is not None
    return PlannedTier(model, 0, (), share=0.0, p95_s=0.0, mean_s=0.0 if has_means else None)
