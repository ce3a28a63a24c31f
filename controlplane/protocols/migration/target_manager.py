"""All migrations to one instance, those that ended a short while ago included."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from controlplane.protocols.migration.limits import ManagerLimits
from controlplane.protocols.migration.messages import Abort, Failed, Offer, Refuse, ToSource, ToTarget
from controlplane.protocols.migration.source_events import ObstacleChanged, Stopped
from controlplane.protocols.migration.target import (
    FINAL,
    Arrived,
    NotArrived,
    NotReserved,
    Reserved,
    Send,
    SourceLost,
    TargetEvent,
    TargetInstruction,
    TargetMigration,
    TargetState,
    Tick,
)
from mesh.invariants import invariants

ENDING = "the worker ends"


@dataclass(frozen=True, slots=True)
class Received:
    """A message came from a source. `connection` names the way it came, so that answers go back and its loss is known
    as the loss of the source."""

    connection: str
    message: ToTarget


@dataclass(frozen=True, slots=True)
class Answered:
    """Engine or transfer agent: how what was asked for one migration went."""

    migration_id: str
    event: Reserved | NotReserved | Arrived | NotArrived


@dataclass(frozen=True, slots=True)
class ConnectionEnded:
    """The source behind it is gone."""

    connection: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """The request's frontend has given it to this instance itself, for its life of this epoch: its source is lost,
    hangs or cannot be reached, and what moves to here is a former life."""

    request_id: str
    epoch: int


TargetManagerEvent: TypeAlias = Received | Answered | ConnectionEnded | Superseded | ObstacleChanged | Tick | Stopped


@dataclass(frozen=True, slots=True)
class Answer:
    """Send this to the source."""

    connection: str
    message: ToSource


@dataclass(frozen=True, slots=True)
class Do:
    """An instruction of one migration: anything but `Send`, which comes as an `Answer`."""

    migration_id: str
    instruction: TargetInstruction


@dataclass(frozen=True, slots=True)
class ArrivalEnded:
    """A migration to here has ended: nothing more is pulled or reserved for it."""

    migration_id: str
    state: TargetState
    duration_ms: float
    """Since the offer."""
    story: str
    """What happened, for logs."""


TargetManagerInstruction: TypeAlias = Answer | Do | ArrivalEnded
_Instructions: TypeAlias = Iterator[TargetManagerInstruction]


@dataclass(slots=True, eq=False)
class _Arrival:
    connection: str
    machine: TargetMigration
    began_ms: float
    ended_ms: float = 0.0
    """0 while it runs."""


class TargetManager:
    """Takes offers within the bounds, and answers for ended migrations as long as their sources may ask.

    Feed events to `handle` and carry out what it returns, in order; an answer that is known at once may be fed before
    the next instruction is carried out. `Tick` is due every 50 ms or so while any are `running`.
    """

    def __init__(self, limits: ManagerLimits | None = None) -> None:
        self.limits = limits or ManagerLimits()
        self._obstacle_reason = ""
        self._is_stopped = False
        self._running: dict[str, _Arrival] = {}
        """By migration id, in the order of their offers."""
        self._ended: dict[str, _Arrival] = {}
        """Those that are remembered, in the order of their ends."""

    def handle(self, event: TargetManagerEvent, now_ms: float) -> tuple[TargetManagerInstruction, ...]:
        """What is to be done about `event`."""
        handler: Callable[[TargetManagerEvent, float], Iterable[TargetManagerInstruction]]
        handler = _HANDLERS[type(event)].__get__(self)
        return tuple(handler(event, now_ms))

    @property
    def running(self) -> int:
        """Migrations that have not ended."""
        return len(self._running)

    def is_running(self, migration_id: str) -> bool:
        """Whether the migration is here and has not ended."""
        return migration_id in self._running

    def moved_lately(self, request_id: str) -> bool:
        """Whether the request moves to here or did so a short while ago."""
        arrivals = chain(self._running.values(), self._ended.values())
        return any(arrival.machine.offer.request.request_id == request_id for arrival in arrivals)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where the state contradicts itself or exceeds a bound."""
        assert self.running <= self.limits.arriving, f"{self.running} migrations, at most {self.limits.arriving}"
        assert not (self._is_stopped and self._running), "it has stopped, and migrations go on"
        known = len(self._running) + len(self._ended)
        assert known <= self.limits.remembered, f"{known} migrations are known, at most {self.limits.remembered}"
        assert not self._running.keys() & self._ended.keys(), "a migration runs and has ended"
        for migration_id, arrival in (*self._running.items(), *self._ended.items()):
            assert arrival.machine.migration_id == migration_id
            assert (migration_id in self._ended) == (arrival.machine.state in FINAL), arrival.machine.story
            arrival.machine.validate()
        ends_ms = [arrival.ended_ms for arrival in self._ended.values()]
        assert ends_ms == sorted(ends_ms), "they are not in the order of their ends"

    def _on_obstacle(self, event: ObstacleChanged, now_ms: float) -> _Instructions:
        self._obstacle_reason = event.reason
        return iter(())

    def _on_stopped(self, event: Stopped, now_ms: float) -> _Instructions:
        """Requests stay where they are: an engine that ends runs none of them."""
        self._is_stopped = True
        for migration_id, arrival in list(self._running.items()):
            yield from self._tell(arrival, Abort(migration_id, ENDING), now_ms)

    def _on_received(self, event: Received, now_ms: float) -> _Instructions:
        message = event.message
        arrival = self._find(message.migration_id)
        if arrival is not None:
            yield from self._tell(arrival, message, now_ms)
        elif isinstance(message, Offer):
            yield from self._take(event.connection, message, now_ms)
        else:
            # It never was here: a migration is remembered for longer than its source asks for it.
            yield Answer(event.connection, Failed(message.migration_id, "this migration is unknown here"))

    def _on_answered(self, event: Answered, now_ms: float) -> _Instructions:
        arrival = self._find(event.migration_id)
        if arrival is not None:
            yield from self._tell(arrival, event.event, now_ms)

    def _on_connection_ended(self, event: ConnectionEnded, now_ms: float) -> _Instructions:
        for arrival in list(self._running.values()):
            if arrival.connection == event.connection:
                yield from self._tell(arrival, SourceLost(), now_ms)

    def _on_superseded(self, event: Superseded, now_ms: float) -> _Instructions:
        """The next life may be one that a frontend began when it had heard of this move: so both can have one epoch. A
        lower one was held up on its way."""
        for migration_id, arrival in list(self._running.items()):
            offer = arrival.machine.offer
            if offer.request.request_id == event.request_id and offer.epoch <= event.epoch:
                yield from self._tell(arrival, Abort(migration_id, "its frontend gave it to the target itself"), now_ms)

    def _on_tick(self, event: Tick, now_ms: float) -> _Instructions:
        for arrival in list(self._running.values()):
            yield from self._tell(arrival, event, now_ms)
        self._forget(now_ms)

    def _take(self, connection: str, offer: Offer, now_ms: float) -> _Instructions:
        if self._is_stopped or self._obstacle_reason:
            reason = f"no request can be moved to here: {ENDING if self._is_stopped else self._obstacle_reason}"
            yield Answer(connection, Refuse(offer.migration_id, reason))
            return
        self._forget(now_ms)
        known = len(self._running) + len(self._ended)
        if self.running >= self.limits.arriving or known >= self.limits.remembered:
            reason = f"{self.running} migrations to here are under way, {self.limits.arriving} are possible; try again"
            yield Answer(connection, Refuse(offer.migration_id, reason))
            return
        arrival = _Arrival(connection, TargetMigration(offer, limits=self.limits.live, now_ms=now_ms), now_ms)
        self._running[offer.migration_id] = arrival
        yield from self._carry_on(arrival, arrival.machine.start(), now_ms)

    def _forget(self, now_ms: float) -> None:
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if now_ms - oldest.ended_ms < self.limits.remember_ms:
                return
            del self._ended[oldest.machine.migration_id]

    def _find(self, migration_id: str) -> _Arrival | None:
        return self._running.get(migration_id) or self._ended.get(migration_id)

    def _tell(self, arrival: _Arrival, event: TargetEvent, now_ms: float) -> _Instructions:
        yield from self._carry_on(arrival, arrival.machine.handle(event, now_ms), now_ms)

    def _carry_on(self, arrival: _Arrival, instructions: Iterable[TargetInstruction], now_ms: float) -> _Instructions:
        machine = arrival.machine
        for instruction in instructions:
            if isinstance(instruction, Send):
                yield Answer(arrival.connection, instruction.message)
            else:
                yield Do(machine.migration_id, instruction)
        if machine.state in FINAL and machine.migration_id in self._running:
            arrival.ended_ms = now_ms
            self._ended[machine.migration_id] = self._running.pop(machine.migration_id)
            duration_ms = now_ms - arrival.began_ms
            yield ArrivalEnded(machine.migration_id, machine.state, duration_ms, machine.story)


_HANDLERS: dict[type, Callable[..., _Instructions]] = {
    Received: TargetManager._on_received,
    Answered: TargetManager._on_answered,
    ConnectionEnded: TargetManager._on_connection_ended,
    Superseded: TargetManager._on_superseded,
    ObstacleChanged: TargetManager._on_obstacle,
    Stopped: TargetManager._on_stopped,
    Tick: TargetManager._on_tick,
}
