"""What clients ask the text of an answer to fit, and what engines are told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.sampling_message import sampling_params
from mesh.runtime import SystemThreads
from penstock.v1 import request_pb2
from services.frontend.errors import ApiError
from services.frontend.requests.structure import (
    MAX_STRUCTURE_CHARACTERS,
    ResponseFormat,
    StructuredOutputs,
    check_large_schemas,
    structure_of,
)
from tests.unit.services.frontend.fakes import failure, tokens
from tests.unit.services.frontend.mesh_of_fakes import mesh_of_fakes

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
USER = [{"role": "user", "content": "hi"}]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


def told(response_format: Any = None, structured_outputs: Any = None) -> Any:
    structure, _ = structure_of(
        msgspec.convert(response_format, ResponseFormat | None),
        msgspec.convert(structured_outputs, StructuredOutputs | None),
    )
    return json.loads(structure) if structure else None


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "engine"),
    [
        (None, None, None),
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, None, {"json_object": True}),
        (JSON_SCHEMA, None, {"json": SCHEMA}),
        ({"type": "text"}, {"regex": "a+"}, {"regex": "a+"}),
        (None, {"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        (None, {"grammar": 'root ::= "a"', "disable_any_whitespace": False}, {"grammar": 'root ::= "a"'}),
        (None, {"json": json.dumps(SCHEMA)}, {"json": json.dumps(SCHEMA)}),
        (
            {"type": "structural_tag", "triggers": ["<f"], "structures": []},
            None,
            {"structural_tag": '{"type":"structural_tag","structures":[],"triggers":["<f"]}'},
        ),
    ],
)
def test_what_engines_are_told(response_format: Any, structured_outputs: Any, engine: Any) -> None:
    assert told(response_format, structured_outputs) == engine


def test_members_of_a_schema_keep_their_order() -> None:
    """Models write them in that order."""
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in "zebra"}}
    assert list(told(None, {"json": schema})["json"]["properties"]) == list("zebra")


def test_what_would_not_fit_a_message_is_refused() -> None:
    with pytest.raises(ApiError, match="longer than") as refused:
        told(None, {"regex": "a" * (MAX_STRUCTURE_CHARACTERS + 1)})
    assert refused.value.param == "structured_outputs.regex"


@pytest.mark.live
@pytest.mark.asyncio
async def test_what_only_the_engine_can_refuse_names_the_parameter_too(model_path: Path) -> None:
    def script(request: request_pb2.GenerateRequest) -> list[request_pb2.TokenDelta]:
        if "broken" in request.sampling.structured_outputs:
            return [failure(request_pb2.ERROR_CODE_REFUSED, "the grammar does not parse")]
        return tokens([70], [1])

    async with mesh_of_fakes(model_path, script) as mesh, mesh.http() as http:

        async def ask(**fields: Any) -> Any:
            body = {"model": "demo", "messages": USER, **fields}
            return (await http.post("/v1/chat/completions", json=body)).json()

        answered = await ask(response_format=JSON_SCHEMA, stream=False)
        assert answered["choices"][0]["finish_reason"] == "stop"
        received = sampling_params(mesh.worker.received[-1].sampling)
        assert json.loads(received.structured_outputs) == {"json": SCHEMA}
        error = (await ask(structured_outputs={"grammar": "broken"}))["error"]
        assert (error["param"], error["code"]) == ("structured_outputs", "refused")
        assert "the grammar does not parse" in error["message"]


@pytest.mark.asyncio
async def test_a_large_schema_is_looked_at_beside_the_event_loop() -> None:
    looked_at: list[str] = []

    class Threads(SystemThreads):
        async def run(self, function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:  # type: ignore[override]
            looked_at.extend(arguments)
            return function(*arguments)

    large = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(100)}}
    await check_large_schemas([SCHEMA, large, json.dumps(large), {"const": "x" * MAX_STRUCTURE_CHARACTERS}], Threads())
    assert [json.loads(encoded) for encoded in looked_at] == [large, large]
    assert told(None, {"json": large}) == {"json": large}
    with pytest.raises(ApiError, match="together"):
        await check_large_schemas([{"const": "x" * 30_000}] * 10, Threads())
