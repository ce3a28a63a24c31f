"""What makes one routing better than another (Cascadia, section 3.3 and appendix C)."""

from dataclasses import dataclass
from typing import Protocol

from mesh.errors import ConfigurationError

PENALTY = 1e6
"""mu and nu: so large that a routing which misses the target loses against any that meets it. The paper's example has
100, which a latency of a minute outweighs."""


class Objective(Protocol):
    """Scores a routing, so that the search compares numbers: J, lower is better."""

    def score(self, latency_s: float, quality: float) -> float:
        """J of a routing with this latency (whichever the plan minimises) and this mean quality."""
        ...


@dataclass(frozen=True, slots=True)
class MinimiseLatency:
    """The `Objective` of a quality target: J = L + mu max(0, (q_min - Q) / (z_1 - z_2)), with the latency L in seconds
    and the mean quality Q."""

    quality: float
    """q_min, 0 to 100."""
    utopia: float
    """z_1: quality when the largest tier answers everything."""
    nadir: float
    """z_2: quality when the smallest does."""
    penalty: float = PENALTY

    def __post_init__(self) -> None:
        if not 0 <= self.quality <= 100:
            raise ConfigurationError(f"a quality target goes from 0 to 100, got {self.quality}")

    def score(self, latency_s: float, quality: float) -> float:
        return latency_s + self.penalty * max(0.0, self.quality - quality) / _span(self.utopia, self.nadir)


@dataclass(frozen=True, slots=True)
class MaximiseQuality:
    """The `Objective` of a latency budget: J = -Q + nu max(0, L - L_max) / (worst - best latency)."""

    latency_s: float
    """L_max."""
    best_s: float
    """Latency when the smallest tier answers everything."""
    worst_s: float
    """Latency when the largest does."""
    penalty: float = PENALTY

    def __post_init__(self) -> None:
        if self.latency_s <= 0:
            raise ConfigurationError(f"a latency budget is above 0 s, got {self.latency_s}")

    def score(self, latency_s: float, quality: float) -> float:
        return self.penalty * max(0.0, latency_s - self.latency_s) / _span(self.worst_s, self.best_s) - quality


def _span(one: float, other: float) -> float:
    """Distance of the anchors; where they coincide (tiers of equal quality), 1: nothing to normalise by."""
    return abs(one - other) or 1.0
