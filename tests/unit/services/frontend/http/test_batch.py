"""Several conversations at once, and any body at one path."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from penstock.v1 import request_pb2
from tests.unit.services.frontend.fakes import Delta, tokens
from tests.unit.services.frontend.http.test_pooling import add_pooling_worker
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]

BATCH = "/v1/chat/completions/batch"
ONE = [{"role": "user", "content": "hi"}]
OTHER = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]


def counts(request: request_pb2.GenerateRequest) -> list[Delta]:
    """As many tokens as the prompt has, so that answers differ."""
    return tokens(*([70] for _ in request.prompt_token_ids), [1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model_path: Path) -> AsyncIterator[MeshOfFakes]:
    async with mesh_of_fakes(model_path, counts, placement_deadline_s=0.05, max_choices=3) as mesh:
        await mesh.scheduler.stop()
        await add_pooling_worker(mesh, tasks="embed,token_embed")
        await add_pooling_worker(mesh, tasks="classify", model="scores", instance_id="scores-0")
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: MeshOfFakes) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client


async def test_each_conversation_of_a_batch_gets_a_choice(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    alone = [
        (await http.post("/v1/chat/completions", json={"model": "demo", "messages": each})).json()
        for each in (ONE, OTHER)
    ]
    body = {"model": "demo", "messages": [ONE, OTHER], "mood": "good", "stream": True, "tools": [], "seed": 1}
    body["return_token_ids"] = True
    response = await http.post(BATCH, json=body)
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["message"] for choice in answer["choices"]] == [each["choices"][0]["message"] for each in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(each["usage"][name] for each in alone)
    assert response.headers["x-penstock-without-effect"] == "stream, tools, mood"
    assert answer["prompt_token_ids"] is None, "there are two prompts"
    assert [request.sampling.seed for request in mesh.worker.received[-2:]] == [1, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": ONE}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [ONE, []]}, "messages[1]"),
        ({"messages": [ONE] * 4}, "messages"),
        ({"messages": [ONE, [{"content": "x"}]]}, "messages[1][0].role"),
        ({"messages": [[{"content": "x"}]]}, "messages[0][0].role"),
        ({"messages": [ONE, [{"role": "function", "content": "x"}]]}, "messages[1][0].role"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_what_is_wrong_with_a_batch_is_named(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await http.post(BATCH, json={"model": "demo", "messages": [ONE, OTHER], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    ("body", "object"),
    [
        ({"model": "demo", "messages": ONE}, "chat.completion"),
        ({"model": "demo", "prompt": "hi"}, "text_completion"),
        ({"model": "vectors", "input": "hi"}, "list"),
        ({"model": "vectors", "messages": ONE}, "list"),
        ({"model": "vectors", "query": "hi", "documents": ["hi", "you"]}, None),
        ({"model": "vectors", "text_1": "hi", "text_2": "you"}, "list"),
        ({"model": "scores", "input": "hi"}, "list"),
    ],
)
async def test_one_path_takes_every_body(http: httpx.AsyncClient, body: dict[str, Any], object: str | None) -> None:
    response = await http.post("/invocations", json=body)
    assert response.status_code == 200, response.text
    assert response.json().get("object") == object


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "demo", "input": "hi"}, 400, None),
        ({"model": "vectors", "text_1": "hi"}, 400, "text_2"),
        ({"model": "nobody", "prompt": "hi"}, 404, "model"),
        ({"model": 7}, 400, "model"),
    ],
)
async def test_a_body_for_nobody_is_refused(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = await http.post("/invocations", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
