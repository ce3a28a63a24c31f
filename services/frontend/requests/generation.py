"""A client's request in the mesh: placed, fanned out over its choices, recovered, taken back as a whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from controlplane.protocols.recovery import RecoveryLimits
from penstock.v1 import request_pb2
from services.frontend.errors import ApiError, deadline_exceeded
from services.frontend.metrics import FrontendMetrics
from services.frontend.placement.client import PlacementClient
from services.frontend.placement.placer import Placer
from services.frontend.placement.waiting_room import WaitingRoom
from services.frontend.requests.plan import GenerationPlan
from services.frontend.workers.mailbox import Mailbox
from services.frontend.workers.pool import WorkerPool
from services.frontend.workers.relay import Loss, Relay

RESUMED: Final = "resumed"
"""In place of a policy, for a stream that was placed by another frontend."""


@dataclass(frozen=True, slots=True)
class GenerationBounds:
    """From the frontend's settings."""

    deadline_s: float
    connect_wait_s: float
    max_pending_tokens: int
    recovery: RecoveryLimits


class Generation:
    """One client request; `start` it once, always `close` it."""

    def __init__(
        self,
        plan: GenerationPlan,
        started_s: float,
        bounds: GenerationBounds,
        on_overflow: Callable[[], None],
        mailbox: Mailbox | None = None,
    ) -> None:
        """`started_s`: when the client's request arrived, or a cascade asked its tier; `on_overflow`: the client
        does not read; `mailbox`: of choices that are adopted."""
        self.plan = plan
        self.started_s = started_s
        choices = len(plan.prompts) * plan.n
        self.mailbox = mailbox or Mailbox(bounds.max_pending_tokens * choices, on_overflow)
        self.relays: list[Relay] = []
        self.instance_ids: list[str] = []
        """Of each prompt: where it was placed first."""
        self.policies: list[str] = []
        """Who placed each of `instance_ids`."""
        self._bounds = bounds
        self._placer: Placer | None = None

    async def start(
        self,
        pool: WorkerPool,
        placement: PlacementClient,
        room: WaitingRoom,
        metrics: FrontendMetrics,
        clock: Callable[[], float],
        *,
        waits: bool = True,
    ) -> None:
        """Place every prompt and send its choices. Raises ApiError if that is impossible, at once unless it `waits`."""
        plan, bounds = self.plan, self._bounds
        placer = self._prepare(pool, placement, room, metrics, clock)
        give_up_s = min(clock() + bounds.recovery.wait_s, self.started_s + bounds.deadline_s)
        for index in range(len(plan.prompts)):
            relays = [self._relay(choice) for choice in range(index * plan.n, (index + 1) * plan.n)]
            try:
                placed = await placer.put_new(relays, give_up_s - clock() if waits else 0.0)
            except ApiError:
                if clock() >= self.started_s + bounds.deadline_s:
                    raise deadline_exceeded(bounds.deadline_s) from None
                raise
            self.relays += relays
            self.instance_ids.append(placed.instance_id)
            self.policies.append(placed.policy)
        metrics.of(plan.model.name).prompt_tokens.inc(plan.prompt_tokens)

    def go_on(
        self,
        pool: WorkerPool,
        placement: PlacementClient,
        room: WaitingRoom,
        metrics: FrontendMetrics,
        clock: Callable[[], float],
        relays: Sequence[Relay],
    ) -> None:
        """With the choices of another frontend, instead of `start`."""
        placer = self._prepare(pool, placement, room, metrics, clock)
        self.relays = list(relays)
        for relay in relays:
            if not relay.finished:
                placer.adopt(relay)
        self.instance_ids = [relay.instance_id for relay in relays if relay.instance_id]
        self.policies = [RESUMED]

    def abort_choice(self, index: int) -> None:
        """The client has all it wants of this choice."""
        relay = self.relays[index]
        if not relay.finished:
            relay.finished = True
            self._pool.take_back(relay, is_done=True)

    def close(self, ok: bool, reason: str, *, keeps: bool = False) -> None:
        """Take back what still runs and tell the scheduler how it ended; `keeps`: what can be resumed is left to its
        worker instead."""
        for relay in self.relays:
            if relay.finished:
                continue
            relay.finished = True
            if keeps and relay.resume is not None:
                self._pool.release(relay)
            else:
                self._pool.take_back(relay)
        if self._placer is not None:
            self._placer.close(ok, reason)

    @property
    def _pool(self) -> WorkerPool:
        assert self._placer is not None, "there are relays once there is a placer"
        return self._placer.pool

    def _prepare(
        self,
        pool: WorkerPool,
        placement: PlacementClient,
        room: WaitingRoom,
        metrics: FrontendMetrics,
        clock: Callable[[], float],
    ) -> Placer:
        bounds = self._bounds
        block_tokens = self.plan.model.block_tokens
        self._placer = Placer(
            pool, placement, block_tokens, bounds.connect_wait_s, bounds.recovery, room, metrics, clock
        )
        return self._placer

    def on_lost(self, relay: Relay, loss: Loss) -> None:
        """A choice has no owner any more."""
        assert self._placer is not None, "a relay is lost after it was placed"
        self._placer.recover(relay, loss)

    def validate(self) -> None:
        """Raises AssertionError where what is kept of a choice contradicts itself."""
        if self._placer is not None:
            self._placer.validate()
        for relay in self.relays:
            relay.ownership.validate()

    def _relay(self, choice: int) -> Relay:
        plan = self.plan
        return Relay(
            request_id=plan.engine_request_id(choice),
            index=choice,
            model=plan.model.name,
            prompt_token_ids=plan.prompts[choice // plan.n].token_ids,
            sampling=plan.sampling_of(choice),
            priority=plan.priority,
            started_s=self.started_s,
            deadline_s=self._bounds.deadline_s,
            mailbox=self.mailbox,
            on_lost=self.on_lost,
            resume=request_pb2.Resume(client_request_id=plan.request_id, ticket=plan.ticket) if plan.ticket else None,
        )
