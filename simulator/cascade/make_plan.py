"""A plan from values that travel between processes: planning takes long, so a planner has it done in another one."""

from dataclasses import dataclass

from controlplane.model.cascade_goal import CascadeGoal
from controlplane.planning.cascade.alternate import PlanRequest, plan
from controlplane.planning.cascade.plan import CascadePlan, cascade_plan
from controlplane.planning.cascade.workload import read_workload
from simulator.cascade.curves import SimulatedCurves, StoredCurve
from simulator.cascade.tier import MAX_REPLICA_GPUS, Tier, TierModel


@dataclass(frozen=True, slots=True)
class MadePlan:
    """The plan, and all tables that were simulated for it."""

    plan: CascadePlan
    tables: tuple[StoredCurve, ...]


def parse_tier(text: str, gpus: int) -> Tier:
    """MODEL@DEVICE[:DTYPE], in replicas of at most `gpus`. Raises `ConfigurationError` for another form."""
    model, _, where = text.partition("@")
    device, _, dtype = where.partition(":")
    return TierModel(model, device, dtype, max_gpus=min(gpus, MAX_REPLICA_GPUS)).checked()


def make_plan(
    goal: CascadeGoal, workload: tuple[bytes, ...], tables: tuple[StoredCurve, ...] = (), seed: int = 0
) -> MadePlan:
    """For a workload in lines (`controlplane.planning.cascade.workload`).

    Raises `PlanInfeasible`, and `ConfigurationError` or `TraceError` for a goal or a workload that make no sense.
    """
    models, sample = read_workload(workload)
    tiers = [parse_tier(text, goal.gpus) for text in goal.tiers]
    source = SimulatedCurves(sample, tiers, seed=seed, known=tables)
    request = PlanRequest(gpus=goal.gpus, quality=goal.quality, latency_s=goal.latency_s, judge_s=goal.judge_s)
    made = cascade_plan(
        goal.cascade,
        models,
        plan(sample, source, request),
        rate_per_s=sample.rate_per_s,
        gpus=goal.gpus,
        quality_target=goal.quality,
        latency_target_s=goal.latency_s,
    )
    return MadePlan(made, source.measured)
