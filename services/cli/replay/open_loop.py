"""The open loop: every request is sent when the trace says, whatever became of those before it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest

Encode = Callable[[int, TraceRequest], bytes]
Send = Callable[[bytes, float], Awaitable[tuple[RequestOutcome, str]]]


class Clock(Protocol):
    """Seconds since the start of the replay."""

    def now_s(self) -> float:
        """Seconds since the replay began."""

    async def sleep_until(self, due_s: float) -> None:
        """Return at `due_s`, at once where that has passed."""


class LoopClock:
    """The running event loop's monotonic clock, with its zero `lead_s` from now."""

    def __init__(self, lead_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._zero_s = self._loop.time() + lead_s

    def now_s(self) -> float:
        return self._loop.time() - self._zero_s

    async def sleep_until(self, due_s: float) -> None:
        """Return at `due_s`; uvloop rounds to milliseconds and may wake too early, hence the loop."""
        while (rest_s := due_s - self.now_s()) > 0:  # noqa: ASYNC110 - time passes, there is no event to await
            await asyncio.sleep(rest_s)


@dataclass(slots=True)
class ReplayLog:
    """What has happened so far; readable at any time, so that an interrupted replay still has its report."""

    outcomes: list[RequestOutcome] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    """How late each request was sent, by the fault of the client."""
    policies: set[str] = field(default_factory=set)
    held_back: int = 0
    """Requests that found the concurrency limit reached when they were due."""
    other_lengths: int = 0
    """Answers of another length than the trace asks for."""
    errors: int = 0

    @property
    def sent(self) -> int:
        """Number of requests sent so far."""
        return len(self.lags_s)

    @property
    def in_flight(self) -> int:
        """Requests sent whose end has not been seen."""
        return len(self.lags_s) - len(self.outcomes)


async def replay(
    requests: Iterable[TraceRequest], encode: Encode, send: Send, clock: Clock, concurrency_limit: int, log: ReplayLog
) -> None:
    """Send every request at its arrival and return when the last one has ended; `log` grows meanwhile.

    A request is encoded before it is due. At most `concurrency_limit` are in flight; the next one then waits,
    and that counts as its lag.
    """
    slots = asyncio.Semaphore(concurrency_limit)

    async def run(encoded: bytes, request: TraceRequest) -> None:
        log.lags_s.append(max(0.0, clock.now_s() - request.arrival_s))
        try:
            outcome, policy = await send(encoded, request.arrival_s)
        finally:
            slots.release()
        log.outcomes.append(outcome)
        log.errors += bool(outcome.error)
        log.other_lengths += not outcome.error and outcome.output_tokens != request.output_tokens
        if policy:
            log.policies.add(policy)

    async with asyncio.TaskGroup() as group:
        for index, request in enumerate(requests):
            encoded = encode(index, request)
            await clock.sleep_until(request.arrival_s)
            log.held_back += slots.locked()
            await slots.acquire()
            group.create_task(run(encoded, request))
            # Within a burst nothing above gives way; without this, all would be encoded before any is sent.
            await asyncio.sleep(0)
