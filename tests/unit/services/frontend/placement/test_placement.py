"""Requests shared over schedulers that die, hang, or are not ready."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.v1 import scheduler_pb2
from services.frontend.placement.scheduler_link import SchedulerLink
from tests.in_time import within
from tests.unit.services.frontend.fakes import Delta, FakeScheduler, always, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = pytest.mark.live

USER: Any = [{"role": "user", "content": "hi"}]
BODY = {"model": "demo", "messages": USER}
NOT_READY = scheduler_pb2.PlaceResponse(outcome=scheduler_pb2.PLACE_OUTCOME_NOT_READY, message="not yet")


def short(_: Any) -> list[Delta]:
    return tokens([70], [71], [1])


def request(number: int) -> scheduler_pb2.PlaceRequest:
    return scheduler_pb2.PlaceRequest(request_id=f"request-{number}", model="demo")


def link_to(mesh: MeshOfFakes, scheduler: FakeScheduler) -> SchedulerLink:
    (link,) = (link for link in mesh.service.placement.links() if link.member == scheduler.member)
    return link


@asynccontextmanager
async def second_scheduler(mesh: MeshOfFakes, **fields: Any) -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler(always("worker-0"), member_id="scheduler-1", **fields)
    await scheduler.start()
    mesh.directory.join(scheduler.member)
    try:
        await mesh.until(lambda: link_to(mesh, scheduler).is_open)
        if scheduler.is_ready:
            await mesh.until(lambda: link_to(mesh, scheduler).is_usable)
        yield scheduler
    finally:
        await scheduler.stop()


async def test_load_is_shared_over_all_schedulers(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh, second_scheduler(mesh) as second:
        for number in range(6):
            await mesh.service.placement.place(request(number))
        assert [len(mesh.scheduler.placed), len(second.placed)] == [3, 3]


@pytest.mark.slow
async def test_whoever_placed_a_request_hears_of_its_end(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh, second_scheduler(mesh) as second:
        for _ in range(4):
            await mesh.client().chat.completions.create(**BODY)
        for scheduler in (mesh.scheduler, second):
            placed = {place.request_id for place in scheduler.placed}
            await mesh.until(lambda: {ended.request_id for ended in scheduler.ended} == placed)  # noqa: B023
            assert all(ended.ok for ended in scheduler.ended)


async def test_a_hung_scheduler_delays_few_requests_and_is_then_left_out(model_path: Path) -> None:
    async with (
        mesh_of_fakes(model_path, short, placement_deadline_s=0.4) as mesh,
        second_scheduler(mesh) as hung,
    ):
        hung.choose = lambda _: None
        hung.is_ready = False
        loop = asyncio.get_running_loop()
        for number in range(4):
            started_s = loop.time()
            placement = await mesh.service.placement.place(request(number))
            assert placement.policy == "fake"
            within(loop.time() - started_s, 0.35, "the other scheduler is asked before the deadline")
        assert len(hung.placed) == 1, "who has not answered has more outstanding than who has"
        await mesh.until(lambda: not link_to(mesh, hung).breaker.is_closed)
        await mesh.until(lambda: [ended.request_id for ended in hung.ended] == [hung.placed[0].request_id])
        assert mesh.service.placement.fallback == ""
        assert mesh.metric("scheduler_misses_total", scheduler="scheduler-1", reason="deadline") == 1
        assert mesh.metric("hedged_placements_total") == 1


async def test_the_only_scheduler_hanging_costs_one_deadline_in_all(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short, placement_deadline_s=0.2) as mesh:
        mesh.scheduler.choose = lambda _: None
        mesh.scheduler.is_ready = False
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await asyncio.gather(*(mesh.service.placement.place(request(number)) for number in range(8)))
        for number in range(8, 16):
            await mesh.service.placement.place(request(number))
        within(loop.time() - started_s, 0.4, "sixteen requests wait for one deadline together")
        assert len(mesh.scheduler.placed) == 8
        assert mesh.metric("fallback_placements_total") == 16


async def test_a_scheduler_that_is_not_ready_passes_its_requests_on(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh, second_scheduler(mesh) as second:
        second.is_ready = False
        second.choose = lambda _: NOT_READY
        policies = [(await mesh.service.placement.place(request(number))).policy for number in range(4)]
        assert policies == ["fake"] * 4
        assert len(second.placed) == 1
        second.is_ready = True
        second.choose = always("worker-0")
        await mesh.until(lambda: link_to(mesh, second).is_usable)


async def test_a_restarted_scheduler_is_asked_nothing_before_it_is_ready(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh, second_scheduler(mesh, is_ready=False) as second:
        await mesh.until(lambda: second.probes > 0)
        for number in range(4):
            await mesh.service.placement.place(request(number))
        assert second.placed == []


async def test_requests_in_flight_move_on_when_their_scheduler_dies(model_path: Path) -> None:
    async with (
        mesh_of_fakes(model_path, short, placement_deadline_s=30.0) as mesh,
        second_scheduler(mesh) as dying,
    ):
        dying.choose = lambda _: None
        mesh.directory.leave(mesh.scheduler.member)  # so that the other one is asked first
        asking = asyncio.create_task(mesh.service.placement.place(request(0)))
        await mesh.until(lambda: len(dying.placed) == 1)
        mesh.directory.join(mesh.scheduler.member)
        await dying.stop()
        assert (await asking).policy == "fake"


async def test_a_scheduler_without_a_lease_is_used_only_where_there_is_no_other(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh, second_scheduler(mesh) as second:
        mesh.directory.leave(mesh.scheduler.member)
        for number in range(4):
            await mesh.service.placement.place(request(number))
        assert [len(mesh.scheduler.placed), len(second.placed)] == [0, 4]
        mesh.directory.leave(second.member)
        for number in range(4, 8):
            await mesh.service.placement.place(request(number))
        assert len(mesh.scheduler.placed) + len(second.placed) == 8
        assert mesh.service.placement.fallback == ""


async def test_a_cancelled_placement_is_told_as_ended(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short, placement_deadline_s=30.0) as mesh:
        mesh.scheduler.choose = lambda _: None
        asking = asyncio.create_task(mesh.service.placement.place(request(0)))
        await mesh.until(lambda: len(mesh.scheduler.placed) == 1)
        asking.cancel()
        await mesh.until(lambda: [ended.request_id for ended in mesh.scheduler.ended] == ["request-0"])


async def test_without_a_scheduler_requests_are_placed_by_the_named_fallback(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh:
        await mesh.add_worker(short, instance_id="worker-1")
        await mesh.scheduler.stop()
        await mesh.until(lambda: not mesh.service.placement.connected)
        client = mesh.client()
        for _ in range(4):
            await client.chat.completions.create(**BODY)
        assert [len(worker.received) for worker in mesh.workers] == [2, 2]
        assert mesh.service.placement.fallback == "frontend_round_robin"
        assert (mesh.metric("fallback_placements_total"), mesh.metric("fallback_in_force")) == (4, 1)

        restarted = FakeScheduler(always("worker-1"))
        await restarted.start()
        try:
            mesh.directory.leave(mesh.scheduler.member)
            mesh.directory.join(restarted.member)
            await mesh.until(lambda: mesh.service.placement.connected)
            assert mesh.service.placement.fallback == "", "even if nobody asks for anything"
            assert mesh.metric("fallback_in_force") == 0
            await client.chat.completions.create(**BODY)
            assert mesh.service.placement.fallback == ""
            assert len(restarted.placed) == 1
        finally:
            await restarted.stop()


async def test_a_scheduler_that_does_not_answer_costs_its_deadline_only(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short, placement_deadline_s=0.05) as mesh:
        mesh.scheduler.choose = lambda _: None
        await mesh.client().chat.completions.create(**BODY)
        assert mesh.service.placement.fallback == "frontend_round_robin"
        asked = len(mesh.scheduler.placed)
        mesh.scheduler.choose = always("worker-0")
        await mesh.until(lambda: mesh.service.placement.fallback == "")
        assert len(mesh.scheduler.placed) == asked, "a probe found out, not a client's request"
        await mesh.client().chat.completions.create(**BODY)
        assert (len(mesh.scheduler.placed), mesh.service.placement.fallback) == (asked + 1, "")


async def test_a_scheduler_that_knows_no_instance_yet_refuses_nobody(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh:
        blind = scheduler_pb2.PlaceResponse(outcome=scheduler_pb2.PLACE_OUTCOME_NOT_READY, message="not yet")
        mesh.scheduler.choose = lambda _: blind
        answer = await mesh.client().chat.completions.create(**BODY)
        assert answer.choices[0].finish_reason == "stop"
        assert mesh.service.placement.fallback == "frontend_round_robin"


async def test_the_fallback_takes_turns_for_each_model(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.scheduler.stop()
        await mesh.until(lambda: not mesh.service.placement.connected)
        for number, model in enumerate(("demo", "demo", "other", "other")):
            await mesh.add_worker(short, instance_id=f"worker-{number}", model=model)
        placed = [
            (await mesh.service.placement.place(scheduler_pb2.PlaceRequest(request_id="r", model=model))).instance_id
            for model in ("demo", "other") * 2
        ]
        assert sorted(placed) == ["worker-0", "worker-1", "worker-2", "worker-3"]


async def test_where_one_scheduler_leads_the_pools_it_alone_is_asked_while_it_answers(model_path: Path) -> None:
    def led(_: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse:
        placed = scheduler_pb2.PLACE_OUTCOME_PLACED
        return scheduler_pb2.PlaceResponse(outcome=placed, instance_id="worker-0", leader_id="scheduler-1")

    async with mesh_of_fakes(model_path, short) as mesh, second_scheduler(mesh) as leader:
        leader.choose = led
        mesh.scheduler.choose = led
        for number in range(6):
            await mesh.service.placement.place(request(number))
        assert len(mesh.scheduler.placed) <= 1, "the first answer names the leader"
        await leader.stop()
        await mesh.until(lambda: not link_to(mesh, leader).is_usable)
        before = len(mesh.scheduler.placed)
        await mesh.service.placement.place(request(6))
        assert len(mesh.scheduler.placed) == before + 1, "whoever stands by"
