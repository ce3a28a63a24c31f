"""A client's request in the mesh: placed, fanned out over its choices, recovered, taken back as a whole."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from controlplane.model.request import NO_TENANT, Tenant
from controlplane.protocols.recovery import RecoveryLimits
from penstock.v1 import request_pb2
from services.frontend.errors import ADOPTED, STOPPED, ApiError, deadline_exceeded
from services.frontend.placement.placer import Placer
from services.frontend.requests.adoption import Adoption
from services.frontend.requests.plan import GenerationPlan
from services.frontend.requests.service import FrontendService
from services.frontend.workers.relay import Relay, adapter_message, tenant_message
from services.frontend.workers.token_mailbox import TokenMailbox

log = logging.getLogger(__name__)

RESUMED: Final = "resumed"
"""In place of a policy, for a stream that was placed by another frontend."""
ABORTED: Final = "aborted"
"""How a request ends whose client has gone."""


class Generation:
    """One client request; `start` it once or `go_on` with an adopted one, always `close` it."""

    def __init__(
        self,
        service: FrontendService,
        plan: GenerationPlan,
        started_s: float,
        on_overflow: Callable[[], None],
        mailbox: TokenMailbox | None = None,
        traceparent: str = "",
        tenant: Tenant = NO_TENANT,
    ) -> None:
        """`started_s`: when the client's request arrived, or a cascade asked its tier; `on_overflow`: the client
        does not read; `mailbox`: of choices that are adopted."""
        settings = service.settings
        self.plan = plan
        self.tenant = tenant
        self.started_s = started_s
        choices = len(plan.prompts) * plan.n
        self.mailbox = mailbox or TokenMailbox(settings.max_pending_tokens * choices, on_overflow)
        self.relays: list[Relay] = []
        self.instance_ids: list[str] = []
        """Of each prompt: where it was placed first."""
        self.policies: list[str] = []
        """Who placed each of `instance_ids`."""
        self._traceparent = traceparent
        self._service = service
        self._placer = Placer(
            service.pool,
            service.placement,
            plan.model.block_tokens,
            settings.connect_wait_s,
            RecoveryLimits(settings.max_recoveries, settings.instance_wait_s),
            service.room,
            service.metrics,
            service.clock,
            service.tracer,
            plan.vllm_parts,
            service.left_recoveries,
        )

    async def start(self, may_wait: Callable[[], bool]) -> None:
        """Place every prompt and send its choices. Raises ApiError if that is impossible: at once unless it `may_wait`
        for an instance, which it does within the request's deadline."""
        plan, clock, settings = self.plan, self._service.clock, self._service.settings
        ends_s = self.started_s + settings.request_deadline_s
        give_up_s = min(clock() + settings.instance_wait_s, ends_s)
        for index in range(len(plan.prompts)):
            relays = [self._relay(choice) for choice in range(index * plan.n, (index + 1) * plan.n)]
            try:
                placed = await self._placer.put_new(relays, give_up_s - clock(), may_wait)
            except ApiError:
                if clock() >= ends_s:
                    raise deadline_exceeded(settings.request_deadline_s) from None
                raise
            self.relays += relays
            self.instance_ids.append(placed.instance_id)
            self.policies.append(placed.policy)
        self._service.metrics.of(plan.model.engine_model).prompt_tokens.inc(plan.prompt_tokens)

    def go_on(self, adoption: Adoption, on_overflow: Callable[[], None]) -> None:
        """Look after the choices of another frontend, instead of `start`."""
        self.relays = [adoption.choices[index].relay for index in sorted(adoption.choices)]
        for relay in self.relays:
            if not relay.finished:
                self._placer.adopt(relay)
        self.instance_ids = [relay.instance_id for relay in self.relays if relay.instance_id]
        self.policies = [RESUMED]
        adoption.look_after(on_overflow, self._placer.recover)

    def abort_choice(self, index: int) -> None:
        """The client has all it wants of this choice."""
        self._service.pool.relays.drop(self.relays[index], is_done=True)

    def close(self, ok: bool, reason: str, *, keeps: bool = False) -> None:
        """Take back what still runs and tell the scheduler how it ended; `keeps`: what can be resumed is left to its
        worker instead, or to the next one if it has just lost it."""
        recovered = [relay for relay in self.relays if reason == ABORTED and self._placer.is_recovering(relay)]
        for relay in self.relays:
            if not keeps or relay.resume is None:
                self._service.pool.relays.drop(relay)
            elif relay not in recovered:
                self._service.pool.relays.release(relay)
        self._placer.close(ok, reason, [relay for relay in recovered if keeps and relay.resume is not None])

    def validate(self) -> None:
        """Raises `InvariantBroken` where what is kept of a choice contradicts itself."""
        self._placer.validate()

    def _relay(self, choice: int) -> Relay:
        plan = self.plan
        return Relay(
            request_id=plan.engine_request_id(choice),
            index=choice,
            model=plan.model.engine_model,
            prompt_token_ids=plan.prompts[choice // plan.n].token_ids,
            sampling=plan.sampling_of(choice),
            priority=plan.priority,
            started_s=self.started_s,
            deadline_s=self._service.settings.request_deadline_s,
            mailbox=self.mailbox,
            on_lost=self._placer.recover,
            resume=request_pb2.Resume(client_request_id=plan.request_id, ticket=plan.ticket) if plan.ticket else None,
            cache_salt=self._service.cache_salt(self.tenant, plan.cache_salt),
            traceparent=self._traceparent,
            media=plan.prompts[choice // plan.n].media,
            adapter=adapter_message(plan.model.adapter),
            tenant=tenant_message(self.tenant),
        )


@dataclass(frozen=True, slots=True)
class Client:
    """Who waits for the answer."""

    left_s: Callable[[], float]
    """Seconds until its request's deadline; below 0 behind it."""
    cut: Callable[[], None]
    """Close its connection: it takes nothing, not even an error."""
    may_return: bool = False
    """It has said that it comes back, to this frontend or another one, if its connection ends."""
    traceparent: str = ""
    """What the spans of its request are a part of."""
    tenant: Tenant = NO_TENANT


@dataclass(slots=True)
class Run:
    """A generation while it is read."""

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
    may_wait: Callable[[], bool] = lambda: True,
    adoption: Adoption | None = None,
) -> AsyncIterator[Run]:
    """Place the request, or go on with an adopted one, and let it be read. Raises ApiError if it cannot be placed, at
    once unless it `may_wait` for an instance. At its deadline the reader gets an ApiError, or is cut off if it is busy
    sending."""

    def on_overflow() -> None:
        log.warning("aborting: the client does not read its answer", extra={"request_id": plan.request_id})
        service.metrics.slow_clients.inc()
        client.cut()

    mailbox = adoption.mailbox if adoption is not None else None
    generation = Generation(service, plan, started_s, on_overflow, mailbox, client.traceparent, client.tenant)
    run = Run(generation)
    service.running[plan.request_id] = generation
    outcome = ABORTED
    try:
        if adoption is None:
            await generation.start(may_wait)
        else:
            generation.go_on(adoption, on_overflow)
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
        keeps = outcome in (STOPPED, ADOPTED) or (outcome == ABORTED and client.may_return)
        generation.close(outcome == "finished", outcome, keeps=keeps)
        if service.running.get(plan.request_id) is generation:  # and not that of the same stream, resumed
            del service.running[plan.request_id]


def _expire(service: FrontendService, generation: Generation, client: Client) -> None:
    reads = generation.mailbox.is_awaited
    generation.mailbox.fail(deadline_exceeded(service.settings.request_deadline_s))
    if not reads:  # stuck in sending
        client.cut()
