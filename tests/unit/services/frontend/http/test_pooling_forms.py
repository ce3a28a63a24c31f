"""The forms in which clients give inputs to pooling models and get vectors back."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from controlplane.model.pooling import JOINED, SEPARATED
from engine_worker import wire
from engine_worker.engines.simulated_vectors import pooled
from penstock.v1 import worker_pb2
from services.frontend.requests.api_keys import new_key_line
from tests.unit.services.frontend.http.test_pooling import DIMENSIONS, add_pooling_worker, http, mesh, pools
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

__all__ = ["http", "mesh"]
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]

TURNS = [{"role": "user", "content": "the quick fox"}]
CONTINUED = {"continue_final_message": True}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:,"}}
OTHER_TURNS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hidden state"}]


def vector(token_ids: list[int]) -> Any:
    """What the simulated model makes of a prompt."""
    return pooled(token_ids, wire.pooling_parameters(worker_pb2.PoolRequest(task="embed")), DIMENSIONS)


async def embedded(http: httpx.AsyncClient, **fields: Any) -> list[Any]:
    response = await http.post("/v1/embeddings", json={"model": "vectors", **fields})
    assert response.status_code == 200, response.text
    return [each["embedding"] for each in response.json()["data"]]


def rendered(mesh: MeshOfFakes, turns: list[dict[str, Any]], *, generates: bool = False) -> list[int]:
    assert mesh.text.template is not None
    return mesh.ids(mesh.text.template.render(turns, add_generation_prompt=generates))


async def test_conversations_are_inputs(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    one, other = (vector(rendered(mesh, turns)) for turns in (TURNS, OTHER_TURNS))
    for fields in ({"messages": TURNS}, {"input": TURNS}, {"messages": [TURNS]}):
        assert np.allclose(await embedded(http, **fields), [one], atol=1e-6), fields
    for fields in ({"messages": [TURNS, OTHER_TURNS]}, {"input": [TURNS, OTHER_TURNS]}):
        assert np.allclose(await embedded(http, **fields), [one, other], atol=1e-6), fields
    marked = vector(mesh.text.with_added_tokens(rendered(mesh, TURNS)))
    assert np.allclose(await embedded(http, messages=TURNS, add_special_tokens=True), [marked], atol=1e-6)
    cut = vector(rendered(mesh, TURNS)[:3])
    assert np.allclose(await embedded(http, messages=TURNS, truncate_prompt_tokens=3), [cut], atol=1e-6)
    for path, model in (("/pooling", "vectors"), ("/classify", "scores")):
        assert (await http.post(path, json={"model": model, "messages": TURNS})).status_code == 200


async def test_inputs_are_cut_on_either_side_and_filled(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    bare = mesh.ids("the quick brown fox")
    whole = mesh.text.with_added_tokens(bare)
    for fields, prompt in (
        ({}, mesh.text.with_added_tokens(bare[:1])),  # the model's own tokens stay
        ({"truncation_side": "right"}, whole[:2]),
        ({"truncation_side": "left"}, whole[-2:]),
    ):
        found = await embedded(http, input="the quick brown fox", truncate_prompt_tokens=2, **fields)
        assert np.allclose(found, [vector(prompt)], atol=1e-6), fields
    found = await embedded(http, input=[5, 6, 7], truncate_prompt_tokens=2, truncation_side="left")
    assert np.allclose(found, [vector([6, 7])], atol=1e-6)
    text = mesh.service.catalogue.get("vectors")
    assert text is not None
    text.text.pad_token_id = 2
    body = {"model": "vectors", "input": [5, 6], "padding": "max_length"}
    answer = (await http.post("/v1/embeddings", json=body)).json()
    assert answer["usage"]["prompt_tokens"] == text.max_model_len_tokens
    assert np.allclose(answer["data"][0]["embedding"], vector([5, 6] + [2] * (4096 - 2)), atol=1e-5)
    text.text.pad_token_id = None
    assert (await http.post("/v1/embeddings", json=body)).json()["error"]["param"] == "padding"


async def test_vectors_come_as_bytes(http: httpx.AsyncClient) -> None:
    body = {"model": "vectors", "input": [[5], [6, 7]], "encoding_format": "bytes", "embed_dtype": "float16"}
    response = await http.post("/v1/embeddings", json=body)
    assert response.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(response.headers["metadata"])
    assert (metadata["model"], metadata["usage"]) == ("vectors", {"prompt_tokens": 3, "total_tokens": 3})
    for place, prompt in zip(metadata["data"], ([5], [6, 7]), strict=True):
        values = np.frombuffer(response.content[place["start"] : place["end"]], "<f2").reshape(place["shape"])
        assert np.allclose(values, vector(prompt), atol=1e-3)
    flat = await http.post("/pooling", json=body | {"encoding_format": "bytes_only", "task": "token_embed"})
    assert "metadata" not in flat.headers
    assert len(flat.content) == 3 * DIMENSIONS * 2


async def test_a_model_of_any_name_may_stand_in_the_header(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, placement_deadline_s=0.05) as mesh, mesh.http() as http:
        await mesh.scheduler.stop()
        await add_pooling_worker(mesh, model="向量")
        body = {"model": "向量", "input": "a", "encoding_format": "bytes"}
        response = await http.post("/v1/embeddings", json=body)
    assert json.loads(response.headers["metadata"])["model"] == "向量"


async def test_cohere_s_clients_are_answered(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    texts = ["the quick fox", "hidden state"]
    body = {"model": "vectors", "texts": texts, "embedding_types": ["float", "base64", "binary", "ubinary"]}
    answer = (await http.post("/v2/embed", json=body)).json()
    prompts = [mesh.text.with_added_tokens(mesh.ids(text)) for text in texts]
    expected = [vector(prompt) for prompt in prompts]
    by_type = answer["embeddings"]
    assert np.allclose(by_type["float"], expected, atol=1e-6)
    assert np.allclose([np.frombuffer(base64.b64decode(each), "<f4") for each in by_type["base64"]], expected)
    assert by_type["ubinary"] == [np.packbits(each >= 0).tolist() for each in expected]
    assert by_type["binary"] == [[bits - 128 for bits in each] for each in by_type["ubinary"]]
    tokens = sum(map(len, prompts))
    assert answer["texts"] == texts
    assert answer["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": tokens, "image_tokens": 0},
    }
    assert answer["response_type"] == "embeddings_by_type"
    cut = {"model": "vectors", "texts": texts[:1], "max_tokens": 2}
    for truncate, prompt in (("END", mesh.text.with_added_tokens(mesh.ids(texts[0]))[:2]), ("START", prompts[0][-2:])):
        answer = (await http.post("/v2/embed", json=cut | {"truncate": truncate})).json()
        assert np.allclose(answer["embeddings"]["float"], [vector(prompt)], atol=1e-6)


async def test_cohere_s_uses_are_instructions_of_the_model(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    model = mesh.service.catalogue.get("vectors")
    assert model is not None
    model.text.instructions = {"search_query": "find"}
    body = {"model": "vectors", "texts": ["the fox"], "input_type": "search_query"}
    answer = (await http.post("/v2/embed", json=body)).json()
    turns = [{"role": "system", "content": "find"}, {"role": "user", "content": "the fox"}]
    assert np.allclose(answer["embeddings"]["float"], [vector(rendered(mesh, turns))], atol=1e-6)
    in_parts = {"model": "vectors", "inputs": [{"content": [{"type": "text", "text": "the fox"}]}]}
    answer = (await http.post("/v2/embed", json=in_parts)).json()
    assert np.allclose(answer["embeddings"]["float"], [vector(rendered(mesh, turns[1:]))], atol=1e-6)
    assert "texts" not in answer
    model.text.instructions = {}
    assert (await http.post("/v2/embed", json=body)).json()["error"]["param"] == "input_type"


async def test_scores_count_each_text_as_often_as_it_is_given(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    fox, dog = (len(mesh.text.with_added_tokens(mesh.ids(text))) for text in ("the fox", "a dog"))
    body = {"model": "vectors", "queries": "the fox", "documents": ["the fox", "a dog", "a dog"]}
    answer = (await http.post("/score", json=body)).json()
    assert len(answer["data"]) == 3
    assert answer["usage"]["prompt_tokens"] == 2 * fox + 2 * dog
    parts = {"content": [{"type": "text", "text": "a dog"}]}
    body = {"model": "vectors", "query": "the fox", "documents": [parts, {"text": "a dog"}, "a dog"]}
    results = (await http.post("/rerank", json=body)).json()["results"]
    assert len({each["relevance_score"] for each in results}) == 1
    assert [each["document"] for each in results] == [
        {"text": None, "multi_modal": parts["content"]},
        {"text": "a dog", "multi_modal": None},
        {"text": "a dog", "multi_modal": None},
    ]
    body = {"model": "vectors", "text_1": "the fox", "text_2": "the fox jumps", "max_tokens_per_doc": 2}
    assert np.isclose((await http.post("/score", json=body)).json()["data"][0]["score"], 1.0)


async def test_pairs_are_written_as_the_model_reads_them(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, placement_deadline_s=0.05) as mesh, mesh.http() as http:
        await mesh.scheduler.stop()
        asked: list[list[int]] = []

        async def remembers(request: worker_pb2.PoolRequest) -> worker_pb2.PoolResponse:
            asked.extend(list(prompt.token_ids) for prompt in request.prompts)
            return await pools(request)

        attributes = {"pair_form": JOINED}
        await add_pooling_worker(mesh, remembers, tasks="classify", attributes=attributes)
        body = {"model": "vectors", "text_1": "the quick", "text_2": " fox"}
        answer = (await http.post("/score", json=body)).json()
        assert asked == [mesh.text.with_added_tokens(mesh.ids("the quick fox"))]
        assert answer["usage"]["prompt_tokens"] == len(asked[0])


async def test_segments_of_a_pair_go_to_workers_that_take_them(model_path: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_path, tmp_path / "bert")
    (folder / "config.json").write_text('{"type_vocab_size": 2}')
    asked: list[worker_pb2.PoolRequest] = []

    async def remembers(request: worker_pb2.PoolRequest) -> worker_pb2.PoolResponse:
        asked.append(request)
        return await pools(request)

    body = {"model": "vectors", "text_1": "the quick", "text_2": ["the fox", "a dog"]}
    async with mesh_of_fakes(folder, placement_deadline_s=0.05) as mesh, mesh.http() as http:
        await mesh.scheduler.stop()
        await add_pooling_worker(mesh, remembers, tasks="classify", attributes={"pair_form": SEPARATED})
        assert (await http.post("/score", json=body)).status_code == 200
        firsts = [len(mesh.ids("the quick"))] * 2
        found = [each for request in asked for each in request.first_segment_tokens]
        lengths = [len(prompt.token_ids) for request in asked for prompt in request.prompts]
        assert all(0 < first < length for first, length in zip(found, lengths, strict=True))
        assert [first >= least for first, least in zip(found, firsts, strict=True)] == [True, True]
    async with mesh_of_fakes(folder, placement_deadline_s=0.05) as mesh, mesh.http() as http:
        await mesh.scheduler.stop()
        await add_pooling_worker(mesh, tasks="classify")  # of a former version: it announces nothing
        assert (await http.post("/score", json=body)).json()["error"]["param"] == "model"


async def test_late_interaction_is_what_a_model_of_token_vectors_is_for(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, placement_deadline_s=0.05) as mesh, mesh.http() as http:
        await mesh.scheduler.stop()
        await add_pooling_worker(mesh, tasks="token_embed,embed")
        ids = mesh.text.with_added_tokens(mesh.ids("the quick fox"))
        body = {"model": "vectors", "text_1": "the quick fox", "text_2": "the quick fox"}
        (scored,) = (await http.post("/score", json=body)).json()["data"]
        assert np.isclose(scored["score"], len(ids), atol=1e-4), "each token is the best match of itself"
        (whole,) = (await http.post("/pooling", json={"model": "vectors", "input": "the quick fox"})).json()["data"]
        assert np.array(whole["data"]).shape == (len(ids), DIMENSIONS)


async def test_prefixes_are_found_by_the_same_salt_and_tenant_alone(model_path: Path, tmp_path: Path) -> None:
    made = {name: new_key_line(name, bytes([len(name)]) * 32) for name in ("alice", "bob")}
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{line}\n" for _, line in made.values()))
    salts: list[str] = []

    async def remembers(request: worker_pb2.PoolRequest) -> worker_pb2.PoolResponse:
        salts.append(request.cache_salt)
        return await pools(request)

    async with mesh_of_fakes(model_path, placement_deadline_s=0.05) as mesh, mesh.http() as http:
        await mesh.scheduler.stop()
        await add_pooling_worker(mesh, remembers)
        await embedded(http, input="a", cache_salt="pepper")
        await embedded(http, input="a")
    assert salts == ["pepper", ""]
    salts.clear()
    settings = {"api_keys_file": keys, "separate_tenant_caches": True, "placement_deadline_s": 0.05}
    async with mesh_of_fakes(model_path, **settings) as mesh:
        await mesh.scheduler.stop()
        await add_pooling_worker(mesh, remembers)
        for name, fields in (("alice", {}), ("bob", {}), ("alice", {}), ("alice", {"cache_salt": "pepper"})):
            async with mesh.http() as http:
                http.headers["authorization"] = f"Bearer {made[name][0]}"
                await embedded(http, input="a", **fields)
    assert salts[0] == salts[2]
    assert len(set(salts)) == 3
    assert all(salts)


async def test_the_client_is_told_what_has_no_effect(http: httpx.AsyncClient) -> None:
    body = {"model": "vectors", "input": "a", "mood": "good", "user": "ann", "request_id": "mine"}
    response = await http.post("/v1/embeddings", json=body)
    assert response.headers["x-penstock-without-effect"] == "mood, user"
    assert response.headers["x-request-id"] == "mine"
    body = {"model": "vectors", "text_1": "a", "text_2": "b", "instruction": "compare"}
    response = await http.post("/score", json=body)
    assert response.headers["x-penstock-without-effect"] == "instruction"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"messages": []}, "messages"),
        ("/v1/embeddings", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/v1/embeddings", {"messages": [TURNS, [{"content": "x"}]]}, "messages[1][0].role"),
        ("/v1/embeddings", {"input": [TURNS, [{"role": "user"}, {"content": "x"}]]}, "input[1][1].role"),
        ("/v1/embeddings", {"messages": [TURNS, {"role": "user", "content": "x"}]}, None),
        ("/v1/embeddings", {"input": [TURNS, [1]]}, "input"),
        ("/v1/embeddings", {"messages": TURNS, "chat_template": "{{ x }}"}, "chat_template"),
        (
            "/v1/embeddings",
            {"messages": TURNS, "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
        ),
        ("/v1/embeddings", {"messages": [{"role": "forbidden", "content": "x"}]}, "messages"),
        (
            "/v1/embeddings",
            {"messages": [{"role": "user", "content": [IMAGE_PART]}]},
            "messages[0].content[0].image_url",
        ),
        (
            "/v1/embeddings",
            {"input": [TURNS, [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE_PART]}]]},
            "input[1][0].content[1].image_url",
        ),
        ("/v1/embeddings", {"input": "a", "normalize": True}, "normalize"),
        ("/v1/embeddings", {"input": "a", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "input"),
        ("/v1/embeddings", {"input": "a", "cache_salt": "a/b"}, "cache_salt"),
        ("/v1/embeddings", {"input": "a", "request_id": "a b"}, "request_id"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "int8"}, "embed_dtype"),
        ("/v2/embed", {}, None),
        ("/v2/embed", {"texts": ["a"], "images": ["b"]}, None),
        ("/v2/embed", {"images": ["data:,"]}, "images"),
        ("/v2/embed", {"inputs": [{"content": [{"type": "text"}]}]}, "inputs[0].content[0].text"),
        ("/v2/embed", {"inputs": [{"content": [IMAGE_PART]}]}, "inputs[0].content[0]"),
        ("/v2/embed", {"texts": ["the fox"], "truncate": "NONE", "max_tokens": 1}, "max_tokens"),
        ("/v2/embed", {"texts": ["the fox"], "max_tokens": 5000}, "max_tokens"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"queries": ["a", "b"], "items": ["a"]}, "items"),
        ("/score", {"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, "text_2"),
        ("/score", {"text_1": "a", "text_2": {}}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 5000}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a"}, "documents"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str | None
) -> None:
    response = await http.post(path, json={"model": "vectors", **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
