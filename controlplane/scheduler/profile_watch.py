"""Follows the profiles in the state store, for policies that predict by them."""

import logging

from controlplane.model.cluster import ClusterTable
from controlplane.planning.instance_profile import PROFILES_PREFIX, InstanceProfile
from controlplane.policies.arrow.profiled import profile_for
from controlplane.scheduler.policy_switch import PolicySwitch
from mesh.store.followed_prefix import FollowedPrefix
from mesh.store.interface import StateStore

log = logging.getLogger(__name__)


class ProfileWatch:
    """Gives the switch the profile of the instances that are there, and the table what the steps of each one cost by
    the profile of its own kind; `look` when they may have changed."""

    def __init__(self, store: StateStore, switch: PolicySwitch) -> None:
        self._profiles = FollowedPrefix(store, PROFILES_PREFIX, InstanceProfile, lambda key, profile: None)
        self._switch = switch
        self._told: dict[str, tuple[ClusterTable, str, InstanceProfile]] = {}
        """Whose profile which table has heard of: by instance, with its incarnation."""

    async def follow(self) -> None:
        """Keep the policies at the profiles in the state store, until cancelled."""
        await self._profiles.follow()

    def look(self, table: ClusterTable) -> None:
        """Cheap: a comparison, as long as nothing has changed."""
        profiles = tuple(self._profiles.records.values())
        profile = profile_for(table.instances(), profiles)
        if profiles or self._told:
            self._tell(table, profiles)
        if self._switch.note_profile(profile):
            log.warning(
                "the placement policy predicts by another profile",
                extra={
                    "policy": self._switch.configured.name,
                    "profile": "" if profile is None else profile.key,
                    "parameters": self._switch.configured.parameters.values(),
                },
            )

    def _tell(self, table: ClusterTable, profiles: tuple[InstanceProfile, ...]) -> None:
        told: dict[str, tuple[ClusterTable, str, InstanceProfile]] = {}
        for instance in table.instances():
            profile = profile_for((instance,), profiles)
            if profile is None:
                continue
            news = told[instance.instance_id] = (table, instance.incarnation_id, profile)
            if self._told.get(instance.instance_id) != news:
                table.costed(instance.instance_id, instance.incarnation_id, profile.step_costs)
        self._told = told
