"""A client's request in the mesh: placed, fanned out over its choices, taken back as a whole."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from controlplane.model.prefix_hash import block_hashes
from mesh.errors import NoInstance, PeerUnavailable, UnknownModel
from penstock.v1 import scheduler_pb2
from services.frontend.api.errors import model_not_found, unavailable
from services.frontend.mailbox import Mailbox
from services.frontend.metrics import ModelMetrics
from services.frontend.placement import Placement, PlacementClient
from services.frontend.plan import GenerationPlan
from services.frontend.relay import Relay
from services.frontend.worker_link import WorkerLink
from services.frontend.worker_pool import WorkerPool

log = logging.getLogger(__name__)

MAX_PLACEMENTS: Final = 3
"""A chosen worker may turn out not to be connected; after this many there is an error."""


@dataclass(frozen=True, slots=True)
class GenerationBounds:
    """From the frontend's settings."""

    deadline_s: float
    connect_wait_s: float
    max_pending_tokens: int


class Generation:
    """One client request; `start` it once, always `close` it."""

    def __init__(
        self, plan: GenerationPlan, started_s: float, bounds: GenerationBounds, on_overflow: Callable[[], None]
    ) -> None:
        """`started_s`: when the client's request arrived; `on_overflow`: the client does not read."""
        self.plan = plan
        self.started_s = started_s
        choices = len(plan.prompts) * plan.n
        self.mailbox = Mailbox(bounds.max_pending_tokens * choices, on_overflow)
        self.relays: list[Relay] = []
        self.instance_ids: list[str] = []
        self.policies: list[str] = []
        """Who placed each of `instance_ids`."""
        """Of each prompt."""
        self._bounds = bounds
        self._links: dict[str, WorkerLink] = {}
        self._placed_ids: list[str] = []
        self._placement: PlacementClient | None = None

    async def start(self, pool: WorkerPool, placement: PlacementClient, metrics: ModelMetrics) -> None:
        """Place every prompt and send its choices. Raises ApiError if that is impossible."""
        self._placement = placement
        for index in range(len(self.plan.prompts)):
            await self._start_prompt(index, pool, placement)
        metrics.prompt_tokens.inc(self.plan.prompt_tokens)

    def abort_choice(self, index: int) -> None:
        """The client has all it wants of this choice."""
        self._abort(self.relays[index])

    def close(self, ok: bool, reason: str) -> None:
        """Take back what still runs and tell the scheduler how it ended."""
        for relay in self.relays:
            self._abort(relay)
        if self._placement is not None:
            for placed_id in self._placed_ids:
                self._placement.ended(placed_id, ok, reason)
        self._placed_ids.clear()

    def _abort(self, relay: Relay) -> None:
        if not relay.finished:
            relay.finished = True
            self._links[relay.request_id].abort(relay)

    async def _start_prompt(self, index: int, pool: WorkerPool, placement: PlacementClient) -> None:
        choices = range(index * self.plan.n, (index + 1) * self.plan.n)
        relays = [self._relay(choice) for choice in choices]
        place = self._place_request(index, relays[0].request_id)
        for _ in range(MAX_PLACEMENTS):
            chosen = await self._place(place, placement)
            instance_id = chosen.instance_id
            link = await pool.wait_connected(instance_id, self._bounds.connect_wait_s)
            if link is not None and self._submit(relays, link):
                self.relays += relays
                self.instance_ids.append(instance_id)
                self.policies.append(chosen.policy)
                return
            log.warning("placed on an instance that is not connected", extra={"instance_id": instance_id})
            place.excluded_instance_ids.append(instance_id)
        raise unavailable("The instances that were chosen for this request cannot be reached; try again.")

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
        )

    def _place_request(self, index: int, request_id: str) -> scheduler_pb2.PlaceRequest:
        prompt = self.plan.prompts[index]
        return scheduler_pb2.PlaceRequest(
            request_id=request_id,
            model=self.plan.model.name,
            prompt_tokens=len(prompt.token_ids),
            block_hashes=block_hashes(prompt.token_ids, self.plan.model.block_tokens),
            priority=self.plan.priority,
            max_tokens=prompt.sampling.max_tokens,
        )

    async def _place(self, request: scheduler_pb2.PlaceRequest, placement: PlacementClient) -> Placement:
        if request.request_id not in self._placed_ids:  # before the answer, which a client may not wait for
            self._placed_ids.append(request.request_id)
        try:
            return await placement.place(request)
        except UnknownModel as error:
            raise model_not_found(request.model) from error
        except NoInstance as error:
            raise unavailable(f"No instance can take this request now: {error}.", "no_instance") from error

    def _submit(self, relays: list[Relay], link: WorkerLink) -> bool:
        try:
            for relay in relays:
                link.submit(relay)
                self._links[relay.request_id] = link
        except PeerUnavailable:
            for relay in relays:
                link.abort(relay)
            return False
        return True
