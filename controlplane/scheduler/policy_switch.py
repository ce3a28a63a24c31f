"""Which policy places: the configured one, or the fallback while the monitor cannot be heard. No I/O, no clock."""

from collections.abc import Mapping
from typing import Protocol

from controlplane.planning.instance_profile import InstanceProfile
from controlplane.policies.arrow.profiled import profiled
from controlplane.policies.interface import Policy, has_pools
from controlplane.policies.registry import DEFAULT_POLICY, NO_PARAMETERS, create_policy
from controlplane.policies.round_robin import RoundRobin
from mesh.leadership_state import LeaderRecord


class PoolsLead(Protocol):
    """The leadership of a policy that keeps pools, as far as placing depends on it."""

    @property
    def is_leading(self) -> bool:
        """Whether this scheduler does, now."""

    @property
    def epoch(self) -> int:
        """Fencing epoch of this scheduler's leadership; workers refuse orders of a lower one."""

    @property
    def leader(self) -> LeaderRecord | None:
        """Who does, as last heard."""


class PolicySwitch:
    """While no monitor is heard `round_robin` stands in by name, because it is the one policy that looks at no load.

    A policy that keeps pools places in the scheduler that leads them only: two would have two opinions of every
    instance. In the others, and in all while there is no leader, the default policy stands in.
    """

    def __init__(self, configured: str, silence_s: float, pools: PoolsLead | None = None) -> None:
        """`pools` None: this scheduler is the only one. Raises `ConfigurationError` for an unknown name."""
        self.configured: Policy = create_policy(configured)
        self.profile: InstanceProfile | None = None
        """By which the configured policy predicts, if it does."""
        self._asked: Policy = self.configured
        """With the parameters that were asked for, whatever a profile makes of them."""
        self._silence = ""
        """Why the monitor is not believed; empty while it is."""
        self._blind: Policy = RoundRobin()
        self._unled: Policy = create_policy(DEFAULT_POLICY)
        self._pools = pools
        self._silence_s = silence_s
        self._noted = ""

    @property
    def profile_key(self) -> str:
        """Of the profile that has changed the configured policy's parameters; empty if none has."""
        is_changed = self.configured.parameters != self._asked.parameters
        return self.profile.key if is_changed and self.profile is not None else ""

    @property
    def in_force(self) -> Policy:
        """The policy that decides now."""
        if self._silence:
            return self._blind
        return self.configured if self._may_keep_pools else self._unled

    @property
    def fallback_reason(self) -> str:
        """Why a fallback is in force; empty while none is."""
        if self._silence or self._may_keep_pools:
            return self._silence
        if self.is_standby:
            return f"{self.leader_id} leads the pools of {self.configured.name}, and is to be asked"
        return f"no scheduler leads the pools of {self.configured.name} yet"

    @property
    def leader_id(self) -> str:
        """The scheduler that is to be asked for placements; empty: any, because the policy keeps no pools."""
        if self._pools is None or not has_pools(self.configured):
            return ""
        leader = self._pools.leader
        return "" if leader is None else leader.member_id

    @property
    def is_standby(self) -> bool:
        """Whether the policy in force keeps pools and another scheduler leads them: it alone places then."""
        return not self._may_keep_pools and bool(self.leader_id)

    @property
    def _may_keep_pools(self) -> bool:
        return self._pools is None or not has_pools(self.configured) or self._pools.is_leading

    def configure(self, name: str, parameters: Mapping[str, float] = NO_PARAMETERS) -> bool:
        """Select a policy; False if it was selected already, with these parameters (it then keeps what it remembers).
        Raises `ConfigurationError` for an unknown name and for parameters that the policy cannot take."""
        asked = create_policy(name, parameters)
        if asked.name == self._asked.name and asked.parameters == self._asked.parameters:
            return False
        self._asked = asked
        self._settle()
        return True

    def note_profile(self, profile: InstanceProfile | None) -> bool:
        """The instances' profile is this one now. True if the configured policy was made anew for it: one whose
        parameters change by it, which then starts without what it remembered."""
        if profile == self.profile:
            return False
        self.profile = profile
        before = self.configured
        self._settle()
        return self.configured is not before

    def _settle(self) -> None:
        """Make the policy that was asked for, by the profile there is; an equal one stays."""
        asked = self._asked
        values = asked.parameters.values() if self.profile is None else profiled(asked.parameters, self.profile)
        policy = create_policy(asked.name, values)
        if policy.name != self.configured.name or policy.parameters != self.configured.parameters:
            self.configured = policy

    def refresh(self, heard_s: float | None, now_s: float) -> bool:
        """Choose by when the monitor was last heard. True if another policy has come into force, or for another
        reason."""
        if heard_s is None:
            self._silence = "no monitor has been heard yet"
        elif now_s - heard_s > self._silence_s:
            self._silence = f"the monitor has been silent for more than {self._silence_s:g} s"
        else:
            self._silence = ""
        noted = self.fallback_name
        changed, self._noted = noted != self._noted, noted
        return changed

    @property
    def fallback_name(self) -> str:
        """Of the policy that stands in; empty while none does."""
        return self.in_force.name if self.in_force is not self.configured else ""
