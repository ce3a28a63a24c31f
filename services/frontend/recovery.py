"""A request that lost its owner goes on elsewhere, behind the tokens that its client has."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.frontend.api.errors import ApiError
from services.frontend.metrics import FrontendMetrics
from services.frontend.placer import Placer
from services.frontend.relay import Loss, Relay

log = logging.getLogger(__name__)

RETRY_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class RecoveryBounds:
    """From the frontend's settings."""

    max_recoveries: int
    wait_s: float


class Recovery:
    """Of one client request; `close` it with the request."""

    def __init__(
        self, placer: Placer, bounds: RecoveryBounds, metrics: FrontendMetrics, clock: Callable[[], float]
    ) -> None:
        self._placer = placer
        self._bounds = bounds
        self._metrics = metrics
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    def recover(self, relay: Relay, loss: Loss) -> None:
        """Place a relay that nobody owns, or fail it with the loss."""
        story = {
            "request_id": relay.request_id,
            "instance_id": loss.instance_id,
            "reason": loss.reason,
            "emitted_tokens": len(relay.emitted_token_ids),
            "recoveries": relay.recoveries,
        }
        if relay.recoveries >= self._bounds.max_recoveries:
            log.error("a request was lost too often", extra=story)
            self._give_up(relay, loss)
            return
        relay.recoveries += 1
        log.warning("recovering a request", extra=story)
        task = asyncio.get_running_loop().create_task(self._place(relay, loss))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._placed(done, relay, loss))

    def close(self) -> None:
        """Recover nothing any more."""
        for task in self._tasks:
            task.cancel()

    async def _place(self, relay: Relay, loss: Loss) -> None:
        self._placer.ended(relay.request_id, ok=False, reason=loss.reason)
        if loss.reason == "unavailable":
            # A worker says so within a millisecond: without pauses all recoveries would be used up before it can end.
            await asyncio.sleep(RETRY_S * (relay.recoveries - 1))
        give_up_s = self._clock() + self._bounds.wait_s
        excluded = [loss.instance_id]
        while not relay.finished:
            try:
                await self._placer.put([relay], excluded)
                break
            except ApiError as error:
                if self._clock() >= give_up_s:
                    log.error(
                        "a request cannot be recovered", extra={"request_id": relay.request_id, "error": str(error)}
                    )
                    self._give_up(relay, loss)
                    return
            # The next life of the same instance is as good as another one.
            excluded = []
            await asyncio.sleep(RETRY_S)
        if relay.finished:
            return
        self._metrics.recoveries.labels(loss.reason).inc()
        log.info("request recovered", extra={"request_id": relay.request_id, "instance_id": relay.instance_id})

    def _placed(self, task: asyncio.Task[None], relay: Relay, loss: Loss) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a recovery broke", exc_info=error, extra={"request_id": relay.request_id})
            self._give_up(relay, loss)

    def _give_up(self, relay: Relay, loss: Loss) -> None:
        self._metrics.failed_recoveries.labels(loss.reason).inc()
        self._placer.pool.take_back(relay)
        relay.fail(loss.error)
