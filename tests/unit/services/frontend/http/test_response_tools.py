"""Tools of Responses that are no functions of a chat: custom ones, and those of a namespace."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.services.frontend.checkpoints import CHAT_TEMPLATE, write_checkpoint
from tests.unit.services.frontend.http.test_tools import saying
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes

pytestmark = [pytest.mark.slow, pytest.mark.live]

RESPONSES = "/v1/responses"
TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ bos_token }}", "{{ bos_token }}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
).replace(
    "{{ message['content'] }}",
    "{% if message.reasoning %}({{ message.reasoning }}){% endif %}{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>"
    "{% endfor %}",
)
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Takes a patch."}
SUMS: dict[str, Any] = {
    "type": "namespace",
    "name": "sums",
    "description": "Sums.",
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": None}],
}
SAID = (
    'Now.<tool_call>{"name": "patch", "arguments": {"input": "-a\\n+\\"b\\""}}</tool_call>'
    '<tool_call>{"name": "sums__add", "arguments": {"a": 1}}</tool_call>'
)
TEXT = '-a\n+"b"'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tools"), template=TEMPLATE)


def prompt(mesh: MeshOfFakes) -> str:
    return mesh.text.decode(mesh.worker.received[-1].prompt_token_ids, skip_special_tokens=False)


async def test_calls_are_told_by_the_tools_own_names(checkpoint: Path) -> None:
    body = {"model": "demo", "input": "Do.", "tools": [PATCH, {"type": "web_search"}, SUMS]}
    body |= {"tool_choice": {"type": "web_search"}}
    async with saying(checkpoint, SAID, tool_call_parser="hermes") as mesh, mesh.http() as http:
        whole = await http.post(RESPONSES, json=body)
        assert whole.status_code == 200, whole.text
        assert prompt(mesh).startswith("<s>[patch][sums__add]<|user|>Do.")
        assert whole.headers["x-penstock-without-effect"] == "tools[1], tool_choice"
        response = whole.json()
        message, custom, function = response["output"]
        assert message["content"][0]["text"] == "Now."
        assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", TEXT)
        assert "status" not in custom
        assert (function["type"], function["namespace"], function["name"]) == ("function_call", "sums", "add")
        assert json.loads(function["arguments"]) == {"a": 1}
        assert response["tools"][2]["tools"][0]["name"] == "add"

        given = {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "done"}
        for following in (
            {"input": [given], "previous_response_id": response["id"]},
            {"input": [{"role": "user", "content": "Do."}, *response["output"], given]},
        ):
            again = await http.post(RESPONSES, json={**body, **following})
            assert again.status_code == 200, again.text
            calls = f'<patch {{"input": {json.dumps(TEXT)}}}><sums__add {{"a": 1}}>'
            assert f"<|user|>Do.<|assistant|>Now.{calls}<|tool|>done<|assistant|>" in prompt(mesh), "in one turn"


async def test_the_text_of_a_custom_call_is_streamed(checkpoint: Path) -> None:
    async with saying(checkpoint, SAID, tool_call_parser="hermes") as mesh, mesh.client() as client:
        stream = await client.responses.create(model="demo", input="Do.", tools=[PATCH, SUMS], stream=True)  # type: ignore[list-item]
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == TEXT
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert done.input == TEXT
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in items] == ["message", "custom_tool_call", "function_call"]
    (last,) = [event for event in events if event.type == "response.completed"]
    assert last.response.output == items


@pytest.mark.parametrize(
    ("items", "written"),
    [
        (
            [
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
                {"role": "assistant", "content": "Yes."},
            ],
            "<|assistant|>(Hm)Yes.<|assistant|>",
        ),
        (
            [{"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm"}]}],
            "<|assistant|>(Hm)<|assistant|>",
        ),
        (
            [{"type": "message", "role": "assistant", "content": "It is", "status": "incomplete"}],
            "<|assistant|>It is",
        ),
    ],
)
async def test_a_turn_is_one_message(checkpoint: Path, items: list[dict[str, Any]], written: str) -> None:
    async with saying(checkpoint, "Hm") as mesh, mesh.http() as http:
        answer = await http.post(
            RESPONSES, json={"model": "demo", "input": [{"role": "user", "content": "Hi"}, *items]}
        )
        assert answer.status_code == 200, answer.text
        assert prompt(mesh) == f"<s><|user|>Hi{written}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "a"}}]}, "tools[0].format"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "other"}}, "tool_choice"),
        (
            {
                "tools": [SUMS, {**SUMS, "name": "others"}],
                "tool_choice": {"type": "function", "name": "add"},
            },
            "tool_choice",
        ),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": 5}]}, "input[0].name"),
    ],
)
async def test_what_cannot_be_served_is_named(checkpoint: Path, fields: dict[str, Any], param: str) -> None:
    async with saying(checkpoint, "Hm", tool_call_parser="hermes") as mesh, mesh.http() as http:
        answer = await http.post(RESPONSES, json={"model": "demo", "input": "Hi", **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
