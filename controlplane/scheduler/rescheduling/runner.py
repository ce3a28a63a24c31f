"""Decides every interval and has the orders carried out by the workers."""

import asyncio
import logging
from typing import Protocol

from controlplane.policies.rescheduling.migrations import Migrations, OrderedMigration
from controlplane.policies.rescheduling.mode import ReschedulerMode
from controlplane.policies.rescheduling.problem import Balance, Rescheduling
from controlplane.scheduler.feed import ClusterFeed
from controlplane.scheduler.rescheduling.metrics import ReschedulerMetrics
from controlplane.scheduler.rescheduling.switch import ReschedulerSwitch
from controlplane.scheduler.rescheduling.view import DecodeView, decode_view
from mesh.errors import RpcError
from mesh.leadership_state import Lead
from mesh.runtime import Clock, Threads
from mesh.tasks import TaskSet
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)


class Mover(Protocol):
    """How an order reaches the worker that has the request."""

    async def migrate(self, ordered: OrderedMigration, address: str, epoch: int) -> worker_pb2.MigrateResponse:
        """Ends within a deadline. Raises `RpcError`."""


class ReschedulingRunner:
    """The loop of Algorithm 1 over all models, in one scheduler of the mesh at a time."""

    def __init__(
        self,
        feed: ClusterFeed,
        switch: ReschedulerSwitch,
        migrations: Migrations,
        mover: Mover,
        metrics: ReschedulerMetrics,
        lead: Lead,
        clock: Clock,
        threads: Threads,
    ) -> None:
        self.switch = switch
        self.migrations = migrations
        self.lead = lead
        self.balances: dict[str, Balance] = {}
        """By model, as of the last interval."""
        self.views: dict[str, DecodeView] = {}
        self._feed = feed
        self._mover = mover
        self._metrics = metrics
        self._clock = clock
        self._threads = threads
        self._wake = asyncio.Event()
        self._tasks = TaskSet("rescheduler")

    def note_change(self) -> None:
        """The configuration has changed: what was said by the old one is void."""
        self.balances.clear()
        self.views.clear()
        self._metrics.forget_balances()
        self._wake.set()

    async def run(self) -> None:
        """Decide every interval, for ever."""
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(self.switch.parameters.interval_s):
                    await self._wake.wait()
            except TimeoutError:
                await self.reschedule()

    async def stop(self) -> None:
        """Withdraw the orders that are under way."""
        await self._tasks.cancel()

    async def reschedule(self) -> None:
        """One interval."""
        self._note_mode()
        if self.switch.mode is ReschedulerMode.OFF:
            return
        table, loads = self._feed.table, self._feed.decode_loads
        incarnations = {each.instance_id: each.incarnation_id for each in table.instances()}

        def heard_s(instance_id: str) -> float | None:
            heard = loads.get(instance_id, incarnations.get(instance_id, ""))
            return None if heard is None else heard.heard_s

        self.migrations.settle(heard_s, self._clock.now_s())
        for model in table.models():
            now_s = self._clock.now_s()
            shunned = self.migrations.shunned_targets(now_s)
            view = decode_view(table, loads, model, self.switch.parameters, shunned, now_s)
            self.views[model] = view
            await self._decide(view)
            if model not in self.views:
                return  # configured otherwise meanwhile

    async def _decide(self, view: DecodeView) -> None:
        rescheduler, changed = self.switch.rescheduler(view)
        if changed:
            self._note_fallback(view.model)
        held = self.migrations.held_requests(self._clock.now_s())
        started = self._clock.now_s()
        # In a thread of its own: with hundreds of instances it takes milliseconds, which placements must not wait for.
        decided = await self._threads.run(rescheduler.decide, view.instances, self.migrations.moving(), held)
        self._metrics.decision_seconds.observe(self._clock.now_s() - started)
        if view.model not in self.views:
            return  # what was decided is void, see `note_change`
        self._note_balance(view, decided)
        if self.lead.is_leading:
            self._order(decided)

    def _order(self, decided: Rescheduling) -> None:
        addresses = {each.instance_id: each.address for each in self._feed.table.instances()}
        for order in decided.orders[: max(0, self.migrations.room)]:
            address = addresses.get(order.source_instance_id)
            if address is None or order.request_id in self.migrations:
                continue  # gone while the decision was made; or two instances told of it, which are handing it over
            ordered = self.migrations.begin(order, self._clock.now_s(), int(1000 * self._clock.unix_s()))
            log.info("a migration is ordered", extra=_names(ordered) | {"reason": order.reason})
            self._tasks.spawn(self._carry_out(ordered, address, self.lead.epoch), name=f"move {order.request_id}")
        self._metrics.in_flight.set(self.migrations.in_flight)

    async def _carry_out(self, ordered: OrderedMigration, address: str, epoch: int) -> None:
        moved, message, paused_ms = False, "the order was withdrawn: the scheduler is stopping", 0.0
        try:
            answer = await self._mover.migrate(ordered, address, epoch)
            if answer.highest_epoch:
                self.lead.refused(answer.highest_epoch)
            moved, message, paused_ms = answer.moved, answer.reason, answer.paused_ms
        except RpcError as error:
            message = str(error)
        finally:
            self.migrations.end(ordered, moved=moved, message=message, paused_ms=paused_ms, now_s=self._clock.now_s())
            self._metrics.migrations.labels(ordered.outcome).inc()
            self._metrics.move_seconds.observe(ordered.duration_ms / 1000)
            self._metrics.in_flight.set(self.migrations.in_flight)
        if not moved:
            log.warning("a request stayed where it was", extra=_names(ordered) | {"reason": message})

    def _note_mode(self) -> None:
        for mode in ReschedulerMode:
            self._metrics.mode.labels(mode).set(mode is self.switch.mode)
        self._metrics.in_charge.set(self.lead.is_leading)
        for model in self._feed.table.models():
            self._metrics.fallback.labels(model).set(model in self.switch.fallbacks)

    def _note_fallback(self, model: str) -> None:
        fallback = self.switch.fallbacks.get(model)
        self._metrics.fallback.labels(model).set(fallback is not None)
        if fallback is None:
            log.warning(
                "rescheduling by the configured mode again", extra={"model": model, "mode": str(self.switch.mode)}
            )
        else:
            log.error(
                "rescheduling by a fallback mode",
                extra={"model": model, "fallback": str(fallback.mode), "reason": fallback.reason},
            )

    def _note_balance(self, view: DecodeView, decided: Rescheduling) -> None:
        self._metrics.left_out.labels(view.model).set(len(view.left_out))
        if decided.balance is None:
            if self.balances.pop(view.model, None) is not None:
                self._metrics.forget_balance(view.model)
            return
        self.balances[view.model] = decided.balance
        self._metrics.mean_tokens.labels(view.model).set(decided.balance.mean_tokens)
        self._metrics.variance.labels(view.model).set(decided.balance.variance)
        self._metrics.expected_variance.labels(view.model).set(decided.balance.expected_variance)


def _names(ordered: OrderedMigration) -> dict[str, str]:
    return {
        "request_id": ordered.order.request_id,
        "source": ordered.order.source_instance_id,
        "target": ordered.order.target_instance_id,
    }
