"""A circuit breaker for one peer: opened by the first request that the peer misses, closed again by a probe.

Unlike Nygard's original ("Release It!"), no request of a client tries a peer that may still be ill: while half open,
only the probe is under way. Pure; time is an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from mesh.backoff import Backoff
from mesh.errors import IllegalTransition
from mesh.invariants import invariants


class BreakerState(StrEnum):
    """Whether the peer may be asked."""

    CLOSED = "closed"
    """Requests may be sent."""
    OPEN = "open"
    """It may not; a probe is due some time."""
    HALF_OPEN = "half_open"
    """It may not; a probe is under way."""


class BreakerEvent(StrEnum):
    """What changes the state of a breaker."""

    MISS = "miss"
    """The peer did not do what it was asked to."""
    PROBE = "probe"
    """A single request is sent to see whether the other side answers again."""
    PROBE_OK = "probe_ok"
    PROBE_FAILED = "probe_failed"


TRANSITIONS: Mapping[tuple[BreakerState, BreakerEvent], BreakerState] = MappingProxyType(
    {
        (BreakerState.CLOSED, BreakerEvent.MISS): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerEvent.MISS): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerEvent.PROBE): BreakerState.HALF_OPEN,
        # A late miss of what was asked before: the probe knows better.
        (BreakerState.HALF_OPEN, BreakerEvent.MISS): BreakerState.HALF_OPEN,
        (BreakerState.HALF_OPEN, BreakerEvent.PROBE_OK): BreakerState.CLOSED,
        (BreakerState.HALF_OPEN, BreakerEvent.PROBE_FAILED): BreakerState.OPEN,
    }
)


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """How long a breaker stays open before each probe, in seconds."""

    first_pause_s: float = 0.1
    """From a miss to the first probe; doubles with every failure."""
    longest_pause_s: float = 2.0
    healthy_s: float = 10.0
    """A peer that was well for so long starts again from the first pause. One that answers probes and misses
    requests costs one missed request for each pause."""

    def __post_init__(self) -> None:
        """A pause of 0 would be a busy loop."""
        assert 0 < self.first_pause_s <= self.longest_pause_s, self
        assert self.healthy_s > 0, self


class CircuitBreaker:
    """Starts open, with a probe due at once: a peer is asked nothing before it has shown that it answers."""

    def __init__(self, name: str, now_s: float, limits: BreakerLimits | None = None) -> None:
        """`name` tells in errors whose breaker this is."""
        self.state = BreakerState.OPEN
        self.probe_due_s = now_s
        """When the next probe is due, while open."""
        self._name = name
        self._limits = limits or BreakerLimits()
        self._backoff = Backoff(self._limits.first_pause_s, self._limits.longest_pause_s)
        self._closed_s = now_s
        self._probed_s = -float("inf")

    @property
    def is_closed(self) -> bool:
        """Whether the peer may be asked."""
        return self.state is BreakerState.CLOSED

    def miss(self, now_s: float) -> bool:
        """The peer missed a request. True if that opened the breaker."""
        was_closed = self.is_closed
        self._move(BreakerEvent.MISS)
        if was_closed:
            if now_s - self._closed_s >= self._limits.healthy_s:
                self._backoff.reset()
            self._pause(now_s)
        return was_closed

    def wake(self, now_s: float) -> None:
        """Something was heard of the peer: while open, probe it soon, but not more often than by the first pause."""
        if self.state is BreakerState.OPEN:
            self.probe_due_s = min(self.probe_due_s, max(now_s, self._probed_s + self._limits.first_pause_s))

    def begin_probe(self, now_s: float) -> None:
        """A probe goes out. Raises `IllegalTransition` unless the breaker is open."""
        self._move(BreakerEvent.PROBE)
        self._probed_s = now_s

    def end_probe(self, ok: bool, now_s: float) -> None:
        """What became of the probe. Raises `IllegalTransition` if none is under way."""
        self._move(BreakerEvent.PROBE_OK if ok else BreakerEvent.PROBE_FAILED)
        if ok:
            self._closed_s = now_s
        else:
            self._pause(now_s)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        if self.state is BreakerState.OPEN:
            assert self.probe_due_s < float("inf"), "an open breaker is probed some time"
        else:
            assert self._probed_s > -float("inf"), "nothing but a probe closes it"
        if self.is_closed:
            assert self._closed_s >= self._probed_s, "it was closed by the probe that went out last"

    def _pause(self, now_s: float) -> None:
        self.probe_due_s = now_s + self._backoff.next_s()

    def _move(self, event: BreakerEvent) -> None:
        if (self.state, event) not in TRANSITIONS:
            raise IllegalTransition(f"the breaker of {self._name} is {self.state}; there is no {event} from there")
        self.state = TRANSITIONS[self.state, event]
