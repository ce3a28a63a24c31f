import asyncio
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.v1 import frontend_pb2, frontend_pb2_grpc, request_pb2
from services.frontend.requests.ended import KEPT, MAX_LISTED, Asked, EndedLog, Progress
from tests.unit.services.frontend.fakes import Delta, always, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = pytest.mark.live


def _log(count: int) -> EndedLog:
    log = EndedLog()
    for number in range(1, count + 1):
        log.add(Asked(f"r{number}", "m", "/v1/completions", "", 10.0), Progress(), 200, 12.5, 1000.0)
    return log


@given(st.integers(0, 40), st.integers(0, 50), st.integers(0, 50))
def test_what_ended_since_is_told_oldest_first_and_bounded(count: int, after: int, limit: int) -> None:
    found = [each.number for each in _log(count).since(after, limit)]
    newest = list(range(1, count + 1))[-limit if limit else 0 :]
    assert found == [number for number in newest if number > after]


def test_the_log_is_bounded() -> None:
    log = _log(KEPT + 10)
    assert log.last == KEPT + 10
    assert len(log.since(0)) == len(log.since(0, 10**9)) == MAX_LISTED
    assert log.since(0, request_id="r10") == [], "forgotten"
    assert [each.number for each in log.since(0, request_id="r11")] == [11]


def test_times_are_counted_from_the_arrival_and_left_out_where_it_did_not_come_so_far() -> None:
    (ended,) = _log(1).since(0)
    assert (ended.arrived_unix_ms, ended.ended_ms) == (997_500, 2500.0)
    assert not ended.HasField("admitted_ms")
    assert not ended.HasField("first_token_ms")


async def _listed(mesh: MeshOfFakes) -> frontend_pb2.ListEndedResponse:
    async with grpc.aio.insecure_channel(mesh.rpc_address) as channel:
        stub = frontend_pb2_grpc.FrontendStub(channel)  # type: ignore[no-untyped-call]
        answer: frontend_pb2.ListEndedResponse = await stub.ListEnded(frontend_pb2.ListEndedRequest())
        return answer


async def test_a_request_leaves_its_times_tokens_and_places(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70, 71], [1], cached=1)) as mesh:
        answer = await mesh.client().completions.create(model="demo", prompt="x", n=2)
        await mesh.until(lambda: mesh.service.ended.last == 1)
        listed = await _listed(mesh)
        (ended,) = listed.requests
        assert (ended.request_id, ended.model, ended.endpoint) == (answer.id, "demo", "/v1/completions")
        assert (ended.status, ended.owner, ended.choices) == (200, "", 2)
        assert (ended.instance_id, ended.last_instance_id) == ("worker-0", "worker-0")
        assert answer.usage is not None
        counted = (ended.prompt_tokens, ended.generated_tokens, ended.cached_tokens)
        assert counted == (answer.usage.prompt_tokens, answer.usage.completion_tokens, 1)
        assert 0 <= ended.admitted_ms <= ended.placed_ms <= ended.first_token_ms <= ended.ended_ms
        assert (ended.moves, ended.recoveries) == (0, 0)


def _endless(_: request_pb2.GenerateRequest) -> list[Delta]:
    return [Delta(offset=index, token_ids=[70]) for index in range(10_000)]


def _ends(request: request_pb2.GenerateRequest) -> list[Delta]:
    end = Delta(offset=len(request.emitted_token_ids), token_ids=[1], finish_reason=request_pb2.FINISH_REASON_STOP)
    return [end]


async def test_a_request_that_was_placed_again_says_so(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        first = await mesh.add_worker(_endless, step_s=0.005)
        asking = asyncio.create_task(mesh.client().completions.create(model="demo", prompt="x", max_tokens=4000))
        await mesh.until(lambda: first.steps > 1)
        await mesh.add_worker(_ends, instance_id="worker-1")
        mesh.scheduler.choose = always("worker-1")
        await first.stop()
        await asking
        await mesh.until(lambda: mesh.service.ended.last == 1)
        (ended,) = (await _listed(mesh)).requests
        assert ended.recoveries == 1
        assert (ended.instance_id, ended.last_instance_id) == ("worker-0", "worker-1")


async def test_what_is_refused_is_remembered_with_its_status(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1])) as mesh, mesh.http() as http:
        response = await http.post("/v1/completions", json={"model": "demo", "prompt": "x" * 9000, "max_tokens": 4000})
        assert response.status_code == 400
        await mesh.until(lambda: mesh.service.ended.last == 1)
        (ended,) = (await _listed(mesh)).requests
        assert (ended.status, ended.instance_id, ended.HasField("placed_ms")) == (400, "", False)
