"""Everything that serving a request needs, in one place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from mesh.runtime import Entropy, Threads
from mesh.tracing import NO_TRACES, Tracer
from services.frontend.errors import invalid_api_key, stopped, too_many_requests
from services.frontend.metrics import FrontendMetrics
from services.frontend.placement.client import PlacementClient
from services.frontend.placement.pooler import Pooler
from services.frontend.placement.waiting_room import WaitingRoom
from services.frontend.requests.admission import AdmissionGate
from services.frontend.requests.api_keys import ApiKey, KeyLimits, KeyRing
from services.frontend.requests.models import ModelCatalogue
from services.frontend.settings import FrontendSettings
from services.frontend.workers.pool import WorkerPool
from services.frontend.workers.relay import Relay
from services.frontend.workers.token_mailbox import TokenMailbox


class RunningRequest(Protocol):
    """What operators see of a request in flight, and what ends it."""

    started_s: float
    mailbox: TokenMailbox
    relays: list[Relay]
    """One for each of its choices."""

    def validate(self) -> None:
        """Raises `InvariantBroken` where what is kept of a choice contradicts itself."""


@dataclass(slots=True)
class FrontendService:
    """The parts of a frontend, as the HTTP side and the gRPC side see them."""

    settings: FrontendSettings
    metrics: FrontendMetrics
    catalogue: ModelCatalogue
    pool: WorkerPool
    placement: PlacementClient
    gate: AdmissionGate
    room: WaitingRoom
    keys: KeyRing | None
    """None: no key is asked for."""
    clock: Callable[[], float]
    """Monotonic time in seconds; all `_s` values that are points in time are on it."""
    unix_time: Callable[[], float]
    entropy: Entropy
    threads: Threads
    pooler: Pooler
    tracer: Tracer = NO_TRACES
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    running: dict[str, RunningRequest] = field(default_factory=dict)
    """Requests in flight, by request id."""
    requests_total: int = 0

    def authenticate(self, authorization: str | None) -> ApiKey | None:
        """The caller's key, None where none is needed. Raises ApiError (401)."""
        if self.keys is None:
            return None
        scheme, _, presented = (authorization or "").partition(" ")
        key = self.keys.find(presented.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise invalid_api_key()
        return key

    @contextmanager
    def counted(self, key: ApiKey | None) -> Iterator[None]:
        """Inside, a request counts against its key. Raises ApiError (429) if one of the key's limits is reached."""
        if key is None:
            yield
            return
        reached = self.key_limits.enter(key, self.clock())
        if reached is not None:
            raise too_many_requests(
                f"Rate limit of this key reached: {reached.limit}.", "rate_limit_exceeded", reached.retry_after_s
            )
        try:
            yield
        finally:
            self.key_limits.leave(key)

    def end_all(self) -> None:
        """End every running request with an error that says why: the process stops."""
        self.room.is_closed = True
        self.pool.wake()
        for request in self.running.values():
            request.mailbox.fail(stopped())
