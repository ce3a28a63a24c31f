"""Workers, schedulers and clients that die, hang, lie or do not read."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.v1 import request_pb2, scheduler_pb2
from services.frontend.http import server
from services.frontend.requests.service import RunningRequest
from tests.unit.services.frontend.fakes import Delta, FakeScheduler, FakeWorker, always, failure, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = pytest.mark.live

USER: Any = [{"role": "user", "content": "hi"}]
BODY = {"model": "demo", "messages": USER}
ENDLESS = 100_000


def endless(_: request_pb2.GenerateRequest) -> list[Delta]:
    return [Delta(offset=index, token_ids=[70 + index % 20]) for index in range(ENDLESS)]


def short(_: request_pb2.GenerateRequest) -> list[Delta]:
    return tokens([70], [71], [1])


async def events(response: httpx.Response) -> list[Any]:
    """The data of each event; `[DONE]` as text."""
    told = [line async for line in response.aiter_lines() if line and not line.startswith("id: ")]
    lines = [line.removeprefix("data: ") for line in told]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.slow
async def test_the_death_of_the_only_worker_ends_its_streams_with_an_error(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, instance_wait_s=0.0, connect_wait_s=0.01) as mesh, mesh.http() as http:
        worker = await mesh.add_worker(endless, step_s=0.002)
        whole = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        async with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            await worker.wait_until(lambda: len(worker.received) == 2)
            await mesh.until(lambda: min(emitted(mesh)) > 0)
            await worker.stop()
            received = await events(response)
        assert received[-1]["error"]["code"] == "worker_lost", "and no [DONE]"
        assert received[0]["choices"][0]["delta"]["role"] == "assistant"
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_lost")
        assert running(mesh) == []
        assert mesh.metric("worker_losses_total", reason="worker_lost") == 2
        assert (await http.get("/health")).status_code == 503
        await mesh.until(lambda: len(mesh.scheduler.ended) >= 2)
        assert {(ended.ok, ended.reason) for ended in mesh.scheduler.ended} == {(False, "worker_lost")}


def running(mesh: MeshOfFakes) -> list[RunningRequest]:
    return list(mesh.service.running.values())


def emitted(mesh: MeshOfFakes) -> list[int]:
    return [len(relay.emitted_token_ids) for generation in running(mesh) for relay in generation.relays]


async def test_a_restarted_worker_is_used_again(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh:
        await mesh.worker.stop()
        mesh.directory.leave(mesh.worker.member(str(model_path)))
        assert [link.instance_id for link in mesh.service.pool.links()] == []
        await mesh.add_worker(short, incarnation_id="second")
        assert (await mesh.client().chat.completions.create(**BODY)).choices[0].finish_reason == "stop"


@pytest.mark.slow
async def test_a_worker_that_is_announced_at_another_address_finishes_what_it_has_and_is_found_there(
    model_path: Path,
) -> None:
    async with mesh_of_fakes(model_path) as mesh, mesh.http() as http:
        before = await mesh.add_worker(lambda _: tokens(*([70] for _ in range(40)), [1]), step_s=0.005)
        answer = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        await before.wait_until(lambda: len(before.received) == 1)
        # The same incarnation, as it would answer at its new address.
        after = FakeWorker(short)
        await after.start()
        mesh.workers.append(after)
        mesh.directory.change(after.member(str(model_path)))
        assert [link.member.address for link in mesh.service.pool.links()] == [after.address]
        assert (await answer).json()["usage"]["completion_tokens"] == 41
        assert mesh.metric("worker_losses_total") == 0
        assert mesh.metric("recoveries_total", reason="worker_lost") == 0
        link = mesh.service.pool.links()[0]
        await mesh.until(lambda: not link.has_moved and link.is_connected)
        assert (await mesh.client().chat.completions.create(**BODY)).choices[0].finish_reason == "stop"
        assert len(after.received) == 1


async def test_a_worker_whose_old_address_is_dead_is_found_at_the_new_one(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh:
        await mesh.worker.stop()
        link = mesh.service.pool.links()[0]
        await mesh.until(lambda: not link.is_connected)
        after = FakeWorker(short)
        await after.start()
        mesh.workers.append(after)
        mesh.directory.change(after.member(str(model_path)))
        assert (await mesh.client().chat.completions.create(**BODY)).choices[0].finish_reason == "stop"
        assert mesh.service.pool.links()[0] is link


async def test_a_scheduler_that_is_announced_at_another_address_is_asked_there(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh:
        after = FakeScheduler(always("worker-0"))
        await after.start()
        mesh.directory.change(after.member)
        await mesh.scheduler.stop()
        await mesh.until(lambda: after.probes > 0 and mesh.service.placement.connected)
        await mesh.client().chat.completions.create(**BODY)
        assert len(mesh.service.placement.links()) == 1
        assert len(after.placed) == 1
        await mesh.role.stop()
        await after.stop()


async def test_a_scheduler_knows_at_each_placement_which_workers_the_frontend_is_connected_to(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh:
        other = await mesh.add_worker(short, instance_id="worker-1")
        await mesh.client().chat.completions.create(**BODY)
        assert mesh.scheduler.linked_at_place == [("worker-0", "worker-1")]
        reports = len(mesh.scheduler.linked)
        await mesh.client().chat.completions.create(**BODY)
        assert len(mesh.scheduler.linked) == reports, "told only when it changes"
        await other.stop()
        await mesh.until(lambda: mesh.scheduler.linked[-1] == ("worker-0",))
        await mesh.worker.stop()
        await mesh.until(lambda: mesh.scheduler.linked[-1] == ())


@pytest.mark.slow
async def test_a_worker_that_hangs_is_no_longer_told_of_as_connected_before_its_requests_are_placed_again(
    model_path: Path,
) -> None:
    async with mesh_of_fakes(model_path, stall_s=0.1, freeze_s=0.1) as mesh:
        hanging = await mesh.add_worker(endless, step_s=1000.0)
        await mesh.add_worker(short, instance_id="worker-1")
        choices = iter([hanging.instance_id])
        mesh.scheduler.choose = lambda place: always(next(choices, "worker-1"))(place)
        answer = await mesh.client().chat.completions.create(**BODY)
        assert answer.choices[0].finish_reason == "stop"
        assert mesh.scheduler.linked_at_place == [("worker-0", "worker-1"), ("worker-1",)]


async def test_a_worker_that_the_frontend_cannot_reach_is_not_waited_for_while_another_is_connected(
    model_path: Path,
) -> None:
    async with mesh_of_fakes(model_path, short, connect_wait_s=60.0) as mesh:
        await mesh.add_worker(short, instance_id="worker-1")
        await mesh.worker.stop()
        await mesh.until(lambda: not mesh.service.pool.links()[0].is_connected)
        mesh.scheduler.choose = lambda place: always("worker-1" if place.excluded_instance_ids else "worker-0")(place)
        async with asyncio.timeout(10):
            answer = await mesh.client().chat.completions.create(**BODY)
        assert answer.choices[0].finish_reason == "stop"
        assert [list(place.excluded_instance_ids) for place in mesh.scheduler.placed] == [[], ["worker-0"]]


async def test_a_worker_that_leaves_the_directory_finishes_what_it_has(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh, mesh.http() as http:
        worker = await mesh.add_worker(lambda _: tokens(*([70] for _ in range(40)), [1]), step_s=0.005)
        answer = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        await worker.wait_until(lambda: len(worker.received) == 1)
        mesh.directory.leave(worker.member(str(model_path)))
        assert mesh.service.pool.links() == ()
        assert (await answer).status_code == 200


@pytest.mark.slow
async def test_a_worker_that_had_only_lost_its_lease_is_served_by_the_link_it_has(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh, mesh.http() as http:
        worker = await mesh.add_worker(endless, step_s=0.005)
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        await worker.wait_until(lambda: len(worker.received) == 1)
        link = mesh.service.pool.link("worker-0")
        for _ in range(2):
            mesh.directory.leave(worker.member(str(model_path)))
            mesh.directory.join(worker.member(str(model_path)))
        assert mesh.service.pool.link("worker-0") is link, "a second stream would stay for good, and take no aborts"
        assert link is not None
        assert link.is_connected
        asking.cancel()
        await worker.wait_until(lambda: len(worker.aborted) == 1)


async def test_who_waits_for_a_worker_that_restarts_gets_its_next_life(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short) as mesh:
        first = mesh.worker
        await first.stop()
        await mesh.until(lambda: not mesh.service.pool.connected("demo"))
        waiting = asyncio.create_task(mesh.service.pool.wait_connected("worker-0", 5.0))
        await asyncio.sleep(0)
        mesh.directory.leave(first.member(str(model_path)))
        await mesh.add_worker(short, incarnation_id="second")
        await mesh.until(waiting.done)
        link = waiting.result()
        assert link is not None
        assert link.sender.incarnation_id == "second"


async def test_another_process_at_a_workers_address_gets_no_requests(model_path: Path) -> None:
    async with (
        mesh_of_fakes(model_path, short, connect_wait_s=0.05, instance_wait_s=0.05) as mesh,
        mesh.http() as http,
    ):
        liar = mesh.worker
        mesh.directory.leave(liar.member(str(model_path)))
        announced = liar.member(str(model_path))
        mesh.directory.join(type(announced)("worker", "worker-0", "third", liar.address, "", announced.attributes))
        response = await http.post("/v1/chat/completions", json=BODY)
        assert response.status_code == 503
        assert liar.received == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (request_pb2.ERROR_CODE_REFUSED, 400),
        (request_pb2.ERROR_CODE_UNAVAILABLE, 503),
        (request_pb2.ERROR_CODE_ENGINE, 502),
        (request_pb2.ERROR_CODE_DEADLINE, 504),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_worker_refuses_has_a_status(
    model_path: Path, code: request_pb2.ErrorCode, status: int, stream: bool
) -> None:
    script = [failure(code, "the reason")]
    async with mesh_of_fakes(model_path, lambda _: script, instance_wait_s=0.0) as mesh, mesh.http() as http:
        response = await http.post("/v1/chat/completions", json={**BODY, "stream": stream})
        assert response.status_code == status, "even for a stream, because nothing has been sent yet"
        if status != 504:
            assert "the reason" in response.json()["error"]["message"]


@pytest.mark.parametrize("offset", [0, 3])
async def test_a_gap_or_a_doubled_token_fails_loudly(model_path: Path, offset: int) -> None:
    deltas = [
        Delta(offset=0, token_ids=[70, 71]),
        Delta(offset=offset, token_ids=[72]),
        Delta(offset=3, token_ids=[73]),
    ]
    async with mesh_of_fakes(model_path, lambda _: deltas) as mesh, mesh.http() as http:
        response = await http.post("/v1/chat/completions", json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "token_gap")
        assert mesh.metric("token_gaps_total") == 1
        await mesh.worker.wait_until(lambda: len(mesh.worker.aborted) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_requests_within_a_step(model_path: Path, stream: bool) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        worker = await mesh.add_worker(endless, step_s=0.05)
        async with mesh.http() as http:
            asking = asyncio.create_task(ask_and_read(http, {**BODY, "n": 2, "stream": stream}))
            await mesh.until(lambda: emitted(mesh) >= [2, 2])
            left_at_step = worker.steps
            asking.cancel()
        await worker.wait_until(lambda: len(worker.aborted) == 2)
        assert max(worker.aborted_at_step.values()) <= left_at_step + 1
        await mesh.until(lambda: running(mesh) == [])
        assert mesh.metric("disconnects_total") == 1
        assert mesh.service.gate.queue.running == 0


async def ask_and_read(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_aborted_and_cut(model_path: Path) -> None:
    """Through a socket with small buffers, which never reads."""
    async with mesh_of_fakes(model_path, max_pending_tokens=500) as mesh:
        worker = await mesh.add_worker(endless)
        host, port = mesh.url.removeprefix("http://").split(":")
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(client, (host, int(port)))
            body = json.dumps({**BODY, "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            await loop.sock_sendall(client, head + body)
            await worker.wait_until(lambda: len(worker.aborted) == 1)
            await mesh.until(lambda: running(mesh) == [])
            assert mesh.metric("slow_clients_total") == 1
        finally:
            client.close()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_ends_at_its_deadline(model_path: Path, stream: bool) -> None:
    async with mesh_of_fakes(model_path, request_deadline_s=0.2) as mesh, mesh.http() as http:
        worker = await mesh.add_worker(endless if stream else lambda _: [], step_s=0.01)
        async with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": stream}) as response:
            if stream:
                assert (await events(response))[-1]["error"]["code"] == "deadline_exceeded"
            else:
                assert response.status_code == 504
        await worker.wait_until(lambda: len(worker.aborted) == 1)


@pytest.mark.parametrize(
    "outcome", [scheduler_pb2.PLACE_OUTCOME_UNKNOWN_MODEL, scheduler_pb2.PLACE_OUTCOME_NO_INSTANCE]
)
async def test_a_model_that_was_served_and_has_no_instance_now_may_be_asked_for_again(
    model_path: Path, outcome: Any
) -> None:
    async with mesh_of_fakes(model_path, short, instance_wait_s=0.05) as mesh, mesh.http() as http:
        mesh.scheduler.choose = lambda _: scheduler_pb2.PlaceResponse(outcome=outcome)
        response = await http.post("/v1/chat/completions", json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_instance")
        assert response.headers["retry-after"]


async def test_an_instance_that_is_not_connected_is_excluded_and_asked_for_again(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, short, connect_wait_s=0.01) as mesh:
        mesh.scheduler.choose = lambda place: always("worker-0" if place.excluded_instance_ids else "ghost")(place)
        await mesh.client().chat.completions.create(**BODY)
        assert [list(place.excluded_instance_ids) for place in mesh.scheduler.placed] == [[], ["ghost"]]


@pytest.mark.slow
async def test_a_full_frontend_answers_429_with_retry_after(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, max_running_requests=1, max_queued_requests=1) as mesh, mesh.http() as http:
        worker = await mesh.add_worker(endless, step_s=0.01)
        running_one = asyncio.create_task(ask_and_read(http, BODY))
        await worker.wait_until(lambda: len(worker.received) == 1)
        waiting = asyncio.create_task(ask_and_read(http, {**BODY, "max_tokens": 7}))
        await mesh.until(lambda: mesh.service.gate.queue.queued == 1)
        refused = await http.post("/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        running_one.cancel()
        await worker.wait_until(lambda: len(worker.received) == 2)
        assert worker.received[1].sampling.max_tokens == 7
        waiting.cancel()
        await mesh.until(lambda: mesh.service.gate.queue.running == 0)


@pytest.mark.slow
async def test_draining_closes_the_port_and_answers_what_still_comes_over_kept_connections(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LINGER_S", 60.0)
    async with mesh_of_fakes(model_path) as mesh, mesh.http() as kept, mesh.http() as another:
        worker = await mesh.add_worker(lambda _: tokens(*([70] for _ in range(20)), [1]), step_s=0.005)
        assert (await kept.get("/health")).status_code == 200
        running = asyncio.create_task(ask_raw(mesh, {**BODY, "stream": True}))
        await worker.wait_until(lambda: len(worker.received) == 1)
        draining = asyncio.create_task(mesh.role.drain())
        await asyncio.sleep(0)
        with pytest.raises(httpx.ConnectError):
            await another.get("/health")
        late = await kept.post("/v1/chat/completions", json=BODY)
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        with pytest.raises(httpx.ConnectError):
            await kept.get("/health")
        assert b"data: [DONE]" in await running
        draining.cancel()


async def test_draining_ends_with_the_last_answer_and_closes_idle_connections(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LINGER_S", 0.01)
    async with mesh_of_fakes(model_path) as mesh, mesh.http() as idle:
        worker = await mesh.add_worker(lambda _: tokens(*([70] for _ in range(20)), [1]), step_s=0.01)
        assert (await idle.get("/health")).status_code == 200
        running = asyncio.create_task(ask_raw(mesh, {**BODY, "stream": True}))
        await worker.wait_until(lambda: len(worker.received) == 1)
        async with asyncio.timeout(5):
            await mesh.role.drain()
            assert b"data: [DONE]" in await running
        with pytest.raises(httpx.ConnectError):
            await idle.get("/health")


async def ask_raw(mesh: MeshOfFakes, body: dict[str, Any]) -> bytes:
    """All bytes until the server closes the connection, which the client would keep."""
    host, port = mesh.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    writer.write(head + content)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.slow
async def test_stopping_tells_the_clients(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh, mesh.http() as http:
        await mesh.add_worker(endless, step_s=0.01)
        async with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            stopping = asyncio.create_task(mesh.role.stop())
            assert (await events(response))[-1]["error"]["code"] == "stopped"
        await stopping


async def test_the_official_client_sees_the_error_of_a_broken_stream(model_path: Path) -> None:
    broken = [Delta(offset=0, token_ids=[70]), failure(request_pb2.ERROR_CODE_ENGINE, "it burnt down")]
    async with mesh_of_fakes(model_path, lambda _: broken) as mesh:
        stream = await mesh.client().chat.completions.create(**BODY, stream=True)
        with pytest.raises(openai.APIError, match="it burnt down"):
            async for _ in stream:
                pass
