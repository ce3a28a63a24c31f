"""What the planner can be told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Nothing yet: this version makes no plans, it shows the one in the state store."""
