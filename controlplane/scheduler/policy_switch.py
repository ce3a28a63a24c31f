"""Which policy places: the configured one, or the fallback while the monitor cannot be heard. No I/O, no clock."""

from collections.abc import Mapping

from controlplane.planning.instance_profile import InstanceProfile
from controlplane.policies.arrow.profiled import profiled
from controlplane.policies.interface import Policy
from controlplane.policies.registry import NO_PARAMETERS, create_policy
from controlplane.policies.round_robin import RoundRobin


class PolicySwitch:
    """`round_robin` stands in by name, because it is the one policy that looks at no load."""

    def __init__(self, configured: str, silence_s: float) -> None:
        """Raises `ConfigurationError` for an unknown name."""
        self.configured: Policy = create_policy(configured)
        self.profile: InstanceProfile | None = None
        """By which the configured policy predicts, if it does."""
        self._asked: Policy = self.configured
        """With the parameters that were asked for, whatever a profile makes of them."""
        self.fallback_reason = ""
        """Why the fallback is in force; empty while it is not."""
        self._fallback: Policy = RoundRobin()
        self._silence_s = silence_s

    @property
    def profile_key(self) -> str:
        """Of the profile that has changed the configured policy's parameters; empty if none has."""
        is_changed = self.configured.parameters != self._asked.parameters
        return self.profile.key if is_changed and self.profile is not None else ""

    @property
    def in_force(self) -> Policy:
        """The policy that decides now."""
        return self._fallback if self.fallback_reason else self.configured

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
        """Choose by when the monitor was last heard. True if the fallback has begun or ended."""
        if heard_s is None:
            reason = "no monitor has been heard yet"
        elif now_s - heard_s > self._silence_s:
            reason = f"the monitor has been silent for more than {self._silence_s:g} s"
        else:
            reason = ""
        changed = bool(reason) != bool(self.fallback_reason)
        self.fallback_reason = reason
        return changed
