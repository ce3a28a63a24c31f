"""Requests made from the schema itself, valid ones and ones with single values bent out of shape: each is answered, and
what is refused names the culprit. `--hypothesis-profile=thorough` tries 10,000."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from penstock.v1 import request_pb2
from tests.examples import examples
from tests.unit.services.frontend.fakes import Delta, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_BODY_BYTES = 100_000
ANSWER_S = 20.0
"""No request takes as long, however busy the machine."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]


def answer(request: request_pb2.GenerateRequest) -> list[Delta]:
    """At most five tokens, with all logprobs that were asked for."""
    ids = [70 + index for index in range(min(5, request.sampling.max_tokens))]
    deltas = tokens(*([token_id] for token_id in ids), finish=request_pb2.FINISH_REASON_LENGTH)
    if request.sampling.HasField("logprobs"):
        for delta in deltas:
            delta.logprobs.extend(_logprobs(delta.token_ids[0], request.sampling.logprobs) for _ in delta.token_ids)
    if request.sampling.HasField("prompt_logprobs"):
        wanted = request.sampling.prompt_logprobs
        deltas[0].prompt_logprobs.extend(_logprobs(token_id, wanted) for token_id in request.prompt_token_ids[1:])
    return deltas


def _logprobs(token_id: int, rivals: int) -> request_pb2.PositionLogprobs:
    top = [request_pb2.TokenLogprob(token_id=token_id + rank, logprob=-1.0 - rank) for rank in range(rivals)]
    return request_pb2.PositionLogprobs(
        chosen=request_pb2.TokenLogprob(token_id=token_id, logprob=float("-inf")), top=top
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model_path: Path) -> AsyncIterator[MeshOfFakes]:
    async with mesh_of_fakes(model_path, answer, max_body_bytes=MAX_BODY_BYTES) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: MeshOfFakes) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client


def values_of(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a JSON schema of the document allows, small ones."""
    if "$ref" in schema:
        return values_of(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document)
    if "anyOf" in schema:
        return st.one_of([values_of(option, document) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object":
            return objects_of(schema, document)
        case "array":
            items = values_of(schema.get("items", {}), document)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=3)
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=8)
        case "integer":
            low, high = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63)
            return st.integers(low, min(high, max(low, 0) + 20)) | st.integers(low, high)
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            return st.floats(low, schema.get("maximum"), exclude_min="exclusiveMinimum" in schema)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return json_values


def objects_of(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "properties" not in schema:
        return st.dictionaries(
            st.text(max_size=4), values_of(schema.get("additionalProperties") or {}, document), max_size=2
        )
    required = set(schema.get("required", ()))
    fields = {name: values_of(field, document) for name, field in schema["properties"].items()}
    return st.fixed_dictionaries(
        {name: field for name, field in fields.items() if name in required},
        optional={name: field for name, field in fields.items() if name not in required},
    )


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)

WORDS = st.sampled_from(("the fox", "a", "One two three.", "🙂 你好"))
CONVERSATION = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "assistant", "system", "developer")), "content": WORDS},
        optional={"name": WORDS, "mood": json_values},
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize(("path", "schema"), [(CHAT, "ChatCompletionRequest"), (COMPLETIONS, "CompletionRequest")])
@given(data=st.data())
@settings(
    max_examples=examples(60, thorough=5_000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_no_request_is_answered_500_or_never(
    http: httpx.AsyncClient, path: str, schema: str, data: st.DataObject
) -> None:
    document = await _document(http)
    fields = document["components"]["schemas"][schema]["properties"]
    body: dict[str, Any] = {"model": "demo", "max_tokens": 8}
    body |= {"messages": data.draw(CONVERSATION)} if path == CHAT else {"prompt": data.draw(WORDS)}
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True)):
        body[name] = data.draw(values_of(fields[name], document))
    if data.draw(st.integers(0, 3)) == 0:
        body[data.draw(st.sampled_from(sorted(fields)))] = data.draw(json_values)
    async with asyncio.timeout(ANSWER_S):
        # As Python writes it: infinite numbers, which JSON has not, are sent all the same.
        content = json.dumps(body)
        response = await http.post(path, content=content, headers={"content-type": "application/json"})
    event(f"{path} {response.status_code}")
    if response.status_code == 200:
        assert response.headers["x-penstock-instance"] == "worker-0"
        _check_answer(response, is_stream=bool(body.get("stream")))
    else:
        error = response.json()["error"]
        assert response.status_code in (400, 404), response.text
        assert error["message"]
        assert error["param"] or "Infinity" in content, error


def _check_answer(response: httpx.Response, *, is_stream: bool) -> None:
    if not is_stream:
        assert response.json()["choices"]
        return
    events = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]", response.text
    chunks = [json.loads(each) for each in events]
    assert all("error" not in chunk for chunk in chunks), response.text
    ended = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ended) == list(range(len(ended)))


_documents: dict[str, Any] = {}


async def _document(http: httpx.AsyncClient) -> dict[str, Any]:
    if not _documents:
        _documents.update((await http.get("/openapi.json")).json())
    return _documents
