"""Reports in, orders out, over a real monitor and scheduler; workers are played."""

import asyncio
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from controlplane.decode_message import decode_message
from controlplane.model.duties import RESCHEDULER
from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import decode_load
from controlplane.policies.rescheduling.parameters import ReschedulerParameters
from controlplane.scheduler.rescheduling.worker_orders import WorkerOrders
from mesh.errors import PeerUnavailable
from mesh.leadership import Leadership, LeadershipMetrics
from mesh.leadership_state import LeaderRecord
from mesh.runtime import SystemClock
from penstock.v1 import monitor_pb2, scheduler_pb2, worker_pb2
from tests.still_clock import StillClock
from tests.unit.controlplane.local_mesh import (
    LocalMesh,
    PlayedWorker,
    Running,
    local_mesh,
    scheduler_stub,
    until,
)

pytestmark = pytest.mark.live

FAST = {"interval_s": 0.05}
GET = scheduler_pb2.GetReschedulerRequest()


async def tell(worker: PlayedWorker, *requests: tuple[str, int, int | None]) -> None:
    """Requests as (id, context, remaining)."""
    running = [RunningRequest(request_id, context, 1, left) for request_id, context, left in requests]
    report = decode_message(decode_load(running, ReschedulerParameters().horizon))
    await worker.load(running_requests=len(running))
    await worker.call.write(monitor_pb2.WorkerReport(decode=report))


class Orders:
    """Stands for all workers."""

    def __init__(self, monkeypatch: Any, **answer: Any) -> None:
        self.given: list[tuple[str, str, str]] = []
        self._answer = answer

        async def migrate(_: WorkerOrders, ordered: Any, address: str, epoch: int) -> worker_pb2.MigrateResponse:
            self.given.append((ordered.order.request_id, address, ordered.order.target_instance_id))
            if "error" in self._answer:
                raise PeerUnavailable(self._answer["error"])
            return worker_pb2.MigrateResponse(**self._answer)

        monkeypatch.setattr(WorkerOrders, "migrate", migrate)


async def crowded_mesh(
    mesh: LocalMesh, clock: StillClock, **settings: Any
) -> tuple[Running, PlayedWorker, PlayedWorker]:
    monitor = await mesh.monitor(clock=clock)
    scheduler = await mesh.scheduler(clock=clock, **settings)
    a, b = await mesh.worker(monitor, "a"), await mesh.worker(monitor, "b")
    await tell(a, ("r1", 300, None), ("r2", 200, None))
    await tell(b, ("r3", 10, None))
    return scheduler, a, b


async def intervals(scheduler: Running, count: int) -> None:
    """Until so many more decisions have been made."""

    async def made() -> float:
        await asyncio.sleep(0)
        return scheduler.metric("penstock_rescheduler_decision_seconds_count") or 0.0

    wanted = await made() + count
    await until(made, lambda decisions: decisions >= wanted)


@pytest.mark.slow
async def test_the_crowded_instance_is_told_to_move_a_request_once(monkeypatch: Any) -> None:
    orders = Orders(monkeypatch, moved=True, rounds=2, paused_ms=4.0)
    async with local_mesh() as mesh:
        scheduler, _, _ = await crowded_mesh(mesh, StillClock())
        async with scheduler_stub(scheduler) as stub:
            answer = await stub.SetRescheduler(scheduler_pb2.SetReschedulerRequest(mode="current", parameters=FAST))
            assert answer.parameters["theta"] == ReschedulerParameters().theta
            status = await until(
                lambda: stub.GetRescheduler(GET), lambda s: len(s.orders) > 0 and s.orders[0].outcome == 2
            )
            assert orders.given == [("r2", "a:1", "b")]
            assert status.orders[0].paused_ms == 4.0
            assert "a carries 500 tokens and b 10" in status.orders[0].reason
            (balance,) = status.balances
            assert (balance.instances, balance.mean_tokens) == (2, 255.0)
            assert status.in_charge
            # Several intervals later nothing was ordered twice, although no worker has reported the move.
            await intervals(scheduler, 3)
            assert len(orders.given) == 1
        assert scheduler.metric("penstock_rescheduler_migrations_total", outcome="moved") == 1
        assert scheduler.metric("penstock_rescheduler_mode", mode="current") == 1
        assert scheduler.metric("penstock_rescheduler_in_flight") == 0


