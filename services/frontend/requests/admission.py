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

from controlplane.model.request import NO_TENANT, Tenant
from controlplane.policies.fair_share import FairShare
from services.frontend.errors import ApiError, deadline_exceeded, too_many_requests
from services.frontend.metrics import FrontendMetrics

MAX_RETRY_AFTER_S: Final = 60.0
_RATE_SAMPLES: Final = 64
THOUGHT_TOKENS: Final = 512
"""Of a request, of its prompt and answer together, until it has ended and is counted."""


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

    displaced: Hashable | None = None
    """A ticket that waits no longer: the queue was full, and its tenant has more of it than its share."""
    retry_after_s: float = 0.0
    """For the displaced one; see `Refused`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The queue of its class is full; the request is not known any more."""

    retry_after_s: float
    """When those that wait ahead will have been admitted, at the rate at which the last requests ended."""


@dataclass(slots=True)
class AdmissionQueue:
    """Tickets are any hashable names of requests. More urgent classes first; within a class tenants get their shares of
    what comes in, and each of them is served in the order of arrival."""

    max_running: int
    max_queued: int
    """Tickets that may wait in each class."""
    _running: set[Hashable] = field(default_factory=set)
    _queues: dict[PriorityClass, "_ClassQueue"] = field(
        default_factory=lambda: {priority_class: _ClassQueue() for priority_class in PriorityClass}
    )
    _shares: FairShare = field(default_factory=FairShare)
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

    def is_waiting(self, ticket: Hashable) -> bool:
        """Whether the ticket is in a queue."""
        return any(ticket in queue for queue in self._queues.values())

    def offer(
        self, ticket: Hashable, priority: int, now_s: float, tenant: Tenant = NO_TENANT
    ) -> Admitted | Queued | Refused:
        """A request arrives. Raises AlreadyKnown for a ticket that runs or waits."""
        if ticket in self._running or self.is_waiting(ticket):
            raise AlreadyKnown(f"{ticket!r} was offered before and has not been released")
        if len(self._running) < self.max_running:
            self._shares.enter(ticket, tenant, THOUGHT_TOKENS)
            self._admit(ticket)
            return Admitted()
        queue = self._queues[class_of(priority)]
        verdict = Queued()
        if len(queue) >= self.max_queued:
            retry_after_s = self._retry_after_s(class_of(priority), now_s)
            displaced = queue.newest_beyond_share(tenant)
            if displaced is None:
                return Refused(retry_after_s)
            self.withdraw(displaced)
            verdict = Queued(displaced, retry_after_s)
        queue.append(tenant, self._shares.enter(ticket, tenant, THOUGHT_TOKENS), ticket)
        return verdict

    def release(self, ticket: Hashable, now_s: float, tokens: int | None = None) -> Hashable | None:
        """A request that was in is done, and has taken so many tokens; None: nobody knows. Returns the ticket, if any,
        that comes in for it."""
        self._running.remove(ticket)
        self._ended_s.append(now_s)
        if tokens is not None:
            self._shares.charge(ticket, tokens - THOUGHT_TOKENS)
        self._shares.leave(ticket)
        for queue in self._queues.values():
            if queue:
                admitted = queue.pop()
                self._admit(admitted)
                return admitted
        return None

    def withdraw(self, ticket: Hashable) -> None:
        """A request that waits goes away. Raises KeyError if it does not wait."""
        for queue in self._queues.values():
            if queue.remove(ticket):
                self._shares.charge(ticket, -THOUGHT_TOKENS)
                self._shares.leave(ticket)
                return
        raise KeyError(f"{ticket!r} does not wait")

    def _admit(self, ticket: Hashable) -> None:
        self._running.add(ticket)
        self._shares.begin(ticket)

    def _retry_after_s(self, priority_class: PriorityClass, now_s: float) -> float:
        ahead = sum(len(queue) for other, queue in self._queues.items() if other <= priority_class)
        if len(self._ended_s) < 2:
            return 1.0  # nothing is known yet
        rate_per_s = len(self._ended_s) / max(now_s - self._ended_s[0], 1e-3)
        return min(MAX_RETRY_AFTER_S, max(1.0, ahead / rate_per_s))


