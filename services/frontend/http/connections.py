"""Which connections of clients are kept, and which are closed because they only hold a place. Pure.

    WAITING --head complete--> BUSY --answered--> IDLE --first byte of the next request--> WAITING
       |                                            |
       '---- late, or shed ---> gone <--- shed -----'

A client that sends its request's head byte by byte (slowloris) is WAITING, and costs a place, not a task. There are
only so many places. Where all are taken the one that has waited longest goes, if it has waited longer than any honest
client would, then the one that has been idle longest; those that are served never go.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from mesh.invariants import invariants

SUSPECT_S: Final = 1.0
"""A client that has sent no whole head for so long is closed before one that is idle."""


class ConnectionState(StrEnum):
    """What a connection is there for."""

    WAITING = "waiting"
    """Part of a request has come, or nothing at all yet."""
    BUSY = "busy"
    """A request of it is served."""
    IDLE = "idle"
    """Kept for the client's next request."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A client has connected."""

    connection: Hashable


@dataclass(frozen=True, slots=True)
class Began:
    """The first byte of another request has come."""

    connection: Hashable


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's head is complete."""

    connection: Hashable


@dataclass(frozen=True, slots=True)
class Answered:
    """All its requests are answered. `is_whole`: the last one's body has come, too."""

    connection: Hashable
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection has ended, for whatever reason. Allowed for any."""

    connection: Hashable


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = Opened | Began | Asked | Answered | Lost | Tick


class Because(StrEnum):
    """Why a connection is closed."""

    LATE = "late"
    """Its request did not come in time."""
    SHED = "shed"
    """For another one, because all places are taken."""
    FULL = "full"
    """All places are taken by requests that are served."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection. `Lost` follows, or not: it is counted no more."""

    connection: Hashable
    because: Because


@dataclass(slots=True)
class ConnectionManager:
    """Of one port."""

    max_connections: int
    header_timeout_s: float
    _waiting: dict[Hashable, float] = field(default_factory=dict)
    """Since when; those that have waited longest first."""
    _idle: dict[Hashable, None] = field(default_factory=dict)
    """Those that have been idle longest first."""
    _busy: set[Hashable] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._idle) + len(self._busy)

    def state(self, connection: Hashable) -> ConnectionState | None:
        """None: it is not counted."""
        if connection in self._waiting:
            return ConnectionState.WAITING
        if connection in self._busy:
            return ConnectionState.BUSY
        return ConnectionState.IDLE if connection in self._idle else None

    def handle(self, event: Event, now_s: float) -> list[Close]:
        """What to close, now that this has happened."""
        match event:
            case Opened(connection):
                return self._open(connection, now_s)
            case Began(connection):
                if connection in self._idle:
                    del self._idle[connection]
                    self._waiting[connection] = now_s
            case Asked(connection):
                if self._forget(connection):
                    self._busy.add(connection)
            case Answered(connection, is_whole):
                if connection in self._busy:
                    self._busy.discard(connection)
                    if is_whole:
                        self._idle[connection] = None
                    else:
                        self._waiting[connection] = now_s
            case Lost(connection):
                self._forget(connection)
            case Tick():
                return self._look(now_s)
        return []

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert len(self) <= self.max_connections, "no more than there are places"
        assert not self._waiting.keys() & self._idle.keys(), "one state each"
        assert not self._busy & (self._waiting.keys() | self._idle.keys()), "one state each"
        since = list(self._waiting.values())
        assert since == sorted(since), "in the order in which they began to wait"

    def _open(self, connection: Hashable, now_s: float) -> list[Close]:
        closed: list[Close] = []
        if len(self) >= self.max_connections:
            victim = self._victim(now_s)
            if victim is None:
                return [Close(connection, Because.FULL)]
            self._forget(victim)
            closed.append(Close(victim, Because.SHED))
        self._waiting[connection] = now_s
        return closed

    def _victim(self, now_s: float) -> Hashable | None:
        slowest = next(iter(self._waiting.items()), None)
        if slowest is not None and now_s - slowest[1] >= SUSPECT_S:
            return slowest[0]
        return next(iter(self._idle), None)

    def _look(self, now_s: float) -> list[Close]:
        late: list[Close] = []
        for connection, since_s in self._waiting.items():
            if now_s - since_s < self.header_timeout_s:
                break  # those behind it have waited for less
            late.append(Close(connection, Because.LATE))
        for each in late:
            self._forget(each.connection)
        return late

    def _forget(self, connection: Hashable) -> bool:
        """Whether it was there."""
        was_waiting = self._waiting.pop(connection, None) is not None
        was_idle = connection in self._idle
        self._idle.pop(connection, None)
        was_busy = connection in self._busy
        self._busy.discard(connection)
        return was_waiting or was_idle or was_busy