@pytest.mark.slow
async def test_a_refused_request_is_held_and_explained(monkeypatch: Any) -> None:
    orders = Orders(monkeypatch, error="worker a is away")
    async with local_mesh() as mesh:
        scheduler, _, _ = await crowded_mesh(mesh, StillClock(), rescheduler="current")
        async with scheduler_stub(scheduler) as stub:
            await stub.SetRescheduler(scheduler_pb2.SetReschedulerRequest(mode="current", parameters=FAST))
            # r2 first; then r1, since r2 is held; then b, which has refused twice, is left alone.
            await until(lambda: stub.GetRescheduler(GET), lambda s: len(s.orders) == 2)
            await stub.Place(scheduler_pb2.PlaceRequest(request_id="r2", model="m", prompt_tokens=3))
            explained = await stub.Explain(scheduler_pb2.ExplainRequest(request_id="r2"))
            (move,) = explained.moves
            assert (move.outcome, move.message) == (scheduler_pb2.ORDER_OUTCOME_STAYED, "worker a is away")
            await intervals(scheduler, 3)
            assert [given[0] for given in orders.given] == ["r2", "r1"]


@pytest.mark.slow
async def test_silence_and_missing_predictions_fall_back_loudly(monkeypatch: Any, caplog: Any) -> None:
    orders, clock = Orders(monkeypatch, moved=True), StillClock()
    async with local_mesh() as mesh:
        scheduler, a, b = await crowded_mesh(mesh, clock)
        async with scheduler_stub(scheduler) as stub:
            await stub.SetRescheduler(scheduler_pb2.SetReschedulerRequest(mode="predicted", parameters=FAST))
            status = await until(lambda: stub.GetRescheduler(GET), lambda s: s.fallback == "current")
            assert "0 of 3 running requests" in status.fallback_reason
            await until(lambda: stub.GetRescheduler(GET), lambda s: len(s.orders) == 1)
            clock.at_s += 1.0
            await a.load(running_requests=2)
            await b.load(running_requests=1)
            status = await until(lambda: stub.GetRescheduler(GET), lambda s: s.fallback == "off")
            assert "has told of its running requests 1.0 s ago" in status.fallback_reason
            assert set(status.balances[0].excluded) == {"a", "b"}
            assert scheduler.metric("penstock_rescheduler_fallback", model="m") == 1
            await tell(a, ("r1", 300, 5000), ("r2", 200, 5000))
            await tell(b, ("r3", 10, 5000))
            status = await until(lambda: stub.GetRescheduler(GET), lambda s: not s.fallback)
            assert status.mode == "predicted"
    assert caplog.text.count("rescheduling by a fallback mode") == 2
    assert len(orders.given) >= 1


async def test_only_the_leader_orders(monkeypatch: Any) -> None:
    orders = Orders(monkeypatch, moved=True)
    async with local_mesh() as mesh:
        metrics = LeadershipMetrics(CollectorRegistry())
        other = Leadership(mesh.store, LeaderRecord(RESCHEDULER, "other", "1"), SystemClock(), metrics)
        running = asyncio.create_task(other.run())
        while not other.is_leading:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        scheduler, _, _ = await crowded_mesh(mesh, StillClock(), rescheduler="current")
        async with scheduler_stub(scheduler) as stub:
            await stub.SetRescheduler(scheduler_pb2.SetReschedulerRequest(mode="current", parameters=FAST))
            await until(lambda: stub.GetRescheduler(GET), lambda s: len(s.balances) == 1)
            assert orders.given == []
            running.cancel()
            await other.resign()
            await until(lambda: stub.GetRescheduler(GET), lambda s: len(s.orders) == 1)


async def test_what_cannot_be_set_is_refused() -> None:
    async with local_mesh() as mesh:
        scheduler = await mesh.scheduler()
        async with scheduler_stub(scheduler) as stub:
            for request, reason in (
                (scheduler_pb2.SetReschedulerRequest(mode="best"), "off, current, predicted"),
                (scheduler_pb2.SetReschedulerRequest(mode="current", parameters={"tetha": 1.0}), "theta=0.1"),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match=reason):
                    await stub.SetRescheduler(request)
            assert (await stub.GetRescheduler(GET)).mode == "off"


async def test_a_report_that_makes_no_sense_is_logged_and_dropped(caplog: Any) -> None:
    async with local_mesh() as mesh:
        scheduler, a, _ = await crowded_mesh(mesh, StillClock(), rescheduler="current")
        await a.call.write(
            monitor_pb2.WorkerReport(decode=monitor_pb2.DecodeReport(request_ids=["r1"], stride_tokens=1))
        )
        async with scheduler_stub(scheduler) as stub:
            await until(lambda: stub.GetRescheduler(GET), lambda s: "cannot be read" in caplog.text)
