"""What replicas sustain: by a measured or simulated curve, or by what was seen of them (pure)."""

from bisect import bisect_left
from dataclasses import dataclass, field
from math import ceil

from mesh.invariants import invariants

UNPROVEN = 1.5
"""How far above the highest rate that was seen to be sustained a replica is tried, until one was seen to fail."""
LESS = 0.9
"""After a failure at a rate, this part of it counts as sustained."""


@dataclass(frozen=True, slots=True)
class CapacityCurve:
    """Of one replica among several equal ones, at steady rates (requests per second and replica, ascending)."""

    rates_per_s: tuple[float, ...]
    shares: tuple[float, ...]
    """Of the requests that are within the SLO, at each rate."""
    in_flight: tuple[float, ...] = ()
    """Mean requests under way on a replica, at each rate."""
    saturation_per_s: float = float("inf")
    """Above it a queue grows without end."""

    def share_at(self, rate_per_s: float) -> float:
        """Between the measured rates by a straight line; 0 from the last one on."""
        return _between(self.rates_per_s, self.shares, rate_per_s, beyond=0.0)

    def in_flight_at(self, rate_per_s: float) -> float:
        """Between the measured rates by a straight line; beyond, as at the last one."""
        return _between(self.rates_per_s, self.in_flight, rate_per_s, beyond=self.in_flight[-1])

    def capacity_per_s(self, share: float) -> float:
        """The highest rate up to which so many requests are within the SLO; 0 if there is none."""
        best, before = 0.0, (0.0, 1.0)
        for rate, here in zip(self.rates_per_s, self.shares, strict=True):
            if here < share:
                fell = before[1] - here
                return before[0] + (rate - before[0]) * ((before[1] - share) / fell) if before[0] else 0.0
            best, before = rate, (rate, here)
        return best


def _between(at: tuple[float, ...], values: tuple[float, ...], x: float, *, beyond: float) -> float:
    place = bisect_left(at, x)
    if place == len(at):
        return beyond
    if place == 0:
        return values[0]
    part = (x - at[place - 1]) / (at[place] - at[place - 1])
    return values[place - 1] + part * (values[place] - values[place - 1])


@dataclass(slots=True)
class SeenCapacity:
    """What a replica was seen to sustain: the highest rate with the SLO kept, below the lowest at which it was not.

    Used where there is no profile, or none that says anything. One failure lowers it at once; it rises again by being
    tried.
    """

    kept_per_s: float = 0.0
    broken_per_s: float = field(default=float("inf"))

    def saw(self, rate_per_s: float, kept: bool) -> None:
        """A whole interval at this rate for each serving replica."""
        if rate_per_s <= 0:
            return
        if kept:
            self.kept_per_s = max(self.kept_per_s, rate_per_s)
            if rate_per_s >= self.broken_per_s:
                self.broken_per_s = float("inf")
        else:
            self.broken_per_s = min(self.broken_per_s, rate_per_s)
            self.kept_per_s = min(self.kept_per_s, LESS * rate_per_s)

    @property
    def capacity_per_s(self) -> float:
        """What a replica is given; 0 while nothing is known."""
        if self.broken_per_s == float("inf"):
            return UNPROVEN * self.kept_per_s
        return max(self.kept_per_s, LESS * self.broken_per_s)

    @invariants
    def validate(self) -> None:
        """Check that what was kept is below what was not. Raises `InvariantBroken`."""
        assert 0 <= self.kept_per_s < self.broken_per_s


@dataclass(slots=True)
class ReplicaCapacity:
    """What a replica is counted with, by what is known best of it."""

    curve: CapacityCurve | None = None
    """By a profile; None: there is none that holds the SLO."""
    by: str = ""
    """The profile, or why there is no curve; empty: nobody has looked for one."""
    seen: SeenCapacity = field(default_factory=SeenCapacity)

    def learn(self, curve: CapacityCurve | None, by: str, share: float) -> None:
        """A curve by which no rate holds the SLO for this share of the requests says nothing: what is seen counts."""
        holds = curve is not None and curve.capacity_per_s(share) > 0
        self.curve = curve if holds else None
        self.by = f"{by} holds the SLO at no rate" if curve is not None and not holds else by

    def per_s(self, stated_per_s: float | None, share: float) -> float:
        """Requests per second; 0 while nothing is known. `stated_per_s`: by whoever set the policy."""
        if stated_per_s is not None:
            return stated_per_s
        return self.seen.capacity_per_s if self.curve is None else self.curve.capacity_per_s(share)

    def source(self, stated_per_s: float | None) -> str:
        """Where that comes from, in words."""
        if stated_per_s is not None:
            return "by the policy"
        if self.curve is not None:
            return f"by the profile {self.by}"
        return f"as seen ({self.by})" if self.by else "as seen"


def replicas_for(rate_per_s: float, capacity_per_s: float) -> int:
    """The least replicas that sustain a rate, none for no rate."""
    assert capacity_per_s > 0
    return ceil(rate_per_s / capacity_per_s - 1e-9)
