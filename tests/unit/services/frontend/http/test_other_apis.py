"""The Responses and the Messages API, on top of chat completions."""

import hashlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from mesh.membership import Member
from penstock.v1 import request_pb2
from tests.unit.services.frontend.fakes import Delta, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
TEXT = "the quick fox"

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model_path: Path) -> AsyncIterator[MeshOfFakes]:
    async with mesh_of_fakes(model_path, max_stored_response_bytes=20_000) as mesh:
        ids = mesh.ids(TEXT)
        await mesh.add_worker(lambda _: tokens(*([each] for each in ids), [1]))
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: MeshOfFakes) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client


def prompt(mesh: MeshOfFakes) -> str:
    """The text of the last prompt that reached the worker."""
    return mesh.text.decode(mesh.worker.received[-1].prompt_token_ids, skip_special_tokens=False)


async def test_a_response_goes_on_with_an_earlier_one(mesh: MeshOfFakes) -> None:
    client = mesh.client()
    first = await client.responses.create(model="demo", input="hi", instructions="be brief")
    assert (first.output_text, first.status) == (TEXT, "completed")
    assert first.usage is not None
    assert first.usage.output_tokens == len(mesh.ids(TEXT)) + 1
    assert prompt(mesh) == "<s><|system|>be brief<|user|>hi<|assistant|>"
    second = await client.responses.create(model="demo", input="again", previous_response_id=first.id)
    assert prompt(mesh) == f"<s><|user|>hi<|assistant|>{TEXT}<|user|>again<|assistant|>", "without the instructions"
    kept = await client.responses.retrieve(second.id)
    assert kept.model_dump() == second.model_dump()
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await client.responses.create(model="demo", input="again", previous_response_id=second.id)


async def test_a_streamed_response_says_all_that_a_whole_one_says(mesh: MeshOfFakes) -> None:
    client = mesh.client()
    events = [event async for event in await client.responses.create(model="demo", input="hi", stream=True)]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    last = events[-1]
    assert last.type == "response.completed"
    whole = await client.responses.create(model="demo", input="hi")
    assert last.response.output_text == whole.output_text == TEXT
    assert last.response.usage == whole.usage
    assert (await client.responses.retrieve(last.response.id)).output_text == TEXT


async def test_what_is_cut_is_incomplete(model_path: Path) -> None:
    async with (
        mesh_of_fakes(model_path, lambda _: tokens([70], [71], finish=request_pb2.FINISH_REASON_LENGTH)) as mesh,
        mesh.http() as http,
    ):
        answer = await mesh.client().responses.create(model="demo", input="hi", max_output_tokens=2)
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        message = (await http.post(MESSAGES, json={"model": "demo", "messages": USER, "max_tokens": 2})).json()
        assert message["stop_reason"] == "max_tokens"


async def test_the_store_is_bounded_and_storing_can_be_left_out(mesh: MeshOfFakes) -> None:
    client = mesh.client()
    first = await client.responses.create(model="demo", input="hi")
    unkept = await client.responses.create(model="demo", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unkept.id)
    for _ in range(30):
        last = await client.responses.create(model="demo", input="hi")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    assert (await client.responses.retrieve(last.id)).id == last.id


