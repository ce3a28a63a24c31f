"""Requests that are only prefilled here: each moves to its decode instance after its first token."""

import asyncio
import logging
from dataclasses import dataclass, field

from engine_worker.coordinator.coordinator import Coordinator
from engine_worker.coordinator.inquiry import DecodeInquiry
from engine_worker.coordinator.outgoing import MigrationOutcome
from engine_worker.coordinator.workplace import Workplace
from engine_worker.request_table import TrackedRequest
from mesh.errors import PenstockError

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _HandOver:
    tracked: TrackedRequest
    target_id: str
    """Empty: the scheduler is to be asked."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Its first token is out, or it has ended."""
    first_token_s: float | None = None


class HandOvers:
    """Orders the migrations and says how they ended; a request whose hand-over fails is decoded here."""

    def __init__(self, workplace: Workplace, coordinator: Coordinator, inquiry: DecodeInquiry) -> None:
        self._inquiry = inquiry
        self._workplace = workplace
        self._coordinator = coordinator
        self._under_way: dict[_HandOver, None] = {}
        workplace.instance.on_change.append(self._look)

    def __len__(self) -> int:
        return len(self._under_way)

    def order(self, request_id: str, target_id: str) -> None:
        """The request, which has just been admitted, is to be decoded by another instance; by which, the scheduler is
        asked after the first token if no `target_id` is named. One that was refused here, or that this instance is to
        decode itself, needs no transfer."""
        tracked = self._workplace.instance.table.find(request_id)
        if tracked is None or target_id == self._workplace.instance.description.instance_id:
            return
        hand_over = _HandOver(tracked, target_id)
        self._under_way[hand_over] = None
        self._workplace.tasks.spawn(self._carry_out(hand_over), name=f"hand over {request_id}")

    async def _carry_out(self, hand_over: _HandOver) -> None:
        try:
            if not hand_over.target_id and not await self._learn_target(hand_over):
                return
            outcome = await self._attempt(hand_over)
            self._note(hand_over, outcome)
        finally:
            self._under_way.pop(hand_over, None)

    async def _learn_target(self, hand_over: _HandOver) -> bool:
        """After the first token. False: the request has ended, or stays."""
        await hand_over.begun.wait()
        tracked, instance = hand_over.tracked, self._workplace.instance
        if instance.table.find(tracked.request.request_id) is not tracked:
            return False
        try:
            hand_over.target_id = await self._inquiry.ask(tracked.request, instance.description)
        except PenstockError as error:
            self._note(hand_over, MigrationOutcome(False, f"nobody could say who decodes it: {error}"))
        return bool(hand_over.target_id)

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
            "a request is decoded where it was prefilled, though not meant to be",
            extra={
                "request_id": hand_over.tracked.request.request_id,
                "target": hand_over.target_id,
                "reason": outcome.reason,
            },
        )

    def _look(self) -> None:
        table = self._workplace.instance.table
        for hand_over in self._under_way:
            if hand_over.first_token_s is not None:
                continue
            if hand_over.tracked.started:
                hand_over.first_token_s = self._workplace.clock()
                hand_over.begun.set()
            elif table.find(hand_over.tracked.request.request_id) is not hand_over.tracked:
                hand_over.begun.set()
