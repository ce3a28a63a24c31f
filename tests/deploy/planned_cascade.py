"""A plan of replicas of several shapes, to be exported."""

from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier

PLAN = CascadePlan(
    name="both",
    tiers=(
        PlannedTier("Small", 4, (PlannedReplicas(2), PlannedReplicas(1, tp=2)), 1.0, 1.5),
        PlannedTier("Org/Large.3", 12, (PlannedReplicas(1, tp=4, pp=3),), 0.4, 9.0),
    ),
    thresholds=(70.25,),
    quality=84.0,
    latency_p95_s=9.0,
    rate_per_s=3.0,
    gpus=16,
    quality_target=80.0,
)
