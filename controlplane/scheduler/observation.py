"""Shows the cluster to policies that want to see it in time."""

from collections.abc import Callable

from controlplane.model.cluster import ClusterTable
from controlplane.policies.interface import Policy, is_observer


class Observation:
    """Call `tick` often; it shows each model's instances when the policy in force wants to see them. No clock."""

    def __init__(self, on_shown: Callable[[float], None] = lambda _: None) -> None:
        """`on_shown` is called before the policy is shown anything, with the time."""
        self._on_shown = on_shown
        self._policy: Policy | None = None
        self._due_s = 0.0

    def tick(self, policy: Policy, table: ClusterTable, now_s: float) -> None:
        """Time has passed. A policy that has just come into force is shown the cluster at once."""
        if policy is not self._policy:
            self._policy, self._due_s = policy, now_s
        if not is_observer(policy) or now_s < self._due_s:
            return
        self._due_s += policy.interval_s
        if self._due_s <= now_s:  # what was missed is not made up for
            self._due_s = now_s + policy.interval_s
        self._on_shown(now_s)
        for model in table.models():
            if (snapshot := table.snapshot(model)) is not None:
                policy.observe(snapshot, now_s)
