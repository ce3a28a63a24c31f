"""What the planner can be told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Goals and plans stand in the state store; this is about when to plan anew."""

    drift_ratio: float = 1.3
    """Rates and lengths that differ from those planned for by more than this factor have moved."""
    drift_score_points: float = 10.0
    """So have mean scores of the smallest tier that differ by more than this."""
    drift_windows: int = 2
    """So many windows in a row must have moved."""
    drift_pause_windows: int = 2
    """So many windows after a plan are not counted."""
    plan_deadline_s: float = 600.0
    """What making a plan may take; then its process is ended and the plan in force stays."""
    seed: int = 0
    """Of the simulations that latency tables come from."""
