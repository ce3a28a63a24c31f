"""What happens next, in simulated time."""

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import TypeAlias

from mesh.errors import IllegalTransition

Act: TypeAlias = Callable[[float], None]
"""Is called with the time, in ms."""


class Rank(IntEnum):
    """Who goes first among events of the same moment."""

    STEP_END = 0
    ARRIVAL = 1
    FAILURE = 2
    MESSAGE = 3
    """Everything between instances: messages, transfers, timers of protocols."""
    WATCH = 4
    """Whoever looks and decides: observing policies, controllers, recorders."""
    PLAN = 5
    """An instance composes its next step of all that has reached it by this moment."""


class Event:
    """One entry of the queue; `cancel` takes it back."""

    __slots__ = ("_queue", "act", "background")

    def __init__(self, act: Act, background: bool, queue: "EventQueue") -> None:
        self.act: Act | None = act
        self.background = background
        self._queue = queue

    def cancel(self) -> None:
        """It will not happen. Once it has, or was cancelled before, this does nothing."""
        if self.act is not None:
            self.act = None
            self._queue.settled(self)


class EventQueue:
    """Events in order of (time, rank, place, scheduling).

    A simulation goes on while there are events that can change something. Those of the `background` (timers that
    would go on for ever) do not count.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._heap: list[tuple[float, int, int, int, Event]] = []
        self._scheduled = 0
        self._foreground = 0

    @property
    def is_over(self) -> bool:
        """Nothing but background is left."""
        return self._foreground == 0

    def at(self, at_ms: float, rank: Rank, act: Act, *, place: int = 0, background: bool = False) -> Event:
        """Call `act` when the time has come; within a rank, lower places go first.

        Raises `IllegalTransition` for a time in the past.
        """
        if at_ms < self.now_ms:
            raise IllegalTransition(f"an event was scheduled for {at_ms} ms when it was {self.now_ms} ms already")
        self._scheduled += 1
        event = Event(act, background, self)
        self._foreground += not background
        heappush(self._heap, (at_ms, rank, place, self._scheduled, event))
        return event

    @property
    def is_last_of_moment(self) -> bool:
        """Nothing else is to happen at this moment."""
        return not self._heap or self._heap[0][0] > self.now_ms

    def run(self) -> None:
        """Let everything happen, until nothing but background is left."""
        while self._foreground:
            self.run_next()

    def run_next(self) -> None:
        """Let time jump to the next event, and let that happen."""
        at_ms, _, _, _, event = heappop(self._heap)
        act = event.act
        if act is not None:
            event.act = None
            self._foreground -= not event.background
            self.now_ms = at_ms
            act(at_ms)

    def settled(self, event: Event) -> None:
        """An event has happened or never will."""
        self._foreground -= not event.background
