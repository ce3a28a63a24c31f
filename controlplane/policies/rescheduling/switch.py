"""Which mode reschedules each model: the configured one, or a simpler one while it lacks what it needs. Pure."""

from dataclasses import dataclass
from typing import TypeAlias

from controlplane.policies.rescheduling.parameters import PREDICTING, ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.rescheduler import Rescheduler
from controlplane.policies.rescheduling.trajectory_planner import TrajectoryPlanner
from controlplane.policies.rescheduling.view import DecodeView

LEAST_PREDICTED = 0.5
"""Share of the running requests that must have a prediction for a mode that goes by them."""
FEWEST_INSTANCES = 2

Decider: TypeAlias = Rescheduler | TrajectoryPlanner
"""Whoever decides in a mode."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """A mode that stands in for the configured one."""

    mode: ReschedulerMode
    reason: str


class ReschedulerSwitch:
    """Holds the configuration and each model's fallback."""

    def __init__(self, mode: ReschedulerMode) -> None:
        self.mode = mode
        self.parameters = ReschedulerParameters()
        self.fallbacks: dict[str, Fallback] = {}
        """The mode that stands in for the configured one, by model; models without one are not named."""
        self._reschedulers: dict[ReschedulerMode, Decider] = {}

    def configure(self, mode: ReschedulerMode, parameters: ReschedulerParameters) -> bool:
        """Use this configuration from now on; True where it is another than before, which ends all fallbacks."""
        if (mode, parameters) == (self.mode, self.parameters):
            return False
        self.mode, self.parameters = mode, parameters
        self.fallbacks.clear()
        self._reschedulers.clear()
        return True

    def rescheduler(self, view: DecodeView) -> tuple[Decider, bool]:
        """Who decides about this model now, and whether that has just changed."""
        before = self.fallbacks.get(view.model)
        now = self._fallback(view)
        if now is None:
            self.fallbacks.pop(view.model, None)
        else:
            self.fallbacks[view.model] = now
        mode = self.mode if now is None else now.mode
        if mode not in self._reschedulers:
            is_planned = mode is ReschedulerMode.TRAJECTORIES
            self._reschedulers[mode] = (
                TrajectoryPlanner(self.parameters) if is_planned else Rescheduler(mode, self.parameters)
            )
        return self._reschedulers[mode], (before and before.mode) != (now and now.mode)

    def _fallback(self, view: DecodeView) -> Fallback | None:
        if self.mode is ReschedulerMode.OFF:
            return None
        if view.unheard and len(view.instances) < FEWEST_INSTANCES:
            instance_id, reason = next(iter(view.excluded.items()))
            others = f" (and {len(view.excluded) - 1} more)" if len(view.excluded) > 1 else ""
            return Fallback(
                ReschedulerMode.OFF,
                f"the running requests of fewer than {FEWEST_INSTANCES} instances of {view.model} are known: "
                f"{instance_id} {reason}{others}",
            )
        if self.mode not in PREDICTING:
            return None
        if not view.requests:  # nothing says that lengths are predicted again; other reasons are over
            former = self.fallbacks.get(view.model)
            return former if former is not None and former.mode is ReschedulerMode.CURRENT else None
        if view.predicted_requests < LEAST_PREDICTED * view.requests:
            return Fallback(
                ReschedulerMode.CURRENT,
                f"only {view.predicted_requests} of {view.requests} running requests of {view.model} have a predicted "
                "length; serve a length predictor for the model",
            )
        return None
