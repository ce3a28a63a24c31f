"""The cascade plan as a value: stored, shown, applied."""

from typing import Annotated

import msgspec

from controlplane.planning.cascade.alternate import Planned
from controlplane.planning.cascade.routing import check_thresholds
from mesh.errors import ConfigurationError, PlanInfeasible

PLAN_FORMAT = 1
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Degree = Annotated[int, msgspec.Meta(ge=1)]


class PlannedReplicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal replicas of a tier's model."""

    count: _Degree
    tp: _Degree = 1
    pp: _Degree = 1


class PlannedTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model of the cascade."""

    model: str
    gpus: _Count
    replicas: tuple[PlannedReplicas, ...]
    share: float
    """p_i: part of all requests that reaches it."""
    p95_s: float
    """Expected latency, the judgement of its answer included."""

    @property
    def replica_count(self) -> int:
        """Copies of the model, of any shape."""
        return sum(replicas.count for replicas in self.replicas)


class CascadePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds and deployment, with what they are expected to reach and for which workload."""

    name: str
    """The virtual model that clients ask for."""
    tiers: tuple[PlannedTier, ...]
    """Smallest first."""
    thresholds: tuple[float, ...]
    """An answer of tier i is accepted if it scores at least thresholds[i]."""
    quality: float
    latency_p95_s: float
    rate_per_s: float
    gpus: int
    quality_target: float | None = None
    latency_target_s: float | None = None
    format: int = PLAN_FORMAT

    def checked(self) -> "CascadePlan":
        """Itself. Raises `PlanInfeasible` if it contradicts itself: such a plan is never applied."""
        if self.format != PLAN_FORMAT:
            raise PlanInfeasible(f"plan {self.name}: format {self.format} is not {PLAN_FORMAT}; plan anew")
        if not self.tiers:
            raise PlanInfeasible(f"plan {self.name}: it has no tier")
        try:
            check_thresholds(self.thresholds, len(self.tiers))
        except ConfigurationError as error:
            raise PlanInfeasible(f"plan {self.name}: {error}") from error
        if sum(tier.gpus for tier in self.tiers) > self.gpus:
            raise PlanInfeasible(f"plan {self.name}: its tiers take more than its {self.gpus} GPUs")
        for tier in self.tiers:
            taken = sum(each.count * each.tp * each.pp for each in tier.replicas)
            if taken > tier.gpus:
                raise PlanInfeasible(f"plan {self.name}: {tier.model}'s replicas take {taken} of its {tier.gpus} GPUs")
            if tier.share > 0 and not tier.replicas:
                raise PlanInfeasible(f"plan {self.name}: requests reach {tier.model}, which has no replica")
        if len({tier.model for tier in self.tiers}) < len(self.tiers):
            raise PlanInfeasible(f"plan {self.name}: a model stands for two tiers")
        return self


def cascade_plan(
    name: str,
    models: tuple[str, ...],
    planned: Planned,
    *,
    rate_per_s: float,
    gpus: int,
    quality_target: float | None = None,
    latency_target_s: float | None = None,
) -> CascadePlan:
    """What algorithm 1 found, for these models."""
    deployment, shares = planned.deployment, planned.routed.shares
    tiers = tuple(
        PlannedTier(
            model=model,
            gpus=deployment.gpus[tier],
            replicas=tuple(
                PlannedReplicas(count=count, tp=shape.tp, pp=shape.pp) for shape, count in deployment.mixes[tier]
            ),
            share=shares[tier],
            p95_s=deployment.p95_s[tier],
        )
        for tier, model in enumerate(models)
    )
    return CascadePlan(
        name=name,
        tiers=tiers,
        thresholds=planned.thresholds,
        quality=planned.routed.quality,
        latency_p95_s=deployment.latency_s,
        rate_per_s=rate_per_s,
        gpus=gpus,
        quality_target=quality_target,
        latency_target_s=latency_target_s,
    ).checked()


def encode_plan(plan: CascadePlan) -> bytes:
    """JSON."""
    return msgspec.json.encode(plan)


def decode_plan(content: bytes) -> CascadePlan:
    """From JSON, checked. Raises `PlanInfeasible` for what is no plan."""
    try:
        return msgspec.json.decode(content, type=CascadePlan).checked()
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PlanInfeasible(f"this is no cascade plan: {error}") from error
