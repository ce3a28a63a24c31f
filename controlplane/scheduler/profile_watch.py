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
    """Gives the switch the profile of the instances that are there; `look` when they may have changed."""

    def __init__(self, store: StateStore, switch: PolicySwitch) -> None:
        self._profiles = FollowedPrefix(store, PROFILES_PREFIX, InstanceProfile, lambda key, profile: None)
        self._switch = switch

    async def follow(self) -> None:
        """Keep the policies at the profiles in the state store, until cancelled."""
        await self._profiles.follow()

    def look(self, table: ClusterTable) -> None:
        """Cheap: a comparison, as long as nothing has changed."""
        profile = profile_for(table.instances(), self._profiles.records.values())
        if self._switch.note_profile(profile):
            log.warning(
                "the placement policy predicts by another profile",
                extra={
                    "policy": self._switch.configured.name,
                    "profile": "" if profile is None else profile.key,
                    "parameters": self._switch.configured.parameters.values(),
                },
            )
