"""Who decides how many replicas there are: Penstock's manager, and its rivals as their users set them up (pure)."""

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.replica_kind import KindReplicas
from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.planning.autoscale.events import (
    Adopted,
    CapacityKnown,
    Led,
    Observed,
    PolicySet,
    Scale,
    Seen,
    Tick,
)
from controlplane.planning.autoscale.manager import AutoscaleManager
from simulator.autoscale.mesh import MeshState


class Scaler(Protocol):
    """Called after every step, with what came and was kept in it; returns how many replicas there are to be."""

    def wanted(self, state: MeshState, arrivals: int, kept: float) -> int: ...


class ManagerScaler:
    """The manager that a live planner runs, fed with what a live planner hears."""

    def __init__(
        self, policy: AutoscalePolicy, curve: CapacityCurve | None, kinds: tuple[KindReplicas, ...] = ()
    ) -> None:
        """`kinds`: what stands at the beginning, where the policy names some."""
        self.kinds = kinds
        self.manager = AutoscaleManager()
        self._model = policy.model
        self.manager.handle(PolicySet(policy.model, policy), 0.0)
        self.manager.handle(CapacityKnown(policy.model, curve), 0.0)
        self.manager.handle(Led(True), 0.0)
        if kinds:
            self.manager.handle(Adopted(policy.model, sum(each.replicas for each in kinds), kinds), 0.0)

    def wanted(self, state: MeshState, arrivals: int, kept: float) -> int:
        """As the manager says, and as before while it says nothing."""
        running = {f"replica-{number}": 0 for number in range(state.serving)}
        events = (
            Seen(self._model, running),
            Observed(self._model, arrivals, arrivals, round(kept), round(state.waiting)),
            Tick(),
        )
        wanted = state.wanted
        for event in events:
            for instruction in self.manager.handle(event, state.now_s):
                if isinstance(instruction, Scale):
                    wanted, self.kinds = instruction.replicas, instruction.kinds
        return wanted


@dataclass(slots=True)
class _Stabilised:
    """The horizontal pod autoscaler's own: down to the highest of what was recommended in its window."""

    window_s: float
    recommended: deque[tuple[float, int]] = field(default_factory=deque)

    def down(self, now_s: float, desired: int) -> int:
        """What `desired` becomes."""
        self.recommended.append((now_s, desired))
        while self.recommended[0][0] < now_s - self.window_s:
            self.recommended.popleft()
        return max(count for _, count in self.recommended)


@dataclass(slots=True)
class UtilisationScaler:
    """Kubernetes' HorizontalPodAutoscaler on a utilisation, with its defaults.

    desired = ceil(replicas x utilisation / target), every 15 s, unless the ratio is within 10 % of 1; up by at most
    the double or four in 15 s, down after a window of 300 s (kubernetes.io, "Horizontal Pod Autoscaling").
    """

    target: float
    minimum: int
    maximum: int
    sync_s: float = 15.0
    tolerance: float = 0.1
    _next_s: float = 0.0
    _window: _Stabilised = field(default_factory=lambda: _Stabilised(300.0))

    def wanted(self, state: MeshState, arrivals: int, kept: float) -> int:
        """Every `sync_s`; as before in between."""
        if state.now_s < self._next_s:
            return state.wanted
        self._next_s = state.now_s + self.sync_s
        ratio = state.utilisation / self.target
        # Pods that are not ready count as using nothing when there would be more of them.
        desired = state.wanted if abs(ratio - 1) <= self.tolerance else ceil(state.serving * ratio - 1e-9)
        if ratio > 1:
            desired = min(max(desired, state.wanted), max(2 * state.wanted, state.wanted + 4))
        return min(max(self._window.down(state.now_s, desired), self.minimum), self.maximum)


@dataclass(slots=True)
class QueueScaler:
    """KEDA on the number of requests: desired = ceil(requests / target), asked every 30 s, through an autoscaler that
    goes down after a window of 300 s (keda.sh, "Scaling Deployments")."""

    target: float
    """Requests under way and waiting for each replica."""
    minimum: int
    maximum: int
    poll_s: float = 30.0
    tolerance: float = 0.1
    _next_s: float = 0.0
    _window: _Stabilised = field(default_factory=lambda: _Stabilised(300.0))

    def wanted(self, state: MeshState, arrivals: int, kept: float) -> int:
        """Every `poll_s`; as before in between."""
        if state.now_s < self._next_s:
            return state.wanted
        self._next_s = state.now_s + self.poll_s
        ratio = state.in_flight / (self.target * max(1, state.wanted))
        desired = state.wanted if abs(ratio - 1) <= self.tolerance else ceil(state.in_flight / self.target - 1e-9)
        return min(max(self._window.down(state.now_s, desired), self.minimum), self.maximum)
