"""What the planner shows Prometheus."""

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PLANNING_BUCKETS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0)
UNKNOWN_CASCADE = "unknown"
"""Stands for names that no cascade has: what callers make up must not become labels."""


class PlanOutcome(StrEnum):
    """What became of a plan."""

    APPLIED = "applied"
    """It is in force."""
    REFUSED = "refused"
    """It contradicts itself or the cascade."""
    FAILED = "failed"
    """There is none that meets the goal, or it could not be made or stored."""
    OUTDATED = "outdated"
    """The goal, the plan in force or the cascade was changed while it was being made."""


class PlannerMetrics:
    """Written by the planning managers; `outcome` is a `PlanOutcome`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.plans = Counter(
            "penstock_planner_plans", "Cascade plans, by what became of them", ["cascade", "outcome"], registry=registry
        )
        self.applied = Gauge(
            "penstock_planner_plan_applied_timestamp_seconds",
            "Unix time of the last plan that this planner put into force",
            ["cascade"],
            registry=registry,
        )
        self.planning_seconds = Histogram(
            "penstock_planner_planning_seconds",
            "Time to make a cascade plan, or to find that there is none",
            buckets=_PLANNING_BUCKETS_S,
            registry=registry,
        )
        self.workloads = Counter(
            "penstock_planner_workloads", "Sampled workloads that were reported", ["cascade"], registry=registry
        )
        self.stage_plans = Counter(
            "penstock_planner_stage_plans",
            "Stage plans, by what became of them: applied or failed",
            ["model", "outcome"],
            registry=registry,
        )
