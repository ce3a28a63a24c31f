"""Carries out what the `ReschedulingManager` says: decides in a thread, has orders carried out by the workers."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstanceState
from controlplane.model.step_costs import DATASHEET_COSTS
from controlplane.policies.rescheduling.manager import (
    BalanceChanged,
    Configured,
    Decide,
    Decided,
    FallbackChanged,
    GiveOrder,
    IntervalPassed,
    OrderEnded,
    ReschedulingEvent,
    ReschedulingManager,
)
from controlplane.policies.rescheduling.migrations import OrderedMigration
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.problem import Balance
from controlplane.policies.rescheduling.switch import Fallback
from controlplane.policies.rescheduling.view import InstanceReport, ModelReport
from controlplane.policies.stages.layout import StageLayout
from controlplane.scheduler.feed import ClusterFeed
from controlplane.scheduler.rescheduling.decode_loads import DecodeLoads
from controlplane.scheduler.rescheduling.metrics import ReschedulerMetrics
from mesh.errors import RpcError
from mesh.leadership_state import Lead
from mesh.runtime import Clock, Threads
from mesh.tasks import TaskSet
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)


class OrderChannel(Protocol):
    """How an order reaches the worker that has the request."""

    async def migrate(self, ordered: OrderedMigration, address: str, epoch: int) -> worker_pb2.MigrateResponse:
        """Ends within a deadline. Raises `RpcError`."""


class ReschedulingService:
    """The loop of Algorithm 1 over all models; of several schedulers the leader alone gives orders."""

    def __init__(
        self,
        feed: ClusterFeed,
        manager: ReschedulingManager,
        channel: OrderChannel,
        metrics: ReschedulerMetrics,
        lead: Lead,
        clock: Clock,
        threads: Threads,
        stages: Callable[[], Mapping[str, StageLayout]] = dict,
    ) -> None:
        """`stages` are the plans in force, by model."""
        self.manager = manager
        self.lead = lead
        self._stages = stages
        self._feed = feed
        self._channel = channel
        self._metrics = metrics
        self._clock = clock
        self._threads = threads
        self._wake = asyncio.Event()
        self._tasks = TaskSet("rescheduler")

    def configure(self, mode: ReschedulerMode, parameters: ReschedulerParameters) -> bool:
        """Reschedule like this from now on; True where it is another configuration than before."""
        switch = self.manager.switch
        if (mode, parameters) == (switch.mode, switch.parameters):
            return False
        self._handle(Configured(mode, parameters))
        self._metrics.forget_balances()
        self._wake.set()
        return True

    async def run(self) -> None:
        """Decide every interval, for ever."""
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(self.manager.switch.parameters.interval_s):
                    await self._wake.wait()
            except TimeoutError:
                await self.reschedule()

    async def stop(self) -> None:
        """Withdraw the orders that are under way."""
        await self._tasks.cancel()

    async def reschedule(self) -> None:
        """Look, decide and order once, as `run` does every interval; returns when all decisions are made."""
        self._note_mode()
        if self.manager.switch.mode is ReschedulerMode.OFF:
            return
        table = self._feed.table
        stages = self._stages()
        models = {
            model: ModelReport(
                instance_reports(table, self._feed.decode_loads, model, stages.get(model)),
                self._feed.unreachable(model),
            )
            for model in table.models()
        }
        decisions = self._handle(IntervalPassed(models))
        for model, view in self.manager.views.items():
            self._metrics.excluded.labels(model).set(len(view.excluded))
        for decision in decisions:
            started = self._clock.now_s()
            # In a thread of its own: with hundreds of instances it takes milliseconds, which placements must not wait
            # for.
            rescheduling = await self._threads.run(decision.decide)
            self._metrics.decision_seconds.observe(self._clock.now_s() - started)
            alive = frozenset(each.instance_id for each in self._feed.table.instances())
            unix_ms = int(1000 * self._clock.unix_s())
            self._handle(Decided(decision.decision_id, rescheduling, alive, self.lead.is_leading, unix_ms))
            if rescheduling.idle is not None:
                self._metrics.idle.labels(decision.model, rescheduling.idle).inc()

    def _handle(self, event: ReschedulingEvent) -> list[Decide]:
        """Carry out what is to be done at once; returns the decisions that are to be made."""
        decisions: list[Decide] = []
        for instruction in self.manager.handle(event, self._clock.now_s()):
            match instruction:
                case Decide():
                    decisions.append(instruction)
                case GiveOrder(ordered):
                    order = ordered.order
                    log.info("a migration is ordered", extra=_names(ordered) | {"reason": order.reason})
                    sent = self._carry_out(ordered, self._address(order.source_instance_id), self.lead.epoch)
                    self._tasks.spawn(sent, name=f"move {order.request_id}")
                case FallbackChanged(model, fallback):
                    self._note_fallback(model, fallback)
                case BalanceChanged(model, balance):
                    self._note_balance(model, balance)
        self._metrics.in_flight.set(self.manager.migrations.in_flight)
        return decisions

    def _address(self, instance_id: str) -> str:
        """Of an instance that was there when its order was given, at that very moment."""
        return next(each.address for each in self._feed.table.instances() if each.instance_id == instance_id)

    async def _carry_out(self, ordered: OrderedMigration, address: str, epoch: int) -> None:
        moved, message, paused_ms = False, "the order was withdrawn: the scheduler is stopping", 0.0
        try:
            answer = await self._channel.migrate(ordered, address, epoch)
            if answer.highest_epoch:
                self.lead.refused(answer.highest_epoch)
            moved, message, paused_ms = answer.moved, answer.reason, answer.paused_ms
        except RpcError as error:
            message = str(error)
        finally:
            self._handle(OrderEnded(ordered, moved, message, paused_ms))
            self._metrics.migrations.labels(ordered.outcome).inc()
            self._metrics.move_seconds.observe(ordered.duration_ms / 1000)
        if not moved:
            log.warning("a request stayed where it was", extra=_names(ordered) | {"reason": message})

    def _note_mode(self) -> None:
        switch = self.manager.switch
        for mode in ReschedulerMode:
            self._metrics.mode.labels(mode).set(mode is switch.mode)
        self._metrics.in_charge.set(self.lead.is_leading)
        for model in self._feed.table.models():
            self._metrics.fallback.labels(model).set(model in switch.fallbacks)

    def _note_fallback(self, model: str, fallback: Fallback | None) -> None:
        self._metrics.fallback.labels(model).set(fallback is not None)
        if fallback is None:
            mode = str(self.manager.switch.mode)
            log.warning("rescheduling by the configured mode again", extra={"model": model, "mode": mode})
        else:
            log.error(
                "rescheduling by a fallback mode",
                extra={"model": model, "fallback": str(fallback.mode), "reason": fallback.reason},
            )

    def _note_balance(self, model: str, balance: Balance | None) -> None:
        if balance is None:
            self._metrics.forget_balance(model)
            return
        self._metrics.mean_tokens.labels(model).set(balance.mean_tokens)
        self._metrics.variance.labels(model).set(balance.variance)
        self._metrics.expected_variance.labels(model).set(balance.expected_variance)


def instance_reports(
    table: ClusterTable, loads: DecodeLoads, model: str, stages: StageLayout | None = None
) -> tuple[InstanceReport, ...]:
    """What the scheduler knows of those of a model's instances that may decode."""
    snapshot = table.snapshot(model)
    reports: list[InstanceReport] = []
    for row, description in enumerate(() if snapshot is None else snapshot.instances):
        assert snapshot is not None, "it has rows"
        if not description.phase.decodes:
            continue
        heard = loads.get(description.instance_id, description.incarnation_id)
        load, costs = table.load(description.instance_id), snapshot.costs_of(row)
        reports.append(
            InstanceReport(
                description.instance_id,
                description.kv_blocks * description.block_tokens,
                load.token_interval_ms or load.step_ms,
                None if heard is None else heard.load,
                None if heard is None else heard.heard_s,
                snapshot.refusal(row),
                snapshot.state(row) is InstanceState.READY,
                load.transfer_obstacle,
                None if costs == DATASHEET_COSTS else costs,
                None if stages is None else stages.stage_with(description.instance_id),
            )
        )
    return tuple(reports)


def _names(ordered: OrderedMigration) -> dict[str, str]:
    return {
        "request_id": ordered.order.request_id,
        "source": ordered.order.source_instance_id,
        "target": ordered.order.target_instance_id,
    }
