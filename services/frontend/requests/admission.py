"""Who may come in: a bounded number of running requests, a bounded queue for each priority class.

`AdmissionQueue` decides; it is pure, and time is an argument. `AdmissionGate` waits on the event loop for its word.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from services.frontend.errors import deadline_exceeded, too_many_requests
from services.frontend.metrics import FrontendMetrics

MAX_RETRY_AFTER_S: Final = 60.0
_RATE_SAMPLES: Final = 64


class PriorityClass(IntEnum):
    """By the request's priority, lower first as everywhere in the mesh."""

    URGENT = 0
    """Of a request whose priority is below 0."""
    NORMAL = 1
    DEFERRABLE = 2
    """Of a request whose priority is above 0."""


def class_of(priority: int) -> PriorityClass:
    """The queue that a priority waits in."""
    if priority == 0:
        return PriorityClass.NORMAL
    return PriorityClass.URGENT if priority < 0 else PriorityClass.DEFERRABLE


class AlreadyKnown(ValueError):
    """A ticket was offered twice (a bug of the caller)."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request counts as running from now on; `release` it when it has ended."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Wait until `release` or `withdraw` names the ticket."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The queue of its class is full; the request is not known any more."""

    retry_after_s: float
    """When those that wait ahead will have been admitted, at the rate at which the last requests ended."""


@dataclass(slots=True)
class AdmissionQueue:
    """Tickets are any hashable names of requests. More urgent classes first, within a class first come first
    served."""

    max_running: int
    max_queued: int
    """Tickets that may wait in each class."""
    _running: set[Hashable] = field(default_factory=set)
    _queues: dict[PriorityClass, deque[Hashable]] = field(
        default_factory=lambda: {priority_class: deque() for priority_class in PriorityClass}
    )
    _ended_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RATE_SAMPLES))
    """When the last requests ended: the drain rate."""

    @property
    def running(self) -> int:
        """Requests that were admitted and have not been released."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Requests that wait, of all classes together."""
        return sum(map(len, self._queues.values()))

    def is_running(self, ticket: Hashable) -> bool:
        """Whether the ticket is in."""
        return ticket in self._running

    def offer(self, ticket: Hashable, priority: int, now_s: float) -> Admitted | Queued | Refused:
        """A request arrives. Raises AlreadyKnown for a ticket that runs or waits."""
        if ticket in self._running or any(ticket in queue for queue in self._queues.values()):
            raise AlreadyKnown(f"{ticket!r} was offered before and has not been released")
        if len(self._running) < self.max_running:
            self._running.add(ticket)
            return Admitted()
        queue = self._queues[class_of(priority)]
        if len(queue) >= self.max_queued:
            return Refused(self._retry_after_s(class_of(priority), now_s))
        queue.append(ticket)
        return Queued()

    def release(self, ticket: Hashable, now_s: float) -> Hashable | None:
        """A request that was in is done; the ticket, if any, that comes in for it."""
        self._running.remove(ticket)
        self._ended_s.append(now_s)
        for queue in self._queues.values():
            if queue:
                admitted = queue.popleft()
                self._running.add(admitted)
                return admitted
        return None

    def withdraw(self, ticket: Hashable) -> None:
        """A request that waits goes away. Raises KeyError if it does not wait."""
        for queue in self._queues.values():
            if ticket in queue:
                queue.remove(ticket)
                return
        raise KeyError(f"{ticket!r} does not wait")

    def _retry_after_s(self, priority_class: PriorityClass, now_s: float) -> float:
        ahead = sum(len(queue) for other, queue in self._queues.items() if other <= priority_class)
        if len(self._ended_s) < 2:
            return 1.0  # nothing is known yet
        rate_per_s = len(self._ended_s) / max(now_s - self._ended_s[0], 1e-3)
        return min(MAX_RETRY_AFTER_S, max(1.0, ahead / rate_per_s))


class AdmissionGate:
    """Lets requests in by `AdmissionQueue`'s word."""

    def __init__(self, queue: AdmissionQueue, clock: Callable[[], float], metrics: FrontendMetrics) -> None:
        self.queue = queue
        self._clock = clock
        metrics.running.set_function(lambda: queue.running)
        metrics.queued.set_function(lambda: queue.queued)
        self._waiting: dict[Hashable, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def admitted(self, ticket: Hashable, priority: int, deadline_s: float) -> AsyncIterator[None]:
        """Inside, the request counts as running. Raises ApiError: 429 if the queue is full, 504 if the turn does
        not come within `deadline_s`."""
        verdict = self.queue.offer(ticket, priority, self._clock())
        if isinstance(verdict, Refused):
            raise too_many_requests(
                "Too many requests are waiting; try again later.", "queue_full", verdict.retry_after_s
            )
        if not isinstance(verdict, Admitted):
            await self._wait(ticket, deadline_s)
        try:
            yield
        finally:
            self._release(ticket)

    async def _wait(self, ticket: Hashable, deadline_s: float) -> None:
        turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await turn
        except BaseException as error:
            # The turn may have come in the same step of the loop in which the wait was cut.
            if self.queue.is_running(ticket):
                self._release(ticket)
            else:
                self.queue.withdraw(ticket)
            if isinstance(error, TimeoutError):
                raise deadline_exceeded(deadline_s) from error
            raise
        finally:
            del self._waiting[ticket]

    def _release(self, ticket: Hashable) -> None:
        admitted = self.queue.release(ticket, self._clock())
        if admitted is not None:
            turn = self._waiting[admitted]
            if not turn.done():
                turn.set_result(None)
