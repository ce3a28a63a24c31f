"""A plan from values that travel between processes: planning takes long, so a planner has it done in another one."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from controlplane.model.cascade_goal import CascadeGoal, judgement_s, quality_refusal
from controlplane.planning.cascade.bilevel import PlanRequest
from controlplane.planning.cascade.plan import CascadePlan, cascade_plan
from controlplane.planning.cascade.workload import read_window, sample_of_window
from controlplane.planning.instance_profile import InstanceProfile
from mesh.errors import ConfigurationError
from simulator.cascade.curves import SimulatedCurves, StoredCurve
from simulator.cascade.profiled import ProfiledTier
from simulator.cascade.steady_plan import SimulatedDeployments, steady_plan
from simulator.cascade.tier import MAX_REPLICA_GPUS, Tier, TierModel


@dataclass(frozen=True, slots=True)
class MadePlan:
    """The plan, and all tables that were simulated for it."""

    plan: CascadePlan
    tables: tuple[StoredCurve, ...]


PROFILE = "profile:"
NO_PROFILES: Mapping[str, InstanceProfile] = MappingProxyType({})


def profile_keys(text: str) -> tuple[str, ...]:
    """What profile:KEY[,KEY...] names; nothing where it is no such text."""
    return tuple(text.removeprefix(PROFILE).split(",")) if text.startswith(PROFILE) else ()


def parse_tier(text: str, gpus: int, profiles: Mapping[str, InstanceProfile] = NO_PROFILES) -> Tier:
    """MODEL@DEVICE[:DTYPE], or profile:KEY[,KEY...] with a profile for each shape; in replicas of at most `gpus`.

    Raises `ConfigurationError`.
    """
    if text.startswith(PROFILE):
        keys = profile_keys(text)
        unknown = next((key for key in keys if key not in profiles), None)
        if unknown is not None:
            known = ", ".join(sorted(profiles)) or "none"
            raise ConfigurationError(
                f"there is no profile {unknown!r}; profiles known: {known} (see `penstock profile`)"
            )
        return ProfiledTier(tuple(profiles[key] for key in keys), max_gpus=gpus).checked()
    model, _, where = text.partition("@")
    device, _, dtype = where.partition(":")
    return TierModel(model, device, dtype, max_gpus=min(gpus, MAX_REPLICA_GPUS)).checked()


def make_plan(
    goal: CascadeGoal,
    workload: tuple[bytes, ...],
    tables: tuple[StoredCurve, ...] = (),
    profiles: Mapping[str, InstanceProfile] = NO_PROFILES,
    seed: int = 0,
) -> MadePlan:
    """For a workload in lines (`controlplane.planning.cascade.workload`).

    Raises `PlanInfeasible`, and `ConfigurationError` or `TraceError` for a goal or a workload that make no sense.
    """
    window = read_window(workload)
    models, sample = window.models, sample_of_window(window)
    if refusal := quality_refusal(window.judge, sample.quality is not None):
        raise ConfigurationError(f"the goal of {goal.cascade} cannot be planned for: {refusal}")
    if len(goal.tiers) != len(models):
        raise ConfigurationError(
            f"the goal of {goal.cascade} names {len(goal.tiers)} tiers, the workload has {len(models)} "
            f"({', '.join(models)}): name one for each"
        )
    tiers = [parse_tier(text, goal.gpus, profiles) for text in goal.tiers]
    source = SimulatedCurves(sample, tiers, seed=seed, known=tables)
    request = PlanRequest(
        gpus=goal.gpus,
        quality=goal.quality,
        latency_s=goal.latency_s,
        judge_s=judgement_s("") if goal.judge_s is None else goal.judge_s,
        minimise=goal.minimise,
        judge_gpu_s=goal.judge_gpu_s,
    )
    deployments = SimulatedDeployments(sample, tiers, source, request.judge_s, seed)
    label = window.label or window.judge
    planned = steady_plan(sample, source, deployments, request, goal.probability, label, seed)
    made = cascade_plan(
        goal.cascade,
        models,
        planned.result,
        rate_per_s=sample.rate_per_s,
        gpus=goal.gpus,
        quality_target=goal.quality,
        latency_target_s=goal.latency_s,
        promise=planned.promise,
        calibrations=sample.calibrations(),
        steady=planned.steady,
    )
    return MadePlan(made, source.measured)
