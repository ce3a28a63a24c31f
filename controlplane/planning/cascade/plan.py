"""The cascade plan as a value: stored, shown, applied."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from controlplane.model.cascade_goal import Minimise
from controlplane.planning.cascade.bilevel import PlanResult
from controlplane.planning.cascade.calibration import TierCalibration
from controlplane.planning.cascade.drift import WorkloadSummary
from controlplane.planning.cascade.judging import judged_per_s
from controlplane.planning.cascade.latency import total_latency_s
from controlplane.planning.cascade.promise import QualityPromise
from controlplane.planning.cascade.routing import ESCALATE_ALL, check_thresholds
from mesh.errors import ConfigurationError, PlanInfeasible

PLAN_FORMAT = 1
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Degree = Annotated[int, msgspec.Meta(ge=1)]


class PlannedReplicas(msgspec.Struct, frozen=True):
    """Equal replicas of a tier's model."""

    count: _Degree
    tp: _Degree = 1
    pp: _Degree = 1


class PlannedTier(msgspec.Struct, frozen=True):
    """One model of the cascade."""

    model: str
    gpus: _Count
    replicas: tuple[PlannedReplicas, ...]
    share: float
    """p_i: part of all requests that reaches it."""
    p95_s: float
    """Expected latency, the judgement of its answer included."""
    mean_s: float | None = None
    """The same; None in plans of a time when means were not measured."""
    calibration: TierCalibration | None = None
    """What its scores are worth, by labelled answers; None where there are none."""

    @property
    def replica_count(self) -> int:
        """Copies of the model, of any shape."""
        return sum(replicas.count for replicas in self.replicas)


class SteadyRuns(msgspec.Struct, frozen=True):
    """What a plan's latencies rest on: simulations of the whole deployment under the policy that serves it."""

    runs: int
    requests: int
    """Counted of each run, its beginning apart."""
    margin_percent: float
    """Half of the 95 % interval of the p95s, over them: the widest."""
    is_settled: bool
    """Longer runs would say much the same. If not, a tier is so close to what it sustains, or so few reach it, that its
    latencies are not known well; or it is overloaded."""
    is_overloaded: bool
    """Requests take longer and longer: more come than the replicas serve."""
    whole_p95_s: float
    """p95 from arrival to the accepted answer."""


class CascadePlan(msgspec.Struct, frozen=True):
    """Thresholds and deployment, with what they are expected to reach and for which workload."""

    name: str
    """The virtual model that clients ask for."""
    tiers: tuple[PlannedTier, ...]
    """Smallest first."""
    thresholds: tuple[float, ...]
    """An answer of tier i is accepted if it scores at least thresholds[i]."""
    quality: float
    latency_p95_s: float
    """p95 of the slowest tier."""
    rate_per_s: float
    gpus: int
    quality_target: float | None = None
    latency_target_s: float | None = None
    """The latency to answer within, of the kind that `minimise` names."""
    format: int = PLAN_FORMAT
    minimise: Minimise = "slowest_tier"
    latency_mean_s: float | None = None
    """Of a request from end to end, over all tiers that it passes; None in plans of a time when means were not
    measured."""
    judge: str = ""
    """By whose scores the thresholds were chosen; empty in plans that do not say."""
    workload: WorkloadSummary | None = None
    """What it was planned for, as drift is measured; None in plans that do not say."""
    epoch: int = 0
    """Fencing epoch of the planner that put it into force by itself; 0: an operator applied it, which always counts."""
    promise: QualityPromise | None = None
    """How sure the quality is; None: it was just reached on the sample, or not asked for."""
    judge_gpus: int = 0
    """Of `gpus`, left to the judge."""
    judged_per_s: float | None = None
    """Judgements a second; None in plans that do not say."""
    leader: str = ""
    """The planner that put it into force by itself; empty where an operator did."""
    steady: SteadyRuns | None = None
    """None: its latencies are those of tables."""

    @property
    def latency_s(self) -> float:
        """The one that the plan minimises, or keeps within the target."""
        if self.minimise == "slowest_tier":
            return self.latency_p95_s
        assert self.latency_mean_s is not None  # `checked` refuses a plan without
        return self.latency_mean_s

    def checked(self) -> "CascadePlan":
        """Itself. Raises `PlanInfeasible` if it contradicts itself: such a plan is never applied."""
        if self.format != PLAN_FORMAT:
            raise PlanInfeasible(f"plan {self.name}: format {self.format} is not {PLAN_FORMAT}; plan anew")
        if not self.tiers:
            raise PlanInfeasible(f"plan {self.name}: it has no tier")
        if self.minimise == "end_to_end" and self.latency_mean_s is None:
            raise PlanInfeasible(f"plan {self.name}: it minimises the mean from end to end and does not say what it is")
        try:
            check_thresholds(self.thresholds, len(self.tiers))
        except ConfigurationError as error:
            raise PlanInfeasible(f"plan {self.name}: {error}") from error
        if sum(tier.gpus for tier in self.tiers) + self.judge_gpus > self.gpus:
            raise PlanInfeasible(f"plan {self.name}: its tiers and its judge take more than its {self.gpus} GPUs")
        for tier in self.tiers:
            taken = sum(each.count * each.tp * each.pp for each in tier.replicas)
            if taken > tier.gpus:
                raise PlanInfeasible(f"plan {self.name}: {tier.model}'s replicas take {taken} of its {tier.gpus} GPUs")
            if tier.share > 0 and not tier.replicas:
                raise PlanInfeasible(f"plan {self.name}: requests reach {tier.model}, which has no replica")
        if self.workload is not None and not (
            len(self.workload.scores) == len(self.workload.output_tokens) == len(self.tiers)
        ):
            raise PlanInfeasible(f"plan {self.name}: its workload is not one of its {len(self.tiers)} tiers")
        if len({tier.model for tier in self.tiers}) < len(self.tiers):
            raise PlanInfeasible(f"plan {self.name}: a model stands for two tiers")
        return self


