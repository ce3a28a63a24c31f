"""A request that lost its owner goes on elsewhere, behind the tokens that its client has."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.errors import ApiError
from services.frontend.metrics import FrontendMetrics
from services.frontend.placement.placer import Placer
from services.frontend.placement.recovery_budget import RecoveryBudget
from services.frontend.workers.relay import Loss, Relay

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveryBounds:
    """From the frontend's settings."""

    max_recoveries: int
    """See `RecoveryBudget`, as for `wait_s`."""
    wait_s: float
    """And for how long an instance is waited for, each time."""


class Recovery:
    """Of one client request; `close` it with the request."""

    def __init__(
        self, placer: Placer, bounds: RecoveryBounds, metrics: FrontendMetrics, clock: Callable[[], float]
    ) -> None:
        self._placer = placer
        self._bounds = bounds
        self._metrics = metrics
        self._clock = clock
        self._budgets: dict[str, RecoveryBudget] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    def recover(self, relay: Relay, loss: Loss) -> None:
        """Place a relay that nobody owns, or fail it with the loss."""
        story = {
            "request_id": relay.request_id,
            "instance_id": loss.instance_id,
            "reason": loss.reason,
            "emitted_tokens": len(relay.emitted_token_ids),
        }
        budget = self._budgets.get(relay.request_id)
        if budget is None:
            budget = RecoveryBudget(self._bounds.max_recoveries, self._bounds.wait_s)
            self._budgets[relay.request_id] = budget
        pause_s = budget.lost(len(relay.emitted_token_ids), self._clock())
        story["losses_without_progress"] = budget.losses
        if pause_s is None:
            log.error("a request was lost too often", extra=story)
            self._give_up(relay, loss)
            return
        log.warning("recovering a request", extra=story)
        task = asyncio.get_running_loop().create_task(self._place(relay, loss, pause_s))
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._placed(done, relay, loss))

    def close(self) -> None:
        """Recover nothing any more."""
        for task in self._tasks:
            task.cancel()

    async def _place(self, relay: Relay, loss: Loss, pause_s: float) -> None:
        self._placer.ended(relay.request_id, ok=False, reason=loss.reason)
        await asyncio.sleep(pause_s)
        if not relay.finished:
            try:
                await self._placer.put_again(relay, self._bounds.wait_s, loss.instance_id)
            except ApiError as error:
                log.error("a request cannot be recovered", extra={"request_id": relay.request_id, "error": str(error)})
                self._give_up(relay, loss)
                return
        if relay.finished:
            return
        self._metrics.recoveries.labels(loss.reason).inc()
        log.info("request recovered", extra={"request_id": relay.request_id, "instance_id": relay.instance_id})

    def _placed(self, task: asyncio.Task[None], relay: Relay, loss: Loss) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a recovery broke", exc_info=error, extra={"request_id": relay.request_id})
            self._give_up(relay, loss)

    def _give_up(self, relay: Relay, loss: Loss) -> None:
        self._metrics.failed_recoveries.labels(loss.reason).inc()
        self._placer.pool.take_back(relay)
        relay.fail(loss.error)
