"""A generation for as long as someone reads it: started, bounded by its client, and taken back whatever happens."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.frontend.errors import ADOPTED, STOPPED, ApiError, deadline_exceeded
from services.frontend.requests.adoption import Adoption
from services.frontend.requests.generation import Generation
from services.frontend.requests.plan import GenerationPlan
from services.frontend.requests.service import FrontendService

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Client:
    """Who waits for the answer."""

    left_s: Callable[[], float]
    """Until its request's deadline."""
    cut: Callable[[], None]
    """Close its connection: it takes nothing, not even an error."""
    may_return: bool = False
    """It has said that it comes back, to this frontend or another one, if its connection ends."""


@dataclass(slots=True)
class Run:
    """A generation under way."""

    generation: Generation
    ends_as: str = "finished"
    """What the scheduler is told if nothing fails; anything but this is no success."""


@asynccontextmanager
async def generating(
    service: FrontendService,
    plan: GenerationPlan,
    started_s: float,
    client: Client,
    *,
    waits: bool = True,
    adoption: Adoption | None = None,
) -> AsyncIterator[Run]:
    """Place the request, or go on with an adopted one, and let it be read. Raises ApiError if it cannot be placed, at
    once unless it `waits` for an instance. At its deadline the reader gets an ApiError, or is cut off if it is busy
    sending."""

    def on_overflow() -> None:
        log.warning("aborting: the client does not read its answer", extra={"request_id": plan.request_id})
        service.metrics.slow_clients.inc()
        client.cut()

    mailbox = adoption.mailbox if adoption is not None else None
    generation = Generation(plan, started_s, service.generation_bounds, on_overflow, mailbox)
    run = Run(generation)
    service.running[plan.request_id] = generation
    outcome = "aborted"
    try:
        parts = service.pool, service.placement, service.room, service.metrics, service.clock
        if adoption is None:
            await generation.start(*parts, waits=waits)
        else:
            generation.go_on(*parts, [adoption.choices[index].relay for index in sorted(adoption.choices)])
            adoption.on_overflow, adoption.on_lost, adoption.is_handed_on = on_overflow, generation.on_lost, True
        deadline = asyncio.get_running_loop().call_later(client.left_s(), _expire, service, generation, client)
        try:
            yield run
        finally:
            deadline.cancel()
        outcome = run.ends_as
    except ApiError as error:
        outcome = error.code or error.type
        raise
    finally:
        keeps = outcome in (STOPPED, ADOPTED) or (outcome == "aborted" and client.may_return)
        generation.close(outcome == "finished", outcome, keeps=keeps)
        if service.running.get(plan.request_id) is generation:  # and not that of the same stream, resumed
            del service.running[plan.request_id]


def _expire(service: FrontendService, generation: Generation, client: Client) -> None:
    reads = generation.mailbox.is_awaited
    generation.mailbox.fail(deadline_exceeded(service.settings.request_deadline_s))
    if not reads:  # stuck in sending
        client.cut()
