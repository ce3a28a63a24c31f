"""Puts requests on workers: asks where, waits for the connection, asks again if there is none."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from controlplane.model.prefix_hash import block_hashes
from mesh.errors import NoInstance, PeerUnavailable, UnknownModel
from penstock.v1 import scheduler_pb2
from services.frontend.errors import ApiError, stopped, unavailable
from services.frontend.placement.client import Placement, PlacementClient
from services.frontend.placement.waiting_room import WaitingRoom
from services.frontend.workers.link import WorkerLink
from services.frontend.workers.pool import WorkerPool
from services.frontend.workers.relay import Relay

log = logging.getLogger(__name__)

MAX_PLACEMENTS: Final = 3
"""A chosen worker may turn out not to be connected; after this many there is an error."""
FIRST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 2.0
OVERRULE_S: Final = 1.0
"""A scheduler that finds no instance for so long, while the frontend is connected to some, is not asked any more: the
frontend places the request itself. Long enough for the monitors to tell it of a worker that has just joined."""


@dataclass(slots=True)
class Placer:
    """Of one client request."""

    pool: WorkerPool
    placement: PlacementClient
    block_tokens: int
    connect_wait_s: float
    room: WaitingRoom
    clock: Callable[[], float]
    _placed_ids: set[str] = field(default_factory=set)

    async def put_new(self, relays: Sequence[Relay], wait_s: float) -> Placement:
        """Put the choices of one prompt on one instance; while there is none, wait for it, in the waiting room and for
        `wait_s` at most. Returns where and who said so. Raises ApiError."""
        seen = self.pool.news
        try:
            return await self._put(relays)
        except ApiError as error:
            if wait_s <= 0:
                raise
            with self.room.entered(relays[0].model, error):
                return await self._wait_and_put(relays, wait_s, seen, error)

    async def put_again(self, relay: Relay, wait_s: float, lost_on: str) -> Placement:
        """The same for a choice that has lost its owner, outside of the waiting room."""
        seen = self.pool.news
        try:
            return await self._put([relay], (lost_on,))
        except ApiError as error:
            # From now on nobody is excluded: the next life of the same instance is as good as another one.
            return await self._wait_and_put([relay], wait_s, seen, error)

    async def _wait_and_put(self, relays: Sequence[Relay], wait_s: float, seen: int, error: ApiError) -> Placement:
        began_s = self.clock()
        retry_s = FIRST_RETRY_S
        while True:
            waited_s = self.clock() - began_s
            if self.room.is_closed:
                raise stopped()
            if waited_s >= wait_s:
                raise error
            has_news = await self.pool.wait_for_news(seen, min(wait_s - waited_s, retry_s))
            retry_s = FIRST_RETRY_S if has_news else min(LONGEST_RETRY_S, 2 * retry_s)
            seen = self.pool.news
            try:
                return await self._put(relays, overrule=self.clock() - began_s >= OVERRULE_S)
            except ApiError as failed:
                error = failed

    async def _put(
        self, relays: Sequence[Relay], excluded_instance_ids: Iterable[str] = (), *, overrule: bool = False
    ) -> Placement:
        request = self._request(relays[0], excluded_instance_ids)
        for _ in range(MAX_PLACEMENTS):
            placement = await self._place(request, overrule=overrule)
            instance_id = placement.instance_id
            link = await self.pool.wait_connected(instance_id, self._connect_wait_s(request, instance_id))
            if link is not None and self._submit(relays, link, placement):
                return placement
            log.info("placed on an instance that is not connected", extra={"instance_id": instance_id})
            request.excluded_instance_ids.append(instance_id)
        raise unavailable("The instances that were chosen for this request cannot be reached; try again.")

    def _connect_wait_s(self, request: scheduler_pb2.PlaceRequest, instance_id: str) -> float:
        """Nothing where another instance could have the request at once: the chosen one may be away for good."""
        chosen = self.pool.link(instance_id)
        if chosen is not None and chosen.is_connected:
            return 0.0  # there is nothing to wait for; nor should each placement look at every worker
        others = (link.instance_id for link in self.pool.connected(request.model))
        excluded = {instance_id, *request.excluded_instance_ids}
        return self.connect_wait_s if all(other in excluded for other in others) else 0.0

    def ended(self, request_id: str, ok: bool, reason: str) -> None:
        """Tell the scheduler, if it placed this one."""
        if request_id in self._placed_ids:
            self._placed_ids.discard(request_id)
            self.placement.ended(request_id, ok, reason)

    def close(self, ok: bool, reason: str) -> None:
        """All of them have ended."""
        for request_id in sorted(self._placed_ids):
            self.ended(request_id, ok, reason)

    def _request(self, relay: Relay, excluded_instance_ids: Iterable[str]) -> scheduler_pb2.PlaceRequest:
        token_ids = [*relay.prompt_token_ids, *relay.emitted_token_ids]
        return scheduler_pb2.PlaceRequest(
            request_id=relay.request_id,
            model=relay.model,
            prompt_tokens=len(token_ids),
            block_hashes=block_hashes(token_ids, self.block_tokens),
            priority=relay.priority,
            max_tokens=relay.sampling.max_tokens - len(relay.emitted_token_ids),
            excluded_instance_ids=excluded_instance_ids,
            is_decoding=bool(relay.emitted_token_ids),
        )

    async def _place(self, request: scheduler_pb2.PlaceRequest, *, overrule: bool) -> Placement:
        self._placed_ids.add(request.request_id)  # before the answer, which a client may not wait for
        try:
            return await self.placement.place(request)
        except (NoInstance, UnknownModel) as error:
            if overrule and self.pool.connected(request.model):
                return self.placement.place_here(request)
            # This frontend knows the model: that no instance announces it now may be over in a second.
            raise unavailable(f"No instance can take this request now: {error}.", "no_instance") from error

    def _submit(self, relays: Sequence[Relay], link: WorkerLink, placement: Placement) -> bool:
        sent: list[Relay] = []
        try:
            for relay in relays:
                if relay.finished:
                    continue  # its client has had enough of it meanwhile
                link.submit(relay, placement.decode_instance_id, is_decode_open=placement.is_decode_open)
                sent.append(relay)
        except PeerUnavailable:
            for relay in sent:
                self.pool.take_back(relay)
                relay.ownership.take_back()
            return False
        return True
