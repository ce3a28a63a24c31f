"""A workload on a cascade, and what its replicas are known to do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from controlplane.planning.cascade.replica import ReplicaCurve
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.tables import CurveSource
from simulator.cascade.deployed import Deployed
from simulator.cascade.tier import Tier


@dataclass(frozen=True, slots=True, eq=False)
class PlanningProblem:
    """The workload, tiers and GPUs that every compared system is given."""

    sample: CascadeSample
    """The workload at the rate to plan for."""
    tiers: Sequence[Tier]
    source: CurveSource
    gpus: int
    judge_s: float
    uniform_gpus: tuple[int, ...]
    by_load: tuple[tuple[ReplicaCurve, ...], ...]
    """Of each tier, in all shapes, under a mean of all workloads: what a system knows that looks at load alone."""

    def at(self, rate_per_s: float) -> "PlanningProblem":
        """The same problem at another rate."""
        return replace(self, sample=replace(self.sample, rate_per_s=rate_per_s))


System = Callable[[PlanningProblem, float], Deployed]
"""Of a problem and a quality target. Raises `PlanInfeasible` where the system knows of no way."""
