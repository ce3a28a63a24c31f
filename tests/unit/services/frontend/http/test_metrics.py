"""What dashboards, autoscalers and balancers read at the endpoint."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from mesh.membership import ChangeKind
from penstock.v1 import request_pb2
from tests.unit.services.frontend.fake_member import FakeMember
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LOAD_HEADER, FORMAT_HEADER = "endpoint-load-metrics", "endpoint-load-metrics-format"
BODY = {"model": "demo", "prompt": "hi"}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model_path: Path) -> AsyncIterator[MeshOfFakes]:
    def script(request: request_pb2.GenerateRequest) -> list[request_pb2.TokenDelta]:
        steps = [[70]] * min(request.sampling.max_tokens, 2000)
        return tokens(*steps, finish=request_pb2.FINISH_REASON_LENGTH, cached=1)

    async with mesh_of_fakes(model_path, script) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: MeshOfFakes) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client


def value(mesh: MeshOfFakes, name: str, **labels: str) -> float:
    """A sample under vLLM's name; 0 if there is none yet."""
    return mesh.registry.get_sample_value(name, {"engine": "0", "model_name": "demo"} | labels) or 0.0


async def test_vllms_metric_names_stand_beside_our_own(http: httpx.AsyncClient) -> None:
    await http.post(COMPLETIONS, json={**BODY, "max_tokens": 3})
    lines = (await http.get("/metrics")).text.splitlines()

    def read(name: str) -> float:
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    buckets = 'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",member_id="frontend-0",model_name="demo"}'
    assert buckets in "\n".join(lines)
    for own, theirs in (
        ("penstock_frontend_prompt_tokens_total", "vllm:prompt_tokens_total"),
        ("penstock_frontend_generated_tokens_total", "vllm:generation_tokens_total"),
        ("penstock_frontend_e2e_seconds_count", "vllm:e2e_request_latency_seconds_count"),
        ("penstock_frontend_e2e_seconds_sum", "vllm:e2e_request_latency_seconds_sum"),
    ):
        assert read(own) == read(theirs) > 0


async def test_what_a_request_asked_for_and_got_is_measured(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    names = {
        "vllm:request_params_n_sum": 2.0,
        "vllm:request_params_max_tokens_sum": 5.0,
        "vllm:request_max_num_generation_tokens_sum": 5.0,
        "vllm:request_time_per_output_token_seconds_count": 2.0,
        "vllm:request_prefill_kv_computed_tokens_count": 1.0,
    }
    computed = "vllm:request_prefill_kv_computed_tokens_sum"
    before = {name: value(mesh, name) for name in (*names, computed)}
    used = (await http.post(COMPLETIONS, json={**BODY, "max_tokens": 5, "n": 2, "temperature": 1.0})).json()["usage"]
    names[computed] = used["prompt_tokens"] - used["prompt_tokens_details"]["cached_tokens"]
    assert {name: value(mesh, name) - before[name] for name in names} == names


async def test_a_choice_that_its_client_left_is_aborted(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    def ended(reason: str) -> float:
        return value(mesh, "vllm:request_success_total", finished_reason=reason)

    before, mesh.worker.step_s = ended("abort"), 0.01
    try:
        async with http.stream("POST", COMPLETIONS, json={**BODY, "stream": True, "max_tokens": 2000}) as answer:
            await anext(answer.aiter_lines())
        await mesh.until(lambda: ended("abort") > before)
    finally:
        mesh.worker.step_s = 0.0
    assert ended("length") > 0
    assert (ended("abort"), ended("error")) == (before + 1, 0.0)


async def test_whole_answers_have_the_load_in_a_header_for_who_asks(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    asked, chat = {FORMAT_HEADER: "TEXT"}, {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    without = await http.post(COMPLETIONS, json={**BODY, "max_tokens": 3}, headers=asked)
    assert LOAD_HEADER not in without.headers, "no instance has said its load"
    member = FakeMember("worker-9", 0.5, 2.0, model="demo")
    async with member.served():
        mesh.service.mesh_metrics.on_change(member.change(ChangeKind.JOINED))
        said = "TEXT named_metrics.num_requests_waiting=2.0, named_metrics.kv_cache_usage_perc=0.5"
        async with asyncio.timeout(20):  # what was read before is everybody's for a second
            while (answer := await http.post(COMPLETIONS, json={**BODY, "max_tokens": 3}, headers=asked)).headers.get(
                LOAD_HEADER
            ) != said:
                assert answer.status_code == 200
                await asyncio.sleep(0.01)
        answers = [
            await http.post(CHAT, json={**chat, "max_tokens": 3}, headers=asked),
            await http.post(CHAT, json={**chat, "max_tokens": 3}, headers={FORMAT_HEADER: "bin"}),
            await http.post(CHAT, json={**chat, "max_tokens": 3}),
            await http.post(CHAT, json={**chat, "max_tokens": 3, "stream": True}, headers=asked),
        ]
        assert [answer.headers.get(LOAD_HEADER) for answer in answers] == [said, None, None, None]
    mesh.service.mesh_metrics.on_change(member.change(ChangeKind.LEFT))
