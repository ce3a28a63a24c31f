"""Embeddings, poolings, scores and rerankings, against workers that pool as the simulated engine does."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_worker import wire
from engine_worker.engines.simulated_vectors import pooled
from penstock.v1 import worker_pb2
from services.frontend.placement.pooler import MAX_BATCH_TOKENS, batches
from tests.examples import examples
from tests.unit.services.frontend.fakes import FakeWorker, tokens
from tests.unit.services.frontend.http.test_many_requests import json_values, values_of
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

DIMENSIONS = 24
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]


async def pools(request: worker_pb2.PoolRequest) -> worker_pb2.PoolResponse:
    parameters = wire.pooling_parameters(request)
    return wire.pool_response([pooled(prompt.token_ids, parameters, DIMENSIONS) for prompt in request.prompts])


async def add_pooling_worker(mesh: MeshOfFakes, pool: Any = pools, **fields: Any) -> FakeWorker:
    fields = {"tasks": "embed,token_embed", "model": "vectors", "instance_id": "vectors-0", **fields}
    worker = await mesh.add_worker(lambda _: tokens([70], [1]), pool=pool, **fields)
    await mesh.until(lambda: mesh.service.catalogue.get(fields["model"]) is not None)
    return worker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model_path: Path) -> AsyncIterator[MeshOfFakes]:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1]), placement_deadline_s=0.05) as mesh:
        await mesh.scheduler.stop()  # places by round robin over the instances of the model
        await add_pooling_worker(mesh)
        await add_pooling_worker(mesh, tasks="classify", model="scores", instance_id="scores-0")
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: MeshOfFakes) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client


async def test_the_official_client_gets_vectors_of_texts_and_tokens(mesh: MeshOfFakes) -> None:
    client = mesh.client()  # asks for base64 by itself
    answer = await client.embeddings.create(model="vectors", input=["the quick fox", "hidden state"])
    ids = mesh.text.with_added_tokens(mesh.ids("the quick fox"))
    assert [len(each.embedding) for each in answer.data] == [DIMENSIONS, DIMENSIONS]
    assert answer.usage.prompt_tokens == len(ids) + len(mesh.text.with_added_tokens(mesh.ids("hidden state")))
    again = await client.embeddings.create(model="vectors", input=ids, encoding_format="float")
    assert np.allclose(again.data[0].embedding, answer.data[0].embedding)
    assert np.isclose(np.linalg.norm(again.data[0].embedding), 1.0)
    cut = await client.embeddings.create(model="vectors", input=[ids], dimensions=5)
    assert len(cut.data[0].embedding) == 5


async def test_more_inputs_than_a_call_takes_come_back_in_order(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    inputs = [[1 + index % 500, 7] for index in range(100)]
    answer = (await http.post("/v1/embeddings", json={"model": "vectors", "input": inputs})).json()
    assert [each["index"] for each in answer["data"]] == list(range(100))
    parameters = wire.pooling_parameters(worker_pb2.PoolRequest(task="embed"))
    for each, prompt in zip(answer["data"], inputs, strict=True):
        assert np.allclose(each["embedding"], pooled(prompt, parameters, DIMENSIONS), atol=1e-6)


@given(st.lists(st.integers(1, MAX_BATCH_TOKENS), max_size=100), st.booleans())
async def test_batches_hold_every_prompt_once_and_are_bounded(lengths: list[int], by_token: bool) -> None:
    prompts = [[0] * length for length in lengths]
    found = batches(prompts, by_token=by_token)
    assert [index for batch in found for index in batch] == list(range(len(prompts)))
    for batch in found:
        assert 1 <= len(batch) <= (1 if by_token else 32)
        assert sum(lengths[index] for index in batch) <= MAX_BATCH_TOKENS or len(batch) == 1


async def test_poolings_may_be_of_each_token(http: httpx.AsyncClient) -> None:
    body = {"model": "vectors", "input": [[5, 6, 7], [8]], "task": "token_embed"}
    answer = (await http.post("/pooling", json=body)).json()
    assert [np.array(each["data"]).shape for each in answer["data"]] == [(3, DIMENSIONS), (1, DIMENSIONS)]
    packed = (await http.post("/pooling", json=body | {"encoding_format": "base64"})).json()
    values = np.frombuffer(base64.b64decode(packed["data"][0]["data"]), dtype="<f4")
    assert np.allclose(values.reshape(3, DIMENSIONS), answer["data"][0]["data"], atol=1e-6)
    whole = (await http.post("/pooling", json={"model": "scores", "input": "a"})).json()
    assert len(whole["data"][0]["data"]) == 1


async def test_what_is_like_the_query_comes_first(http: httpx.AsyncClient) -> None:
    documents = ["prefix scheduler", "the quick brown fox jumps", {"text": "the quick fox"}]
    body = {"model": "vectors", "query": "the quick fox", "documents": documents}
    ranked = (await http.post("/v2/rerank", json=body)).json()["results"]
    assert [each["index"] for each in ranked] == [2, 1, 0]
    assert np.isclose(ranked[0]["relevance_score"], 1.0)
    assert ranked[0]["document"] == {"text": "the quick fox", "multi_modal": None}
    best = (await http.post("/rerank", json=body | {"top_n": 1, "return_documents": False})).json()["results"]
    assert [set(each) for each in best] == [{"index", "relevance_score"}]


async def test_scores_are_of_pairs(http: httpx.AsyncClient) -> None:
    body = {"model": "vectors", "text_1": "the fox", "text_2": ["the fox", "a dog"]}
    scores = [each["score"] for each in (await http.post("/v1/score", json=body)).json()["data"]]
    assert np.isclose(scores[0], 1.0)
    assert scores[1] < 0.99
    crossed = (await http.post("/score", json=body | {"model": "scores"})).json()["data"]
    assert all(0 <= each["score"] <= 1 for each in crossed)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/embeddings", {}, 400, "input"),
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"input": [1, "a"]}, 400, "input"),
        ("/v1/embeddings", {"input": [[1], []]}, 400, "input"),
        ("/v1/embeddings", {"input": [[600_000]]}, 400, "input"),
        ("/v1/embeddings", {"input": [[1]] * 2049}, 400, "input"),
        ("/v1/embeddings", {"input": [[1] * 5000]}, 400, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "a", "model": "demo"}, 400, "model"),
        ("/v1/embeddings", {"input": "a", "model": "scores"}, 400, "task"),
        ("/v1/embeddings", {"input": "a", "model": "nobody"}, 404, "model"),
        ("/pooling", {"input": "a", "task": "dance"}, 400, "task"),
        ("/score", {"text_1": "a"}, 400, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/v1/completions", {"prompt": "a"}, 400, "model"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = await http.post(path, json={"model": "vectors", **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert response.headers["x-request-id"]


async def test_what_is_too_long_can_be_cut(http: httpx.AsyncClient) -> None:
    for truncate, used in ((-1, 4096), (3, 3)):
        body = {"model": "vectors", "input": [[1] * 5000], "truncate_prompt_tokens": truncate}
        assert (await http.post("/v1/embeddings", json=body)).json()["usage"]["prompt_tokens"] == used


async def test_a_worker_that_fails_is_left_for_another_one(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, placement_deadline_s=0.05) as mesh, mesh.http() as http:
        await mesh.scheduler.stop()
        asked: list[str] = []

        async def fails(request: worker_pb2.PoolRequest) -> grpc.StatusCode:
            asked.append(request.request_id)
            return grpc.StatusCode.UNAVAILABLE

        await add_pooling_worker(mesh, fails)
        await add_pooling_worker(mesh, instance_id="vectors-1")
        body = {"model": "vectors", "input": [[1], [2]]}
        for _ in range(4):
            assert (await http.post("/v1/embeddings", json=body)).status_code == 200
        assert asked
        assert mesh.metric("recoveries_total", reason="pooling") == len(asked)


async def test_what_no_instance_would_take_is_refused_at_once(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, placement_deadline_s=0.05, instance_wait_s=0.2) as mesh, mesh.http() as http:
        await mesh.scheduler.stop()

        async def refuses(_: worker_pb2.PoolRequest) -> grpc.StatusCode:
            return grpc.StatusCode.INVALID_ARGUMENT

        worker = await add_pooling_worker(mesh, refuses)
        response = await http.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
        assert (response.status_code, response.json()["error"]["message"]) == (400, "as the test says.")
        mesh.directory.leave(worker.member(str(model_path)))
        response = await http.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
        assert response.status_code == 503, response.text


async def test_a_client_that_leaves_takes_its_prompts_back(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, placement_deadline_s=0.05) as mesh:
        await mesh.scheduler.stop()
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def hangs(_: worker_pb2.PoolRequest) -> worker_pb2.PoolResponse:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError("nobody sets the event")

        await add_pooling_worker(mesh, hangs)
        async with mesh.http() as http:
            asking = asyncio.create_task(http.post("/v1/embeddings", json={"model": "vectors", "input": "a"}))
            async with asyncio.timeout(10):
                await began.wait()
                asking.cancel()
                await cancelled.wait()
        await mesh.until(lambda: mesh.metric("disconnects_total") == 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("/v1/embeddings", "EmbeddingRequest"),
        ("/v2/embed", "CohereEmbedRequest"),
        ("/classify", "ClassifyRequest"),
        ("/pooling", "PoolingRequestBody"),
        ("/v1/chat/completions/batch", "BatchChatRequest"),
        ("/score", "ScoreRequest"),
        ("/rerank", "RerankRequest"),
        ("/tokenize", "TokenizeTextRequest"),
        ("/detokenize", "DetokenizeRequest"),
        ("/v1/responses", "ResponsesRequest"),
        ("/v1/messages", "MessagesRequest"),
        ("/v1/messages/count_tokens", "CountTokensRequest"),
    ],
)
@given(data=st.data())
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_no_request_is_answered_500_or_never(
    http: httpx.AsyncClient, path: str, schema: str, data: st.DataObject
) -> None:
    if not _document:
        _document.update((await http.get("/openapi.json")).json())
    fields = _document["components"]["schemas"][schema]["properties"]
    body = data.draw(values_of({"$ref": schema}, _document))
    body["model"] = data.draw(st.sampled_from(["demo", "vectors", "scores"]))
    if data.draw(st.booleans()):
        body[data.draw(st.sampled_from(sorted(fields)))] = data.draw(json_values)
    response = await http.post(path, json=body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


_document: dict[str, Any] = {}


async def test_inputs_are_classified(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    answer = (await http.post("/classify", json={"model": "scores", "input": ["the quick fox", [5, 6]]})).json()
    parameters = wire.pooling_parameters(worker_pb2.PoolRequest(task="classify"))
    ids = mesh.text.with_added_tokens(mesh.ids("the quick fox"))
    assert answer["id"].startswith("classify-")
    for index, prompt in enumerate((ids, [5, 6])):
        expected = pooled(prompt, parameters, DIMENSIONS)
        found = answer["data"][index]
        assert (found["index"], found["num_classes"]) == (index, expected.size)
        assert np.allclose(found["probs"], expected, atol=1e-6)
        assert found["label"] == f"LABEL_{expected.argmax()}"
    assert answer["usage"]["prompt_tokens"] == len(ids) + 2
    for body, status, param in (
        ({"model": "vectors", "input": "a"}, 400, "model"),
        ({"model": "scores"}, 400, "input"),
        ({"model": "scores", "input": "a", "normalize": True}, 400, "normalize"),
    ):
        refused = await http.post("/classify", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), body
