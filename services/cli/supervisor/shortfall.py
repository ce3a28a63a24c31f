"""What is missing of the planned replicas, and why, in words (pure)."""

from collections import Counter
from collections.abc import Mapping

from controlplane.model.deployment_record import DeploymentRecord, MissingReplicas
from services.cli.supervisor.failed_starts import Failure
from services.cli.supervisor.replicas import Shape, Standing
from services.cli.supervisor.steps import Situation, TierShape
from services.cli.supervisor.tier_standing import TierStanding, tier_standings

STARTING = "starting"
DRAINED = "an operator has drained it; applying the plan again brings it back"


def deployment_record(
    supervisor: str,
    plans: Mapping[str, int],
    now: Situation,
    failures: Mapping[TierShape, Failure],
    drained: Mapping[TierShape, int],
    unit: str,
) -> DeploymentRecord:
    """`plans`: revisions by cascade; `drained`: what operators have taken away of the replicas that plans want; `unit`:
    of the room that instances take."""
    missing: list[MissingReplicas] = []
    leaving: list[str] = []
    for tier in tier_standings(now.replicas, now.wanted):
        starting = Counter(each.shape for each in tier.kept if each.standing is Standing.STARTING)
        missing += [_missing(tier.model, shape, count, STARTING) for shape, count in starting.items()]
        for shape, count in tier.missing.items():
            missing.append(_missing(tier.model, shape, count, _why(tier, shape, now, failures, unit)))
        staying = {replica.name for replica in tier.kept}
        leaving += [replica.name for replica in tier.replicas if replica.name not in staying]
    missing += [_missing(model, shape, count, DRAINED) for (model, shape), count in drained.items()]
    return DeploymentRecord(supervisor, dict(plans), tuple(missing), tuple(leaving))


def _missing(model: str, shape: Shape, count: int, why: str) -> MissingReplicas:
    return MissingReplicas(model, count, *shape, why)


def _why(tier: TierStanding, shape: Shape, now: Situation, failures: Mapping[TierShape, Failure], unit: str) -> str:
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
