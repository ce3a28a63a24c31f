"""Which workers hang: those whose process is frozen, within a second, and those whose engine makes no step. Pure; time
is an argument.

While a worker has requests of a stream, it sends on that stream at least every 0.15 s, a heartbeat if no step brought
anything; while it has none, every second, so that the next request is not sent to one that is frozen. A frozen process
(SIGSTOP, a machine that swaps or is suspended) sends none and answers no probe on another connection either. A busy one
sends them through the longest prefill. A heartbeat says for how long the engine has made no step, so an engine that
hangs under a live process shows as well, only later: a step may take seconds.

A network may lose what goes to a worker and let through what comes from it (a firewall's rule, a half-broken switch):
its heartbeats go on, and new requests never arrive. So each message says how many of ours have come, and a worker that
sends on and on and does not get what it was sent counts as hung too. Without it, it takes the 13 s of a connection's
keep-alive.

To take a request from a worker that is merely slow loses no token, but costs its prefill once more, so under
overload false alarms would feed themselves. Four things keep them away:
- Others are not blamed for our own lateness: of the time between two looks, no more counts than a punctual look takes.
- The bound grows with the silences that ended well. (Hayashibara et al., "The phi accrual failure detector", 2004, fit
  a distribution; there are too few silences for that here, so it is their maximum.)
- A probe on another connection must have failed, too.
- If nobody else is heard from either, it is more likely us, or there is nobody to take the requests anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from controlplane.model.incarnation import Incarnation
from mesh.invariants import invariants

LONGEST_LOOK_S: Final = 0.15
IDLE_FREEZE_S: Final = 2.5
"""The silence by which a worker that has no request counts as frozen."""
DEAF_S: Final = 3.0
"""A worker that sends counts as deaf when it has not got a message for so long: an idle one tells once a second, and a
slow link may take most of another, each way."""
LONGEST_LEARNT_S: Final = 1.0
"""Silences beyond it were no jitter."""
REMEMBERED_S: Final = 30.0
"""A silence raises the bound for so long, and up to twice as long."""
MARGIN: Final = 2.0
"""The bound is so many times the longest silence that ended well."""


class Hang(Enum):
    """In which way a worker hangs."""

    FROZEN = "frozen"
    """Its process does nothing: it neither sends nor answers a probe."""
    STALLED = "stalled"
    """Its process lives, its engine makes no step."""
    DEAF = "deaf"
    """It sends, and does not get what it is sent."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What is known of a worker when it is looked at."""

    requests: int
    """Of ours that it has."""
    messages: int
    """Received from it so far."""
    stalled_s: float
    """For how long its engine had made no step, as of the last of them."""
    heard: int = 0
    """Messages of ours that it had got, by its own count."""
    unheard: int = 0
    """Those that it had not."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the worker for a sign of life on another connection, and tell `probed`."""

    worker: Incarnation
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Hung:
    """Take its requests from the worker; said once for each silence."""

    worker: Incarnation
    hang: Hang
    silence_s: float
    """Since its last message, since its engine's last step, or since it last got a message."""


Finding: TypeAlias = Probe | Hung


@dataclass(slots=True)
class _Watched:
    messages: int
    is_busy: bool = False
    """It has requests of ours."""
    silence_s: float = 0.0
    """Since its last message, or since it has requests."""
    unseen_s: float = 0.0
    """Since its last message or answered probe."""
    heard: int = 0
    unheard_s: float = 0.0
    """Since it last got a message, with more of them under way to it."""
    is_deaf: bool = False
    """Reported as such, until it gets another message."""
    is_probing: bool = False
    probe_failed: bool = False
    is_reported: bool = False
    longest_s: float = 0.0
    """Of the silences that ended well, in the present period."""
    longest_before_s: float = 0.0
    """The same, in the period before the present one."""

    def hear(self, messages: int) -> None:
        """A message has come: the silence is over."""
        self.messages = messages
        self.begin()

    def count_unheard(self, seen: Sighting, elapsed_s: float) -> None:
        """Count for how long nothing of ours has come to it."""
        self.unheard_s += elapsed_s
        if not seen.unheard or seen.heard != self.heard:
            self.unheard_s, self.is_deaf = 0.0, False
        self.heard = seen.heard

    def begin(self) -> None:
        """Count the silence from here on."""
        self.silence_s = self.unseen_s = 0.0
        self.probe_failed = self.is_reported = False

    def learn(self) -> None:
        """The silence was one of a live worker: the next one may be as long."""
        self.longest_s = max(self.longest_s, min(self.silence_s, LONGEST_LEARNT_S))


