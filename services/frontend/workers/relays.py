"""All engine requests in flight, and what comes for them from any worker."""

import logging
from collections import Counter
from typing import Final, Protocol

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.ownership import TokenGap
from penstock.v1 import request_pb2, worker_pb2
from services.frontend.errors import upstream_failed
from services.frontend.metrics import FrontendMetrics
from services.frontend.workers.relay import Loss, Relay

log = logging.getLogger(__name__)


MAX_RELEASED: Final = 4096
"""Requests whose clients may come back, as far as they are remembered: more than a worker keeps."""


class Link(Protocol):
    """Where deltas come from."""

    @property
    def sender(self) -> Incarnation:
        """Whose link it is."""

    def abort(self, request_id: str) -> None:
        """Tell it to drop a request."""

    def release(self, request_id: str) -> None:
        """Tell it that the client of a request may come back to another frontend."""


class Relays:
    """By request id: a request's tokens may come over any link."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._relays: dict[str, Relay] = {}
        self._holding: dict[str, Relay] = {}
        """Those that wait for tokens of a former owner."""
        self._released: dict[str, None] = {}
        """Ids of those that were left to their worker, the oldest first. They may move on from there."""

    def __len__(self) -> int:
        return len(self._relays)

    def add(self, relay: Relay) -> None:
        """From now on deltas of its id go to it."""
        self._relays[relay.request_id] = relay
        self._released.pop(relay.request_id, None)

    def remove(self, relay: Relay) -> None:
        """What still comes for it is dropped."""
        if self._relays.get(relay.request_id) is relay:  # another one may have come by a resumed stream
            del self._relays[relay.request_id]
            self._holding.pop(relay.request_id, None)

    def release(self, relay: Relay) -> None:
        """As `remove`; but whichever worker has it is to keep it for its client."""
        self.remove(relay)
        self._released[relay.request_id] = None
        if len(self._released) > MAX_RELEASED:
            del self._released[next(iter(self._released))]

    def drop(self, link: Link, request_id: str) -> None:
        """A worker has got a request from another one, and nobody here waits for it."""
        if request_id in self._released:
            link.release(request_id)
        else:
            link.abort(request_id)

    def owned(self) -> Counter[Incarnation]:
        """How many requests each worker has."""
        owners = (relay.ownership.owner for relay in self._relays.values())
        return Counter(owner for owner in owners if owner is not None)

    def of(self, sender: Incarnation) -> list[Relay]:
        """The requests that a worker has."""
        return [relay for relay in self._relays.values() if relay.ownership.owner == sender]

    def deliver(self, link: Link, delta: request_pb2.TokenDelta, now_s: float) -> None:
        """A delta has come."""
        relay = self._relays.get(delta.request_id)
        if relay is None:
            if delta.emitted_token_ids:  # it moved there while its client took it back elsewhere
                self.drop(link, delta.request_id)
            return
        try:
            if not relay.accept(link.sender, delta, now_s):
                log.warning(
                    "a worker goes on with a request that is not its own any more",
                    extra={"request_id": relay.request_id, "instance_id": link.sender.instance_id},
                )
                link.abort(relay.request_id)
        except TokenGap as error:
            log.error("token stream broken", extra={"request_id": relay.request_id, "error": str(error)})
            self._metrics.token_gaps.inc()
            link.abort(relay.request_id)
            relay.fail(upstream_failed(f"The worker's token stream is broken: {error}", "token_gap"))
        self._look_after(relay)

    def moved(self, sender: Incarnation, moved: worker_pb2.RequestMoved) -> Relay | None:
        """A worker says that a request lives elsewhere; returns it if it is still wanted."""
        relay = self._relays.get(moved.request_id)
        if relay is not None:
            relay.moved(sender, Incarnation(moved.instance_id, moved.incarnation_id), moved.epoch)
            self._look_after(relay)
        return relay

    def lose(self, sender: Incarnation, loss: Loss) -> int:
        """Nothing more comes from a worker. Returns how many requests that left without an owner."""
        lost = len(self.of(sender))
        self._metrics.worker_losses.labels(loss.reason).inc(lost)
        if lost and loss.reason == "worker_lost":
            self._metrics.dead_workers.inc()
        for relay in list(self._relays.values()):
            relay.lost(sender, loss)
            self._look_after(relay)
        return lost

    def expire(self, now_s: float) -> None:
        """Time has passed."""
        for relay in list(self._holding.values()):
            relay.expire(now_s)
            self._look_after(relay)

    def _look_after(self, relay: Relay) -> None:
        if relay.finished:
            self.remove(relay)
        elif relay.ownership.holds:
            self._holding[relay.request_id] = relay
        elif self._holding:
            self._holding.pop(relay.request_id, None)
