"""How far a supervisor has come with the plans in force: what is missing of the planned replicas, and why. Pure.

The status stands in the state store, under the supervisor's lease.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from controlplane.deployment.failed_starts import Failure
from controlplane.deployment.replicas import ReplicaState, Shape
from controlplane.deployment.steps import Situation, TierShape
from controlplane.deployment.tier_status import TierStatus, tier_statuses

STARTING = "starting"
DRAINED = "an operator has drained it; applying the plan again brings it back"
DEPLOYMENTS_PREFIX = "/penstock/deployments/"
"""Followed by the supervisor's name."""


class MissingReplicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal replicas that are planned and do not serve."""

    model: str
    count: int
    tp: int
    pp: int
    why: str


class DeploymentStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What runs where one supervisor starts and drains instances, against what is planned."""

    supervisor: str
    plans: dict[str, int]
    """By cascade: revision of the plan that is being followed; 0 where it was heard of only after an operator had set
    thresholds."""
    missing: tuple[MissingReplicas, ...] = ()
    leaving: tuple[str, ...] = ()
    """Instances that are to go and still run."""
    gpu_kind: str = ""
    """Of the GPUs there; of scales that name kinds, only those of it are started there."""
    waiting: dict[str, str] = {}
    """What instances wait for that have no place to run at yet, by name, planned or not."""

    @property
    def key(self) -> str:
        """The record's key in the state store."""
        return DEPLOYMENTS_PREFIX + self.supervisor

    @property
    def is_reached(self) -> bool:
        """Whether exactly what is planned serves."""
        return not self.missing and not self.leaving and not self.waiting


def deployment_status(
    supervisor: str,
    plans: Mapping[str, int],
    now: Situation,
    failures: Mapping[TierShape, Failure],
    drained: Mapping[TierShape, int],
    unit: str,
    waiting: Mapping[str, str],
    gpu_kind: str = "",
) -> DeploymentStatus:
    """`plans`: revisions by cascade; `drained`: what operators have taken away of the replicas that plans want; `unit`:
    of the room that instances take; `waiting`: see `DeploymentStatus`."""
    missing: list[MissingReplicas] = []
    leaving: list[str] = []
    for tier in tier_statuses(now.replicas, now.wanted, now.leave_first):
        starting = Counter(each.shape for each in tier.kept if each.state is ReplicaState.STARTING)
        missing += [_missing(tier.model, shape, count, STARTING) for shape, count in starting.items()]
        for shape, count in tier.missing.items():
            missing.append(_missing(tier.model, shape, count, _why(tier, shape, now, failures, unit)))
        staying = {replica.name for replica in tier.kept}
        leaving += [replica.name for replica in tier.replicas if replica.name not in staying]
    missing += [_missing(model, shape, count, DRAINED) for (model, shape), count in drained.items()]
    return DeploymentStatus(supervisor, dict(plans), tuple(missing), tuple(leaving), gpu_kind, dict(waiting))


def _missing(model: str, shape: Shape, count: int, why: str) -> MissingReplicas:
    return MissingReplicas(model, count, *shape, why)


def _why(tier: TierStatus, shape: Shape, now: Situation, failures: Mapping[TierShape, Failure], unit: str) -> str:
    failure, room = failures.get((tier.model, shape)), now.room_of(shape)
    if failure is not None:
        if (tier.model, shape) in now.spent and room > now.free:
            return f"{failure.why}; nothing makes room for it once more: apply another plan, or this one again"
        return f"{failure.why}; it is tried again"
    if room <= now.free:
        return "it waits for its turn"
    planned = sum(now.room_of(each) * count for counts in now.wanted.values() for each, count in counts.items())
    here = now.free + sum(now.room_of(each.shape) for each in now.replicas if each.model in now.wanted)
    if planned > here:
        return f"the plans want {planned} {unit} together, and there are {here} here for them"
    return f"it waits for {unit}: {room} needed, {now.free} free"
