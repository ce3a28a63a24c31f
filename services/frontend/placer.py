"""Puts requests on workers: asks where, waits for the connection, asks again if there is none."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from controlplane.model.prefix_hash import block_hashes
from mesh.errors import NoInstance, PeerUnavailable, UnknownModel
from penstock.v1 import scheduler_pb2
from services.frontend.api.errors import unavailable
from services.frontend.placement import Placement, PlacementClient
from services.frontend.relay import Relay
from services.frontend.worker_link import WorkerLink
from services.frontend.worker_pool import WorkerPool

log = logging.getLogger(__name__)

MAX_PLACEMENTS: Final = 3
"""A chosen worker may turn out not to be connected; after this many there is an error."""


@dataclass(slots=True)
class Placer:
    """Of one client request."""

    pool: WorkerPool
    placement: PlacementClient
    block_tokens: int
    connect_wait_s: float
    _placed_ids: set[str] = field(default_factory=set)

    async def put(self, relays: Sequence[Relay], excluded_instance_ids: Iterable[str] = ()) -> Placement:
        """Put the choices of one prompt, or a single one that lost its owner, on one instance. Returns where and who
        said so. Raises ApiError."""
        request = self._request(relays[0], excluded_instance_ids)
        for _ in range(MAX_PLACEMENTS):
            placement = await self._place(request)
            instance_id = placement.instance_id
            link = await self.pool.wait_connected(instance_id, self.connect_wait_s)
            if link is not None and self._submit(relays, link, placement):
                return placement
            log.warning("placed on an instance that is not connected", extra={"instance_id": instance_id})
            request.excluded_instance_ids.append(instance_id)
        raise unavailable("The instances that were chosen for this request cannot be reached; try again.")

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

    async def _place(self, request: scheduler_pb2.PlaceRequest) -> Placement:
        self._placed_ids.add(request.request_id)  # before the answer, which a client may not wait for
        try:
            return await self.placement.place(request)
        except (NoInstance, UnknownModel) as error:
            # This frontend knows the model: that no instance announces it now may be over in a second.
            raise unavailable(f"No instance can take this request now: {error}.", "no_instance") from error

    def _submit(self, relays: Sequence[Relay], link: WorkerLink, placement: Placement) -> bool:
        sent: list[Relay] = []
        try:
            for relay in relays:
                if relay.finished:
                    continue  # its client has had enough of it meanwhile
                link.submit(relay, placement)
                sent.append(relay)
        except PeerUnavailable:
            for relay in sent:
                self.pool.take_back(relay)
                relay.ownership.take_back()
            return False
        return True