async def test_a_response_is_its_owners_alone(model_path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [f"{name}:{hashlib.sha256(name.encode()).hexdigest()}" for name in ("alice", "bob")]
    keys.write_text(f"{lines[0]}:share=2.5\n{lines[1]}\n")
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1]), api_keys_file=keys) as mesh, mesh.http() as http:
        answer = await mesh.client("alice").responses.create(model="demo", input="hi")
        for call in (mesh.client("bob").responses.retrieve(answer.id), mesh.client("bob").responses.delete(answer.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        body = {"messages": USER, "max_tokens": 2}
        assert (await http.post(MESSAGES, json=body, headers={"x-api-key": "bob"})).status_code == 200
        refused = await http.post(MESSAGES, json=body, headers={"x-api-key": "eve"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        asked_by = [(received.tenant.name, received.tenant.share) for received in mesh.worker.received]
        assert asked_by == [("alice", 2.5), ("bob", 1.0)], "whose share of the instance it takes"


async def test_any_frontend_goes_on_with_a_response_and_one_that_is_lost_loses_none(model_path: Path) -> None:
    def frontend(of: MeshOfFakes) -> Member:
        return Member("frontend", "other", "first", of.rpc_address, "")

    def script(_: request_pb2.GenerateRequest) -> Iterable[Delta]:
        return tokens([70], [1])

    async with mesh_of_fakes(model_path, script) as stays:
        async with mesh_of_fakes(model_path, script) as dies:
            lost = frontend(dies)
            stays.directory.join(lost)
            dies.directory.join(frontend(stays))
            first = await dies.client().responses.create(model="demo", input="a")
            second = await stays.client().responses.create(model="demo", input="b", previous_response_id=first.id)
            third = await dies.client().responses.create(model="demo", input="c", previous_response_id=second.id)
            asked = prompt(dies)
            assert [asked.count(f"<|user|>{text}") for text in "abc"] == [1, 1, 1]
            await stays.until(lambda: stays.service.responses.store.find(third.id, "") is not None)
            with pytest.raises(openai.NotFoundError):
                await stays.client().responses.retrieve("resp_unheard_of")
            await dies.client().responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await stays.client().responses.retrieve(first.id)
        await stays.client().responses.create(model="demo", input="d", previous_response_id=third.id)
        assert [prompt(stays).count(f"<|user|>{text}") for text in "abcd"] == [1, 1, 1, 1]
        with pytest.raises(openai.InternalServerError, match="other could not be asked"):
            await stays.client().responses.retrieve("resp_unheard_of")
        stays.directory.leave(lost)
        with pytest.raises(openai.NotFoundError):
            await stays.client().responses.retrieve("resp_unheard_of")
        await stays.until(lambda: stays.metric("uncopied_responses_total") == 1)


async def test_items_of_a_conversation_become_its_messages(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "developer", "content": "c"},
    ]
    assert (await http.post(RESPONSES, json={"input": items})).status_code == 200
    assert prompt(mesh) == "<s><|system|>c<|user|>a<|assistant|>b<|assistant|>"


async def test_an_answer_of_nothing_is_no_turn_to_the_next(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([1])) as mesh:
        client = mesh.client()
        first = await client.responses.create(model="demo", input="a")
        await client.responses.create(model="demo", input="b", previous_response_id=first.id)
        assert prompt(mesh) == "<s><|user|>a<|user|>b<|assistant|>"


async def test_a_message_is_answered_as_anthropic_would(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    last = {"role": "user", "content": [{"type": "text", "text": "c"}]}
    messages = [*USER, {"role": "assistant", "content": "b"}, last]
    body = {"model": "demo", "system": "be brief", "messages": messages, "max_tokens": 20}
    answer = (await http.post(MESSAGES, json=body)).json()
    assert prompt(mesh) == "<s><|system|>be brief<|user|>hi<|assistant|>b<|user|>c<|assistant|>"
    assert answer["content"] == [{"type": "text", "text": TEXT}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "end_turn")
    usage = answer["usage"]
    counted = (await http.post(f"{MESSAGES}/count_tokens", json=body)).json()["input_tokens"]
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[kind] for kind in kinds) == counted
    assert usage["output_tokens"] == len(mesh.ids(TEXT)) + 1


async def test_a_streamed_message_has_blocks(http: httpx.AsyncClient) -> None:
    body = {"model": "demo", "messages": USER, "max_tokens": 20, "stream": True}
    text = (await http.post(MESSAGES, json=body)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert list(dict.fromkeys(names)) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == TEXT
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input[0]"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": "a", "background": "perhaps"}, "background"),
        ({"input": "a", "background": True, "store": False}, "background"),
        ({"input": "a", "temperature": 3}, "temperature"),
        ({"input": "a", "seed": "x"}, "seed"),
        ({"input": "a", "include": ["telepathy"]}, "include[0]"),
        ({"input": "a", "service_tier": "first class"}, "service_tier"),
    ],
)
async def test_wrong_responses_are_named(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await http.post(RESPONSES, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_what_a_response_cannot_keep_is_told(http: httpx.AsyncClient) -> None:
    tools = [{"type": "web_search"}]
    body = {
        "input": "a",
        "tools": tools,
        "tool_choice": "auto",
        "include": ["reasoning.encrypted_content"],
        "colour": 1,
    }
    response = await http.post(RESPONSES, json={**body, "seed": 7, "top_k": 3, "stop": "x"})
    assert response.status_code == 200, response.text
    assert response.headers["x-penstock-without-effect"] == "colour, tools[0], include[0]"


async def test_a_response_says_what_it_was_asked_and_what_holds(http: httpx.AsyncClient) -> None:
    told = (await http.post(RESPONSES, json={"input": "a", "temperature": 0.5, "text": {"verbosity": "low"}})).json()
    assert (told["temperature"], told["top_p"], told["presence_penalty"]) == (0.5, 1.0, 0.0)
    assert (told["tool_choice"], told["text"]) == ("none", {"format": None, "verbosity": "low"})
    told = (await http.post(RESPONSES, json={"input": "a", "reasoning": {"effort": "low"}})).json()
    assert (told["reasoning"]["effort"], told["reasoning"]["summary"], told["metadata"]) == ("low", None, None)


async def test_only_what_runs_in_the_background_can_be_cancelled(http: httpx.AsyncClient) -> None:
    kept = (await http.post(RESPONSES, json={"input": "a"})).json()
    assert (await http.post(f"{RESPONSES}/{kept['id']}/cancel")).status_code == 400
    assert (await http.post(f"{RESPONSES}/resp_unheard_of/cancel")).status_code == 404


async def test_vllms_parameters_of_a_response_and_a_message_reach_the_engine(
    mesh: MeshOfFakes, http: httpx.AsyncClient
) -> None:
    fields = {"input": "a", "seed": 7, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "cache_salt": "pepper"}
    assert (await http.post(RESPONSES, json=fields)).status_code == 200
    received = mesh.worker.received[-1]
    sampling = received.sampling
    assert (sampling.seed, sampling.top_k, sampling.repetition_penalty) == (7, 3, 1.5)
    assert received.cache_salt == "pepper"
    form = {"type": "json_schema", "schema": {"type": "object"}}
    body = {"messages": USER, "max_tokens": 3, "output_config": {"effort": "low", "format": form}, "cache_salt": "salt"}
    assert (await http.post(MESSAGES, json=body)).status_code == 200
    received = mesh.worker.received[-1]
    assert received.cache_salt == "salt"
    assert received.sampling.structured_outputs == '{"json":{"type":"object"}}'


@pytest.mark.parametrize("tools", [{}, {"tools": []}])
async def test_a_choice_among_no_tools_changes_nothing(http: httpx.AsyncClient, tools: dict[str, Any]) -> None:
    said = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **tools}
    plain = await http.post("/v1/messages", json=said)
    asked = await http.post("/v1/messages", json={**said, "tool_choice": {"type": "any"}})
    assert asked.json()["content"] == plain.json()["content"]
    assert asked.headers["x-penstock-without-effect"] == "tool_choice"
    assert "x-penstock-without-effect" not in plain.headers


async def test_an_empty_list_of_tools_counts_as_none_where_tokens_are_counted(http: httpx.AsyncClient) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    assert (await http.post("/tokenize", json={**chat, "tools": []})).json() == (
        await http.post("/tokenize", json=chat)
    ).json()


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"messages": USER}, 400, "invalid_request_error"),
        ({"messages": [], "max_tokens": 2}, 400, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 2},
            400,
            "invalid_request_error",
        ),
        ({"messages": USER, "max_tokens": 2, "thinking": {"type": "enabled"}}, 400, "invalid_request_error"),
        ({"messages": USER, "max_tokens": 100_000}, 400, "invalid_request_error"),
        ({"messages": USER, "max_tokens": 2, "model": "nobody"}, 404, "not_found_error"),
    ],
)
async def test_wrong_messages_are_told_in_anthropics_form(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, kind: str
) -> None:
    response = await http.post(MESSAGES, json=body)
    answer = response.json()
    assert (response.status_code, answer["type"], answer["error"]["type"]) == (status, "error", kind), answer
    assert answer["error"]["message"]