def cascade_plan(
    name: str,
    models: tuple[str, ...],
    planned: PlanResult,
    *,
    rate_per_s: float,
    gpus: int,
    quality_target: float | None = None,
    latency_target_s: float | None = None,
    promise: QualityPromise | None = None,
    calibrations: Sequence[TierCalibration | None] = (),
    steady: SteadyRuns | None = None,
) -> CascadePlan:
    """The result of algorithm 1 as a plan for these models, smallest first; `calibrations` of each, or none."""
    deployment, shares = planned.deployment, planned.routed.shares
    tiers = tuple(
        PlannedTier(
            model=model,
            gpus=deployment.gpus[tier],
            replicas=tuple(
                PlannedReplicas(count=count, tp=shape.tp, pp=shape.pp) for shape, count in deployment.mixes[tier]
            ),
            share=shares[tier],
            p95_s=planned.p95_s[tier],
            mean_s=planned.mean_s[tier],
            calibration=calibrations[tier] if calibrations else None,
        )
        for tier, model in enumerate(models)
    )
    return CascadePlan(
        name=name,
        tiers=tiers,
        thresholds=planned.thresholds,
        quality=planned.routed.quality,
        latency_p95_s=total_latency_s(planned.p95_s, shares, "slowest_tier"),
        rate_per_s=rate_per_s,
        gpus=gpus,
        quality_target=quality_target,
        latency_target_s=latency_target_s,
        minimise=planned.minimise,
        latency_mean_s=total_latency_s(planned.mean_s, shares, "end_to_end"),
        promise=promise,
        judge_gpus=deployment.judge_gpus,
        judged_per_s=judged_per_s(planned.routed, rate_per_s),
        steady=steady,
    ).checked()


def encode_plan(plan: CascadePlan) -> bytes:
    """The plan as JSON, on one line; `decode_plan` reads it back."""
    return msgspec.json.encode(plan)


def decode_plan(content: bytes) -> CascadePlan:
    """From JSON, checked. Fields that it does not know are ignored: a later release has made it.

    Raises `PlanInfeasible` for what is no plan.
    """
    try:
        return msgspec.json.decode(content, type=CascadePlan).checked()
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PlanInfeasible(f"this is no cascade plan: {error}") from error


def with_excluded_tiers(plan: CascadePlan, models: Sequence[str]) -> CascadePlan:
    """Extend a plan for some tiers to all `models` of the cascade, smallest first.

    Models that the plan lacks get no GPUs and are skipped. Its own largest tier accepts everything, if all models above
    it are excluded.
    """
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
