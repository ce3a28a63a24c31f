"""New requests wait while no instance can take them: bounded, woken by what joins, not for an unknown model."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.model.autoscale_record import ScaleRecord
from controlplane.protocols import recovery
from penstock.v1 import scheduler_pb2
from tests.unit.services.frontend.fakes import always, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = pytest.mark.live

BODY: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def short(_: Any) -> Any:
    return tokens([70], [71], [1])


def nobody(_: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse:
    return scheduler_pb2.PlaceResponse(outcome=scheduler_pb2.PLACE_OUTCOME_NO_INSTANCE, message="all away")


async def all_workers_go(mesh: MeshOfFakes) -> None:
    for worker in mesh.workers:
        mesh.directory.leave(worker.member(str(mesh.model_path)))
        await worker.stop()
    mesh.scheduler.choose = nobody


async def test_a_new_request_waits_for_a_worker_to_come_back(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "FIRST_RETRY_S", 60.0)  # so it is the news that wakes it
    async with mesh_of_fakes(model_path, short) as mesh, mesh.http() as http:
        await all_workers_go(mesh)
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        await mesh.until(lambda: len(mesh.service.room) == 1)
        assert mesh.metric("waiting_requests") == 1
        mesh.scheduler.choose = always("worker-0")
        await mesh.add_worker(short, incarnation_id="second")
        response = await asking
        assert response.status_code == 200
        assert mesh.metric("waiting_requests") == 0


async def test_a_model_that_nobody_ever_served_is_refused_at_once(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh, mesh.http() as http:
        await all_workers_go(mesh)
        response = await http.post("/v1/chat/completions", json={**BODY, "model": "no-such"})
        assert response.status_code == 404


async def test_a_model_scaled_to_zero_is_waited_for_though_it_was_never_seen(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh, mesh.http() as http:
        await mesh.add_worker(short, attributes={"model": "another"})
        scale = ScaleRecord(BODY["model"], 0, why="no request for 600 s")
        await mesh.store.put(scale.key, msgspec.json.encode(scale))
        await mesh.until(lambda: BODY["model"] in mesh.service.scales)
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        await mesh.until(lambda: len(mesh.service.room) == 1)
        assert list(mesh.service.room.demand()) == [(BODY["model"], 0, 1)], "the planner hears that one waits"
        mesh.scheduler.choose = always("worker-1")
        await mesh.add_worker(short, instance_id="worker-1")
        assert (await asking).status_code == 200
        assert list(mesh.service.room.demand()) == [(BODY["model"], 1, 0)], "and it has come once"


async def test_a_model_scaled_to_zero_that_nobody_starts_is_no_unknown_one(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, instance_wait_s=0.0) as mesh, mesh.http() as http:
        await mesh.add_worker(short, attributes={"model": "another"})
        scale = ScaleRecord(BODY["model"], 0)
        await mesh.store.put(scale.key, msgspec.json.encode(scale))
        await mesh.until(lambda: BODY["model"] in mesh.service.scales)
        response = await http.post("/v1/chat/completions", json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_instance")


async def test_so_many_wait_and_no_more(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short, max_waiting_requests=1) as mesh, mesh.http() as http:
        await all_workers_go(mesh)
        first = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        await mesh.until(lambda: len(mesh.service.room) == 1)
        refused = await http.post("/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "no_instance")
        assert int(refused.headers["retry-after"]) >= 1
        assert mesh.metric("refused_waits_total") == 1
        first.cancel()
        await mesh.until(lambda: len(mesh.service.room) == 0)
        assert mesh.service.gate.queue.running == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "status", "code"),
    [
        ({"instance_wait_s": 0.1}, 503, "no_instance"),
        ({"instance_wait_s": 0.0}, 503, "no_instance"),
        ({"request_deadline_s": 0.1}, 504, "deadline_exceeded"),
    ],
)
async def test_the_wait_has_an_end(model_path: Path, settings: Any, status: int, code: str) -> None:
    async with mesh_of_fakes(model_path, short, **settings) as mesh, mesh.http() as http:
        await all_workers_go(mesh)
        response = await http.post("/v1/chat/completions", json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_who_waits_when_the_frontend_stops_is_told(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh, mesh.http() as http:
        await all_workers_go(mesh)
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        await mesh.until(lambda: len(mesh.service.room) == 1)
        await mesh.role.stop()
        response = await asking
        assert (response.status_code, response.json()["error"]["code"]) == (503, "stopped")


async def test_a_scheduler_that_does_not_know_of_a_connected_worker_is_overruled(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "OVERRULE_S", 0.05)
    async with mesh_of_fakes(model_path, short) as mesh, mesh.http() as http:
        first, mesh.scheduler.choose = mesh.scheduler.choose, nobody
        response = await http.post("/v1/chat/completions", json=BODY)
        assert (response.status_code, response.headers["x-penstock-policy"]) == (200, "frontend_round_robin")
        assert mesh.metric("fallback_placements_total") == 1
        monkeypatch.setattr(recovery, "OVERRULE_S", 1e9)
        response = await http.post("/v1/chat/completions", json=BODY)
        assert response.headers["x-penstock-policy"] == "frontend_round_robin", "nobody waits for that scheduler again"
        assert mesh.service.placement.is_overruled(BODY["model"])
        mesh.scheduler.choose = first
        response = await http.post("/v1/chat/completions", json=BODY)
        assert response.headers["x-penstock-policy"] != "frontend_round_robin"
        assert not mesh.service.placement.is_overruled(BODY["model"])
