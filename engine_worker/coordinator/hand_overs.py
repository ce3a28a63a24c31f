"""Requests that are only prefilled here: each moves to its decode instance after its first token."""

import asyncio
import logging
from dataclasses import dataclass

from engine_worker.coordinator.coordinator import Coordinator
from engine_worker.coordinator.outgoing import MigrationOutcome
from engine_worker.coordinator.workplace import Workplace
from engine_worker.request_table import TrackedRequest

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _HandOver:
    tracked: TrackedRequest
    target_id: str
    first_token_s: float | None = None


class HandOvers:
    """Orders the migrations and says how they ended; a request whose hand-over fails is decoded here."""

    def __init__(self, workplace: Workplace, coordinator: Coordinator) -> None:
        self._workplace = workplace
        self._coordinator = coordinator
        self._under_way: set[_HandOver] = set()
        workplace.instance.on_change.append(self._look)

    def __len__(self) -> int:
        return len(self._under_way)

    def order(self, request_id: str, target_id: str) -> None:
        """The request, which has just been admitted, is to be decoded by another instance. One that was refused here,
        or that this instance is to decode itself, needs no transfer."""
        tracked = self._workplace.instance.table.find(request_id)
        if tracked is None or target_id == self._workplace.instance.description.instance_id:
            return
        hand_over = _HandOver(tracked, target_id)
        self._under_way.add(hand_over)
        self._workplace.tasks.spawn(self._carry_out(hand_over), name=f"hand over {request_id}")

    async def _carry_out(self, hand_over: _HandOver) -> None:
        try:
            outcome = await self._attempt(hand_over)
            self._note(hand_over, outcome)
        finally:
            self._under_way.discard(hand_over)

    async def _attempt(self, hand_over: _HandOver) -> MigrationOutcome:
        """Again where the target refuses for now, with pauses that double."""
        settings = self._workplace.settings
        outcome = await self._coordinator.hand_over(hand_over.tracked, hand_over.target_id)
        for tries in range(1, settings.hand_over_tries):
            if outcome.ending != "refused":
                break
            await asyncio.sleep(settings.hand_over_retry_s * 2 ** (tries - 1))
            outcome = await self._coordinator.hand_over(hand_over.tracked, hand_over.target_id)
        return outcome

    def _note(self, hand_over: _HandOver, outcome: MigrationOutcome) -> None:
        metrics = self._workplace.metrics
        if outcome.moved:
            metrics.hand_overs.labels("moved").inc()
            if hand_over.first_token_s is not None:
                metrics.hand_over_seconds.observe(self._workplace.clock() - hand_over.first_token_s)
            return
        if outcome.ending == "ended":
            metrics.hand_overs.labels("skipped").inc()
            return
        metrics.hand_overs.labels("failed").inc()
        log.warning(
            "a request is decoded where it was prefilled: its decode instance did not take it",
            extra={
                "request_id": hand_over.tracked.request.request_id,
                "target": hand_over.target_id,
                "reason": outcome.reason,
            },
        )

    def _look(self) -> None:
        for hand_over in self._under_way:
            if hand_over.first_token_s is None and hand_over.tracked.started:
                hand_over.first_token_s = self._workplace.clock()
