"""The admission queue on the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager

from services.frontend.errors import deadline_exceeded, too_many_requests
from services.frontend.metrics import FrontendMetrics
from services.frontend.requests.admission import AdmissionQueue, Admitted, Refused


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
