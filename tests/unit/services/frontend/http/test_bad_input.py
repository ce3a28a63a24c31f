"""Whatever a client sends, it gets the right status and an error object."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.frontend.http.body import MAX_UNKNOWN_WITHIN
from services.frontend.requests.unsupported import MAX_TOLD
from tests.examples import examples
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
MAX_BODY_BYTES = 100_000

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model_path: Path) -> AsyncIterator[MeshOfFakes]:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1]), max_body_bytes=MAX_BODY_BYTES) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: MeshOfFakes) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]


UNSUPPORTED = "unsupported_parameter"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT_CASES: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"model": "nobody"}, 404, "model", "model_not_found"),
    ({"model": 5}, 400, "model", "invalid_value"),
    ({"model": "x" * 257}, 400, "model", "invalid_value"),
    ({"messages": []}, 400, "messages", "invalid_value"),
    ({"messages": "hi"}, 400, "messages", "invalid_value"),
    ({"messages": [{"content": "hi"}]}, 400, "messages[...].role", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0]", "invalid_value"),
    ({"messages": [{"role": "system", "content": None}, *USER]}, 400, "messages[0]", "invalid_value"),
    ({"messages": [{"role": "forbidden", "content": "x"}]}, 400, "messages", None),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages", "context_length_exceeded"),
    ({"max_tokens": 4096}, 400, "messages", "context_length_exceeded"),
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, 400, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**30}, 400, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": 1.5}, 400, "max_completion_tokens", "invalid_value"),
    ({"temperature": "hot"}, 400, "temperature", "invalid_value"),
    ({"temperature": -0.1}, 400, "temperature", "invalid_value"),
    ({"temperature": True}, 400, "temperature", "invalid_value"),
    ({"top_p": 0}, 400, "top_p", "invalid_value"),
    ({"top_k": -2}, 400, "top_k", "invalid_value"),
    ({"n": 0}, 400, "n", "invalid_value"),
    ({"n": 129}, 400, "n", "invalid_value"),
    ({"presence_penalty": 3}, 400, "presence_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "invalid_value"),
    ({"stop": ["a"] * 33}, 400, "stop", "invalid_value"),
    ({"stop": ""}, 400, "stop", "invalid_value"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", None),
    ({"logit_bias": {"999999": 1}}, 400, "logit_bias", None),
    ({"logit_bias": {"²": 1}}, 400, "logit_bias", None),
    ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", None),
    ({"top_logprobs": 2}, 400, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_value"),
    ({"stream": "yes"}, 400, "stream", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", UNSUPPORTED),
    ({"tools": []}, 400, "tools", "invalid_value"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "search", "function": {"name": "f"}}]}, 400, "tools[0].type", "invalid_value"),
    (
        {"tools": [{"type": "function", "function": {"name": 'no "quotes"'}}]},
        400,
        "tools[0].function.name",
        "invalid_value",
    ),
    ({"tools": [TOOL, TOOL]}, 400, "tools[1].function.name", None),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 1}}}]},
        400,
        "tools[0].function.parameters",
        "invalid_json_schema",
    ),
    ({"tools": [TOOL]}, 400, "tool_choice", None),
    ({"tool_choice": "required"}, 400, "tool_choice", None),
    ({"tool_choice": "sometimes"}, 400, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, 400, "tool_choice", None),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", None),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        400,
        "response_format.json_schema.schema",
        "invalid_json_schema",
    ),
    ({"structured_outputs": {"json": "[]"}}, 400, "structured_outputs.json", "invalid_json_schema"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs", None),
    ({"structured_outputs": {}}, 400, "structured_outputs", None),
    ({"structured_outputs": {"choice": []}}, 400, "structured_outputs.choice", None),
    ({"structured_outputs": {"guided": 1}}, 400, "structured_outputs", None),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " "}},
        400,
        "structured_outputs.whitespace_pattern",
        UNSUPPORTED,
    ),
    (
        {"structured_outputs": {"json_object": True}, "response_format": {"type": "json_object"}},
        400,
        "structured_outputs",
        None,
    ),
    ({"reasoning_effort": "heroic"}, 400, "reasoning_effort", "invalid_value"),
    ({"thinking_token_budget": 9}, 400, "thinking_token_budget", None),
    ({"thinking_token_budget": -2}, 400, "thinking_token_budget", "invalid_value"),
    ({"mm_processor_kwargs": {"size": 4}}, 400, "mm_processor_kwargs", UNSUPPORTED),
    ({"cache_salt": "a/b"}, 400, "cache_salt", "invalid_value"),
    ({"cache_salt": "x" * 129}, 400, "cache_salt", "invalid_value"),
    ({"penstock": {"speed": 1}}, 400, "penstock.speed", "unknown_parameter"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content[0].image_url",
        UNSUPPORTED,
    ),
    ({"messages": [*USER, {"role": "function", "content": "x"}]}, 400, "messages[1].role", UNSUPPORTED),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "status", "param", "code"), CHAT_CASES)
async def test_wrong_chat_parameters_are_named(
    http: httpx.AsyncClient, fields: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    response = await http.post(CHAT, json={"model": "demo", "messages": USER, **fields})
    if param == "messages[...].role":
        param = response.json()["error"]["param"]
        assert param == "messages[0].role"
    assert_error(response, status, param, code)


COMPLETION_CASES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": []}, "prompt", None),
    ({"prompt": ["a", 1]}, "prompt", None),
    ({"prompt": [[]]}, "prompt", None),
    ({"prompt": [-1]}, "prompt[0]", "invalid_value"),
    ({"prompt": [10**6]}, "prompt", None),
    ({"prompt": {"a": 1}}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt", None),
    ({"prompt": [5] * 4090}, "prompt", "context_length_exceeded"),
    ({"prompt": ""}, "prompt", None),
    ({"prompt_embeds": "x"}, "prompt_embeds", UNSUPPORTED),
    ({"suffix": ""}, "suffix", UNSUPPORTED),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
    ({"truncation_side": "top"}, "truncation_side", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", UNSUPPORTED),
    ({"logprobs": -1}, "logprobs", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), COMPLETION_CASES)
async def test_wrong_completion_parameters_are_named(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str | None
) -> None:
    assert_error(await http.post(COMPLETIONS, json={"model": "demo", "prompt": "hi", **fields}), 400, param, code)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"},
        {"stop": None, "temperature": None, "n": None, "logit_bias": None, "stream": None, "max_tokens": None},
        {"temperature": 0, "stop": [], "seed": 2**63 - 1 - 128, "parallel_tool_calls": True},
    ],
)
async def test_what_does_not_change_the_answer_is_accepted(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = await http.post(CHAT, json={"model": "demo", "messages": USER, **fields})
    assert response.status_code == 200, response.text
    told = response.headers.get("x-penstock-without-effect", "")
    if "modalities" in fields:
        assert told == "modalities"
    else:
        assert told == ("user, metadata, store, service_tier, prompt_cache_key" if "user" in fields else "")


PART = {"type": "text", "text": "hi", "mood": "good"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"unheard_of": 1}, "unheard_of"),
        ({"one": 1, "two": {"three": 3}}, "one, two"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True, "mood": 1}}, "stream_options.mood"),
        ({"response_format": {"type": "text", "mood": 1}}, "response_format.mood"),
        ({"messages": [{"role": "user", "content": [PART]}]}, "messages[0].content[0].mood"),
        ({"functions": [{"name": "f"}], "modalities": ["audio"]}, "functions, modalities"),
        ({"kv_transfer_params": {"a": 1}, "watermarking": True}, "watermarking, kv_transfer_params"),
        ({"unheard\r\nof": 1, "größe": 2}, ""),
        ({"model": None, "max_tokens": "7", "logit_bias": {"5": 101}}, ""),
        ({"messages": [{"role": "user"}]}, ""),
        ({"reasoning_effort": "high"}, ""),
    ],
)
async def test_what_vllm_takes_is_taken_and_what_changes_nothing_is_told(
    http: httpx.AsyncClient, fields: dict[str, Any], told: str
) -> None:
    response = await http.post(CHAT, json={"model": "demo", "messages": USER, **fields})
    assert response.status_code == 200, response.text
    assert response.headers.get("x-penstock-without-effect", "") == told


async def test_there_may_be_so_many_unknown_parameters(http: httpx.AsyncClient) -> None:
    many = {f"unheard_of_{index}": index for index in range(100)}
    response = await http.post(CHAT, json={"model": "demo", "messages": USER, **many})
    assert response.status_code == 200
    assert len(response.headers["x-penstock-without-effect"].split(", ")) == MAX_TOLD
    options = {f"unheard_of_{index}": None for index in range(MAX_UNKNOWN_WITHIN)}
    body = {"model": "demo", "messages": USER, "stream": True, "stream_options": options}
    response = await http.post(CHAT, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_parameter")
    del options["unheard_of_0"]
    assert (await http.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"model": "demo", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "demo", "temperature": NaN}',
        b'{"model": "demo", "messages": ' + b"[" * 50_000,
        b'{"model": "demo", "metadata": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        b"\x00\x01\x02",
    ],
)
async def test_bodies_that_are_no_request(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post(CHAT, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_large_bodies_are_refused_whether_announced_or_not(http: httpx.AsyncClient) -> None:
    assert_error(await http.post(CHAT, content=b"x" * (MAX_BODY_BYTES + 1)), 413, code="request_too_large")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * (MAX_BODY_BYTES // 50)

    assert_error(await http.post(CHAT, content=pieces()), 413, code="request_too_large")


async def test_unknown_paths_and_methods_have_error_objects(http: httpx.AsyncClient) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)):
        response = await http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"]


async def test_models_are_listed_and_retrieved(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["demo"]
    assert (await http.get("/v1/models/demo")).json() == listed["data"][0]
    assert (await http.get("/v1/models/", follow_redirects=True)).json() == listed
    assert (await http.get("/v1/models/org/other")).status_code == 404
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert "penstock_frontend_requests_total" in (await http.get("/metrics")).text


async def test_what_needs_no_key_can_be_closed(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, docs=False, http_metrics=False) as mesh, mesh.http() as http:
        statuses = {
            path: (await http.get(path)).status_code
            for path in ("/docs", "/redoc", "/openapi.json", "/metrics", "/version")
        }
    assert statuses == {"/docs": 404, "/redoc": 404, "/openapi.json": 404, "/metrics": 404, "/version": 200}


async def test_the_openapi_document_is_complete(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    resume = "/v1/requests/{request_id}/events"
    told = {"/v1/models", "/v1/models/{model}", "/health", "/metrics", "/ping", "/version", "/load"}
    told |= {"/tokenize", "/detokenize", "/v1/embeddings", "/classify", "/pooling", "/score", "/v1/score"}
    told |= {"/rerank", "/v1/rerank", "/v2/rerank", "/v1/messages", "/v1/messages/count_tokens"}
    told |= {"/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"}
    told |= {"/v2/embed", "/v1/chat/completions/batch", "/invocations", "/generative_scoring", "/v1/systemone"}
    told |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/{adapter_name}"}
    assert set(document["paths"]) == {CHAT, COMPLETIONS, resume} | told
    for path in (CHAT, COMPLETIONS):
        operation = document["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("Request")
        assert {"200", "400", "401", "404", "413", "429", "503"} <= set(operation["responses"])
    assert "422" not in json.dumps(document["paths"])
    for reference in _references(document):
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]
    chat = {**document["components"]["schemas"]["ChatCompletionRequest"], "components": document["components"]}
    jsonschema.Draft202012Validator(chat).validate({"model": "demo", "messages": USER, "stop": ["a"]})


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [found for item in value.values() for found in _references(item)]
    return [found for item in value for found in _references(item)] if isinstance(value, list) else []


@given(body=st.binary(max_size=200))
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_arbitrary_bytes_are_a_bad_request(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post(CHAT, content=body)
    assert response.status_code == 400


async def test_what_cannot_fit_is_refused_before_it_is_tokenised(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1])) as mesh, mesh.http() as http:
        model = await mesh.service.catalogue.find("demo")
        assert model is not None
        asked_before = model.text.chunked.cache.misses
        for path, body, param in (
            ("/v1/completions", {"prompt": "x" * 1_000_000}, "prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "messages"),
        ):
            response = await http.post(path, json={"model": "demo", **body})
            assert_error(response, 400, param, "context_length_exceeded")
            assert "at least" in response.json()["error"]["message"]
        assert model.text.chunked.cache.misses == asked_before
        cut = {"model": "demo", "prompt": "x y " * 10_000, "truncate_prompt_tokens": 5, "max_tokens": 1}
        assert "context_length" not in (await http.post("/v1/completions", json=cut)).text
