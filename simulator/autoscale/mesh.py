"""A model's replicas in time: ordered, starting, serving, leaving; and what they make of a rate (pure).

A fluid model, since a day of millions of requests is replayed many times: what a replica does at a steady rate was
simulated request by request (`curve`), and here rates move slowly against the seconds that a request takes. What comes
beyond saturation waits, and is late. `tests/unit/simulator/autoscale` holds it against the request-level simulator.
"""

from collections import deque
from dataclasses import dataclass, field

from controlplane.planning.autoscale.capacity import CapacityCurve
from mesh.invariants import invariants

RATE_S = 60.0
"""A rate is what came in so long: steady-state shares already contain the chance of shorter times."""


@dataclass(frozen=True, slots=True)
class StartUp:
    """How long replicas take to come and to go, for everybody alike."""

    cold_start_s: float
    """From the order until it serves; it is paid for meanwhile."""
    drain_s: float
    """From the order to leave until it is gone; it is paid for and takes no requests."""


@dataclass(frozen=True, slots=True)
class MeshState:
    """What a scaler can observe."""

    now_s: float
    wanted: int
    serving: int
    waiting: float
    """Requests that no replica works on."""
    in_flight: float
    """Requests under way and waiting, of all replicas."""
    utilisation: float
    """Of the serving replicas: their rate over the rate that saturates them, at most 1."""


@dataclass(slots=True)
class FluidMesh:
    """One model. `advance` a step, read `state`, and `scale`."""

    curve: CapacityCurve
    times: StartUp
    step_s: float
    serving: int
    replica_s: float = 0.0
    """Paid for so far."""
    requests: float = 0.0
    kept: float = 0.0
    """Of them within the SLO."""
    now_s: float = 0.0
    _ready_s: deque[float] = field(default_factory=deque)
    """When each starting replica serves, soonest first."""
    _gone_s: deque[float] = field(default_factory=deque)
    _recent: deque[int] = field(default_factory=deque)
    _backlog: float = 0.0

    @property
    def wanted(self) -> int:
        """Serving and starting."""
        return self.serving + len(self._ready_s)

    def advance(self, arrivals: int) -> tuple[int, float]:
        """A step in which so many requests come; returns how many came, and how many of them are within the SLO."""
        self.now_s += self.step_s
        while self._ready_s and self._ready_s[0] <= self.now_s:
            self._ready_s.popleft()
            self.serving += 1
        while self._gone_s and self._gone_s[0] <= self.now_s:
            self._gone_s.popleft()
        self.replica_s += self.step_s * (self.wanted + len(self._gone_s))
        self._recent.append(arrivals)
        if len(self._recent) * self.step_s > RATE_S:
            self._recent.popleft()
        room = self.serving * self.curve.saturation_per_s * self.step_s
        was_late = self._backlog > 0
        self._backlog = max(0.0, self._backlog + arrivals - room)
        share = 0.0 if was_late or self._backlog or not self.serving else self.curve.share_at(self._rate_per_replica)
        kept = arrivals * share
        self.requests += arrivals
        self.kept += kept
        return arrivals, kept

    def scale(self, wanted: int) -> None:
        """Order or give up replicas: those that are starting go first, they serve nobody."""
        while self.wanted < wanted:
            self._ready_s.append(self.now_s + self.times.cold_start_s)
        while self.wanted > wanted and self._ready_s:
            self._ready_s.pop()
        while self.serving > wanted:
            self.serving -= 1
            self._gone_s.append(self.now_s + self.times.drain_s)

    @property
    def state(self) -> MeshState:
        """As of now."""
        rate = self._rate_per_replica
        busy = min(rate, self.curve.saturation_per_s)
        in_flight = self.serving * self.curve.in_flight_at(busy) + self._backlog if self.serving else self._backlog
        used = 1.0 if self._backlog else min(1.0, rate / self.curve.saturation_per_s)
        return MeshState(self.now_s, self.wanted, self.serving, self._backlog, in_flight, used)

    @property
    def _rate_per_replica(self) -> float:
        rate = sum(self._recent) / (len(self._recent) * self.step_s) if self._recent else 0.0
        return rate / max(1, self.serving)

    @invariants
    def validate(self) -> None:
        """Check what must hold between two steps. Raises `InvariantBroken`."""
        assert self.serving >= 0
        assert self._backlog >= 0
        assert self.kept <= self.requests + 1e-6
        assert list(self._ready_s) == sorted(self._ready_s)
