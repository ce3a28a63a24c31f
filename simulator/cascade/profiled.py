"""A tier whose replicas were measured."""

from dataclasses import dataclass

from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import InstanceProfile
from simulator.cascade.tier import ReplicaModel
from simulator.cost.fitted.step_cost import FittedStepCost, profiled_instance


@dataclass(frozen=True, slots=True)
class ProfiledTier:
    """A `Tier` of instances like the one that `penstock profile` measured; they come in the shape that it had,
    and count as one GPU each."""

    profile: InstanceProfile

    @property
    def key(self) -> str:
        """See `Tier`. The coefficients are part of it: another profile is another tier."""
        return f"{self.profile.key}:{hash(self.profile.step.coefficients):x}".replace("/", "|")

    def replicas(self) -> tuple[ReplicaModel, ...]:
        """See `Tier`."""
        cost = FittedStepCost(self.profile.step.coefficients)
        return (ReplicaModel(ReplicaShape(1), profiled_instance(self.profile.sizes), cost, 1),)
