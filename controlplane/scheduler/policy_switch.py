"""Which policy places: the configured one, or the fallback while the monitor cannot be heard. No I/O, no clock."""

from collections.abc import Mapping

from controlplane.policies.interface import Policy
from controlplane.policies.registry import NO_PARAMETERS, create_policy
from controlplane.policies.round_robin import RoundRobin


class PolicySwitch:
    """`round_robin` stands in by name, because it is the one policy that looks at no load."""

    def __init__(self, configured: str, silence_s: float) -> None:
        """Raises `ConfigurationError` for an unknown name."""
        self.configured: Policy = create_policy(configured)
        self.fallback_reason = ""
        """Why the fallback is in force; empty while it is not."""
        self._fallback: Policy = RoundRobin()
        self._silence_s = silence_s

    @property
    def in_force(self) -> Policy:
        """The policy that decides now."""
        return self._fallback if self.fallback_reason else self.configured

    def configure(self, name: str, parameters: Mapping[str, float] = NO_PARAMETERS) -> bool:
        """Select a policy; False if it was selected already, with these parameters (it then keeps what it remembers).
        Raises `ConfigurationError` for an unknown name and for parameters that the policy cannot take."""
        policy = create_policy(name, parameters)
        if policy.name == self.configured.name and policy.parameters == self.configured.parameters:
            return False
        self.configured = policy
        return True

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