class _ClassQueue:
    """Tickets of one class that wait, each with its start in the virtual time of shares."""

    def __init__(self) -> None:
        self._by_tenant: dict[Tenant, deque[tuple[float, int, Hashable]]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def __contains__(self, ticket: Hashable) -> bool:
        return any(ticket == waiting for queue in self._by_tenant.values() for _, _, waiting in queue)

    def append(self, tenant: Tenant, start: float, ticket: Hashable) -> None:
        self._arrivals += 1
        self._by_tenant.setdefault(tenant, deque()).append((start, self._arrivals, ticket))

    def pop(self) -> Hashable:
        """The earliest start; of equal ones, who came first. A tenant's own requests keep their order."""
        tenant = min(self._by_tenant, key=lambda each: self._by_tenant[each][0][:2])
        _, _, ticket = self._by_tenant[tenant].popleft()
        self._drop_empty(tenant)
        return ticket

    def remove(self, ticket: Hashable) -> bool:
        """Whether it was here."""
        for tenant, queue in self._by_tenant.items():
            for entry in queue:
                if entry[2] == ticket:
                    queue.remove(entry)
                    self._drop_empty(tenant)
                    return True
        return False

    def newest_beyond_share(self, tenant: Tenant) -> Hashable | None:
        """Of the one who has most of the queue over his share, if that is more than `tenant` would have with one ticket
        more; None otherwise."""
        most = max(self._by_tenant, key=lambda each: len(self._by_tenant[each]) / each.share)
        mine = len(self._by_tenant.get(tenant, ())) + 1
        if most == tenant or len(self._by_tenant[most]) / most.share <= mine / tenant.share:
            return None
        return self._by_tenant[most][-1][2]

    def _drop_empty(self, tenant: Tenant) -> None:
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class AdmissionGate:
    """Lets requests in by `AdmissionQueue`'s word."""

    def __init__(self, queue: AdmissionQueue, clock: Callable[[], float], metrics: FrontendMetrics) -> None:
        self.queue = queue
        self._clock = clock
        metrics.running.set_function(lambda: queue.running)
        metrics.queued.set_function(lambda: queue.queued)
        self._waiting: dict[Hashable, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def admitted(
        self,
        ticket: Hashable,
        priority: int,
        deadline_s: float,
        tenant: Tenant = NO_TENANT,
        tokens: Callable[[], int | None] = lambda: None,
    ) -> AsyncIterator[None]:
        """Inside, the request counts as running; at its end it is asked how many `tokens` it took. Raises ApiError: 429
        if the queue is full, 504 if the turn does not come within `deadline_s`."""
        verdict = self.queue.offer(ticket, priority, self._clock(), tenant)
        if isinstance(verdict, Refused):
            raise _full(verdict.retry_after_s)
        if isinstance(verdict, Queued):
            if verdict.displaced is not None:
                displaced = self._waiting[verdict.displaced]
                if not displaced.done():
                    displaced.set_exception(_full(verdict.retry_after_s))
            await self._wait(ticket, deadline_s)
        try:
            yield
        finally:
            self._release(ticket, tokens())

    async def _wait(self, ticket: Hashable, deadline_s: float) -> None:
        turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await turn
        except BaseException as error:
            # The turn may have come in the same step of the loop in which the wait was cut.
            if self.queue.is_running(ticket):
                self._release(ticket)
            elif self.queue.is_waiting(ticket):  # and was not displaced
                self.queue.withdraw(ticket)
            if isinstance(error, TimeoutError):
                raise deadline_exceeded(deadline_s) from error
            raise
        finally:
            del self._waiting[ticket]

    def _release(self, ticket: Hashable, tokens: int | None = 0) -> None:
        admitted = self.queue.release(ticket, self._clock(), tokens)
        if admitted is not None:
            turn = self._waiting[admitted]
            if not turn.done():
                turn.set_result(None)


def _full(retry_after_s: float) -> ApiError:
    return too_many_requests("Too many requests are waiting; try again later.", "queue_full", retry_after_s)