class LivenessMonitor:
    """Of all workers that a frontend is connected to."""

    def __init__(self, freeze_s: float, stall_s: float) -> None:
        """`freeze_s`: the shortest silence of a frozen process; `stall_s`: an engine that has requests makes a step
        within it."""
        self._freeze_s = freeze_s
        self._stall_s = stall_s
        self._watched: dict[Incarnation, _Watched] = {}
        self._looked_s: float | None = None
        self._period_began_s = 0.0

    def look(self, now_s: float, sightings: Mapping[Incarnation, Sighting]) -> list[Finding]:
        """Call it some ten times a second, with all workers that are connected."""
        elapsed_s = 0.0 if self._looked_s is None else min(max(0.0, now_s - self._looked_s), LONGEST_LOOK_S)
        self._looked_s = now_s
        is_new_period = now_s - self._period_began_s >= REMEMBERED_S
        if is_new_period:
            self._period_began_s = now_s
        self._watched = {
            worker: self._watched.get(worker) or _Watched(seen.messages) for worker, seen in sightings.items()
        }
        for worker, seen in sightings.items():
            watched = self._watched[worker]
            if is_new_period:
                watched.longest_before_s, watched.longest_s = watched.longest_s, 0.0
            watched.silence_s += elapsed_s
            watched.unseen_s += elapsed_s
            watched.count_unheard(seen, elapsed_s)
            if seen.messages != watched.messages:
                if watched.is_busy:
                    watched.learn()
                watched.hear(seen.messages)
            elif seen.requests and not watched.is_busy:
                watched.begin()  # an idle one is heard less often
            watched.is_busy = bool(seen.requests)
        found = (self._judge(worker, seen) for worker, seen in sightings.items())
        return [finding for finding in found if finding is not None]

    def probed(self, worker: Incarnation, *, is_alive: bool) -> None:
        """A `Probe` has ended: whether the worker answered it within its deadline."""
        watched = self._watched.get(worker)
        if watched is None or not watched.is_probing:
            return
        watched.is_probing = False
        if is_alive:
            watched.unseen_s = 0.0
        elif watched.unseen_s > 0:  # nothing has come meanwhile
            watched.probe_failed = True

    def bound_s(self, worker: Incarnation) -> float:
        """The silence of this worker by which it counts as frozen, now."""
        watched = self._watched[worker]
        if not watched.is_busy:
            return IDLE_FREEZE_S
        longest_s = max(watched.longest_s, watched.longest_before_s)
        return min(max(self._freeze_s, MARGIN * longest_s), self._stall_s)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        for worker, watched in self._watched.items():
            assert 0 <= watched.unseen_s <= watched.silence_s, f"{worker} was seen before it fell silent"
            assert 0 <= max(watched.longest_s, watched.longest_before_s) <= LONGEST_LEARNT_S, f"{worker} taught a lot"
            assert not watched.is_deaf or watched.unheard_s >= DEAF_S, f"{worker} was called deaf too early"
            assert self.bound_s(worker) <= max(self._stall_s, IDLE_FREEZE_S), f"{worker} may be silent for too long"

    def _judge(self, worker: Incarnation, seen: Sighting) -> Finding | None:
        watched, bound_s = self._watched[worker], self.bound_s(worker)
        if watched.unheard_s >= DEAF_S and watched.silence_s == 0 and not watched.is_deaf:
            watched.is_deaf = True
            return Hung(worker, Hang.DEAF, watched.unheard_s)
        if watched.is_reported:
            return None
        if watched.is_busy and seen.stalled_s >= self._stall_s:
            return self._report(worker, Hang.STALLED, seen.stalled_s)
        if watched.is_busy and watched.silence_s >= self._stall_s:
            return self._report(worker, Hang.FROZEN if watched.probe_failed else Hang.STALLED, watched.silence_s)
        if watched.probe_failed:
            is_alone = watched.unseen_s >= bound_s and self._others_are_heard(worker)
            return self._report(worker, Hang.FROZEN, watched.silence_s) if is_alone else None
        if watched.unseen_s >= bound_s / 2 and not watched.is_probing:
            watched.is_probing = True
            return Probe(worker, bound_s / 2)
        return None

    def _others_are_heard(self, worker: Incarnation) -> bool:
        """Or there are no others. Those without a request are heard too seldom to tell of one that has some."""
        is_busy = self._watched[worker].is_busy
        others = [other for other, watched in self._watched.items() if other != worker and watched.is_busy >= is_busy]
        return not others or any(self._watched[other].unseen_s < self.bound_s(other) / 2 for other in others)

    def _report(self, worker: Incarnation, hang: Hang, silence_s: float) -> Hung:
        self._watched[worker].is_reported = True
        return Hung(worker, hang, silence_s)
