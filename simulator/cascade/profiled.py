"""A tier whose replicas' costs come from profiles."""

import hashlib
from dataclasses import dataclass

import msgspec

from controlplane.planning.instance_profile import InstanceProfile
from mesh.errors import ConfigurationError
from simulator.cascade.tier import MAX_REPLICA_GPUS, ReplicaModel
from simulator.cost.fitted.step_cost import FittedStepCost, profiled_instance


@dataclass(frozen=True, slots=True)
class ProfiledTier:
    """A `Tier` of instances like those that `penstock profile` measured: one profile for each shape of replica.

    A pipeline's steps follow each other here as they did when they were measured, and each is of all requests. Where
    an engine has several batches under way each of its steps is of a part of them, so that what every step costs
    anyway is counted too seldom: under load such a replica looks faster than it is.
    """

    profiles: tuple[InstanceProfile, ...]
    """Of one engine, model and device: a plan tells replicas apart by their shapes alone."""
    max_gpus: int = MAX_REPLICA_GPUS
    """Largest number of GPUs of one replica."""

    @property
    def key(self) -> str:
        """See `Tier`. What was measured is part of it: another profile is another tier."""
        measured = [(profile.step.coefficients, profile.sizes, profile.shape) for profile in self._by_size()]
        digest = hashlib.sha256(msgspec.json.encode(measured)).hexdigest()[:16]
        return f"{'+'.join(profile.name for profile in self._by_size())}:{digest}".replace("/", "|")

    def checked(self) -> "ProfiledTier":
        """Itself. Raises `ConfigurationError` for profiles that make no tier together, or fit on no replica."""
        if not self.profiles:
            raise ConfigurationError("a measured tier needs a profile")
        kinds = {(profile.engine, profile.model, profile.device) for profile in self.profiles}
        if len(kinds) > 1:
            named = ", ".join(sorted("/".join(kind) for kind in kinds))
            raise ConfigurationError(
                f"the profiles of a tier are of one engine, model and device in several shapes, not of {named}"
            )
        shapes = sorted(profile.shape for profile in self.profiles)
        if len(set(shapes)) < len(shapes):
            raise ConfigurationError(
                f"the profiles of a tier differ in their shapes, these are of {', '.join(map(str, shapes))}: name one "
                "for each shape"
            )
        smallest = self._by_size()[0]
        if smallest.shape.gpus > self.max_gpus:
            raise ConfigurationError(
                f"an instance as in the profile {smallest.name} takes {smallest.shape.gpus} GPUs ({smallest.shape}), "
                f"and there are {self.max_gpus}: plan for more, or profile a smaller instance"
            )
        return self

    def replicas(self) -> tuple[ReplicaModel, ...]:
        """See `Tier`; the smallest first."""
        return tuple(
            ReplicaModel(
                profile.shape, profiled_instance(profile.sizes), FittedStepCost(profile.step.coefficients), engines=1
            )
            for profile in self.checked()._by_size()
            if profile.shape.gpus <= self.max_gpus
        )

    def _by_size(self) -> list[InstanceProfile]:
        return sorted(self.profiles, key=lambda profile: (profile.shape.gpus, profile.shape))
