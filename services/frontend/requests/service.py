"""Everything that serving a request needs, in one place."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from controlplane.model.autoscale_record import ScaleRecord
from controlplane.model.request import Tenant
from mesh.audit.log import AuditLog
from mesh.audit.orders import Order, cut
from mesh.runtime import Entropy, Threads
from mesh.tracing import NO_TRACES, Tracer
from services.frontend.errors import (
    ApiError,
    bad_request,
    expired_api_key,
    invalid_api_key,
    model_not_found,
    stopped,
    too_many_requests,
    unavailable,
)
from services.frontend.media.service import MediaService
from services.frontend.mesh_metrics import MeshMetrics
from services.frontend.metrics import FrontendMetrics
from services.frontend.parser_process.process import ParserProcess
from services.frontend.placement.client import PlacementClient
from services.frontend.placement.pooler import Pooler
from services.frontend.placement.waiting_room import WaitingRoom
from services.frontend.requests.admission import AdmissionGate
from services.frontend.requests.api_keys import ApiKey, KeyFile, KeyRing
from services.frontend.requests.background import BackgroundResponses
from services.frontend.requests.ended import Asked, EndedLog, Progress
from services.frontend.requests.jwt_tokens import TokenVerifier, looks_like_a_token
from services.frontend.requests.key_budgets import budgets_of
from services.frontend.requests.key_limits import KeyLimits
from services.frontend.requests.models import ModelCatalogue, ServedModel
from services.frontend.requests.shared_limits import SharedLimits
from services.frontend.requests.shared_responses import SharedResponses
from services.frontend.requests.stored_budgets import StoredBudgets
from services.frontend.requests.usage import UsageLog, UsageRecord
from services.frontend.settings import FrontendSettings
from services.frontend.workers.pool import WorkerPool
from services.frontend.workers.relay import Relay
from services.frontend.workers.token_mailbox import TokenMailbox

KEYS_LOOK_S: Final = 1.0
"""How often the key file is looked at."""


def check_model(key: ApiKey | None, name: str) -> None:
    """Raises ApiError (404) for a model that the key is not for, as if it were not there."""
    if key is not None and not key.may_ask(name):
        raise model_not_found(name)


def allowed_priority(key: ApiKey | None, asked: int | None) -> int | None:
    """The priority of a request, by default the lowest that its key may have where that is above 0. Raises ApiError
    (400) for a lower one."""
    lowest = None if key is None else key.lowest_priority
    if lowest is None:
        return asked
    if asked is None:
        return max(0, lowest)
    if asked < lowest:
        raise bad_request(f"`priority` of this key is {lowest} or more; lower numbers go first.", "priority")
    return asked


class RunningRequest(Protocol):
    """What operators see of a request in flight, and what ends it."""

    started_s: float
    mailbox: TokenMailbox
    relays: list[Relay]
    """One for each of its choices."""
    tenant: Tenant

    def validate(self) -> None:
        """Raises `InvariantBroken` where what is kept of a choice contradicts itself."""


@dataclass(slots=True)
class FrontendService:
    """The parts of a frontend, as the HTTP side and the gRPC side see them."""

    settings: FrontendSettings
    metrics: FrontendMetrics
    mesh_metrics: MeshMetrics
    catalogue: ModelCatalogue
    pool: WorkerPool
    placement: PlacementClient
    gate: AdmissionGate
    room: WaitingRoom
    keys: KeyRing | None
    """None: no key is asked for."""
    tokens: TokenVerifier | None
    """None: no token opens anything."""
    clock: Callable[[], float]
    """Monotonic time in seconds; all `_s` values that are points in time are on it."""
    unix_time: Callable[[], float]
    entropy: Entropy
    threads: Threads
    pooler: Pooler
    parser_process: ParserProcess
    media: MediaService
    key_limits: KeyLimits
    shared_limits: SharedLimits
    budgets: StoredBudgets
    responses: SharedResponses
    background: BackgroundResponses
    scales: Mapping[str, ScaleRecord]
    """How many replicas the autoscaler wants, by model: one without any exists all the same."""
    tracer: Tracer = NO_TRACES
    running: dict[str, RunningRequest] = field(default_factory=dict)
    """Requests in flight, by request id."""
    left_recoveries: set[asyncio.Task[None]] = field(default_factory=set)
    """Of requests whose clients have left and may come back."""
    requests_total: int = 0
    ended: EndedLog = field(default_factory=EndedLog)
    audit: AuditLog = field(default_factory=AuditLog)
    usage: UsageLog | None = None
    """None: nobody wants to know who uses how much."""

    async def authenticate(self, authorization: str | None) -> ApiKey | None:
        """The caller's key, or what a token stands for; None where neither is needed. Raises ApiError: 401; of tokens
        also 403, and 503 while their issuer's keys are not to be had."""
        if self.keys is None and self.tokens is None:
            return None
        scheme, _, presented = (authorization or "").partition(" ")
        presented = presented.strip() if scheme.lower() == "bearer" else ""
        if self.tokens is not None and looks_like_a_token(presented):
            return await self.tokens.verify(presented)
        key = self.keys.find(presented) if self.keys is not None else None
        if key is None:
            raise invalid_api_key()
        if key.has_expired(self.unix_time()):
            raise expired_api_key(str(key.expires))
        return key

    def key_named(self, name: str) -> ApiKey | None:
        """The key of that name, of whose bearer another frontend has let a request in; None where it has none."""
        known = None if self.keys is None else self.keys.named(name)
        return known or (ApiKey(name, b"") if name else None)

    async def model(self, name: str, key: ApiKey | None = None) -> ServedModel:
        """The model that a request names, or the only one. As long as no worker has come to this frontend, or none of a
        model that is scaled, it waits as it would for an instance. Raises ApiError: 404, also for a model that the key
        is not for; 400; 503 or 429 if none came, or too many wait."""
        if name:
            check_model(key, name)
        give_up_s = self.clock() + self.settings.instance_wait_s
        waits = False
        with ExitStack() as waiting:
            while True:
                seen = self.pool.news
                try:
                    found = await self.catalogue.asked_for(name)
                    check_model(key, found.name)
                    return found
                except ApiError as error:
                    reason = error
                    if self._is_scaled_to_zero(name, error):
                        reason = unavailable(
                            f"No instance of `{name}` runs yet; one is ordered; try again.", "no_instance"
                        )
                    elif not self.catalogue.is_empty:
                        raise
                    left_s = give_up_s - self.clock()
                    if left_s <= 0:
                        raise reason from None
                    if self.room.is_closed:
                        raise stopped() from None
                    if not waits:
                        waiting.enter_context(self.room.entered(name, reason))
                        waits = True
                await self.pool.wait_for_news(seen, left_s)

    def _is_scaled_to_zero(self, name: str, error: ApiError) -> bool:
        """Whether a model is not known here only because it has had no instance since this frontend started."""
        return error.code == "model_not_found" and name in self.scales

    @contextmanager
    def counted(self, key: ApiKey | None) -> Iterator[None]:
        """Inside, a request counts against its key. Raises ApiError: 429 if one of the key's limits is reached or its
        budget used up, 503 where nobody can tell what is left of that."""
        if key is None:
            yield
            return
        self._check_budget(key)
        reached = self.key_limits.enter(key, self.clock())
        if reached is not None:
            raise too_many_requests(
                f"Rate limit of this key reached: {reached.limit}.", "rate_limit_exceeded", reached.retry_after_s
            )
        try:
            yield
        finally:
            self.key_limits.leave(key)

    def _check_budget(self, key: ApiKey) -> None:
        """Raises ApiError: 429, 503."""
        if not budgets_of(key):
            return
        if not self.budgets.is_heard:
            raise unavailable("What this key has left of its budget is not known yet; try again.", "budget_unknown")
        spent = self.budgets.budgets.reached(key, self.unix_time())
        if spent is not None:
            self.metrics.budget_refusals.labels(spent.period).inc()
            raise too_many_requests(
                f"The budget of this key is used up: {spent.tokens:g} tokens per {spent.period}. It begins anew at "
                f"{spent.begins_anew:%Y-%m-%dT%H:%M:%SZ}; ask whoever gave you the key for more.",
                "insufficient_quota",
                spent.retry_after_s,
            )
        if not self.budgets.budgets.has_room(key.name):
            raise unavailable("Too many keys have budgets for this one to be counted; tell the operator.")

    def cache_salt(self, tenant: Tenant, given: str) -> str:
        """The client's; with --separate-tenant-caches a digest of it and the tenant, which nobody can give as a salt of
        his own."""
        if not self.settings.separate_tenant_caches:
            return given
        return hashlib.blake2b(f"{tenant.name}\0{given}".encode(), digest_size=16).hexdigest()

    def spent(self, key: ApiKey | None, tokens: int) -> None:
        """A request with this key has taken so many tokens, of its prompt and its answers."""
        if key is not None:
            self.key_limits.spend(key, tokens, self.clock())
            self.budgets.budgets.spend(key, tokens, self.unix_time())

    async def follow_keys(self, file: KeyFile, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Take in keys of a file that has changed, within a second: for ever."""
        while True:
            await sleep(KEYS_LOOK_S)
            former, changed = file.ring, await self.threads.run(file.look)
            if changed is not None:
                self.keys = changed
                self.ordered(f"whoever wrote {file.path}", "keys", changed.differences(former))

    def used(self, asked: Asked, progress: Progress, status: int) -> None:
        """Record what a request has used that has just ended, or broken off."""
        if self.usage is None:
            return
        tokens = progress.tokens
        self.usage.add(
            UsageRecord(
                asked.request_id,
                int(1000 * self.unix_time()),
                asked.owner,
                asked.model,
                asked.endpoint,
                status,
                tokens.prompt,
                tokens.cached,
                tokens.generated,
                progress.tier,
                progress.tier_usage,
            )
        )

    def ordered(self, who: str, order: str, parameters: Mapping[str, str], outcome: str = "done") -> None:
        """Remember an order that came over HTTP, or by a file, and what became of it."""
        shown = {name: cut(value) for name, value in parameters.items()}
        self.audit.add(Order(int(1000 * self.unix_time()), who, order, self.audit.to, shown, cut(outcome)))

    async def stop_recoveries(self) -> None:
        """Give up what is recovered for clients that have left."""
        for task in list(self.left_recoveries):
            task.cancel()
        await asyncio.gather(*self.left_recoveries, return_exceptions=True)

    def end_all(self) -> None:
        """End every running request with an error that says why: the process stops."""
        self.room.is_closed = True
        self.pool.wake()
        for request in self.running.values():
            request.mailbox.fail(stopped())
