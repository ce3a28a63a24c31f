"""Tools and reasoning in the words of the Responses and the Messages API, streamed and whole."""

import json
from typing import Any, Protocol

import msgspec
import pytest

from services.frontend.answers.messages import MessagesTranslator
from services.frontend.answers.responses import ResponsesTranslator
from services.frontend.requests import messages_schema, responses_schema
from services.frontend.requests.messages_schema import MessagesRequest
from services.frontend.requests.responses_schema import ResponsesRequest

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 4, "created_cache_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    {"id": "c2", "type": "function", "function": {"name": "mul", "arguments": "{}"}},
]
MESSAGE = {"content": "text", "reasoning": "hm", "tool_calls": CALLS, "role": "assistant"}
CHOICE = {"finish_reason": "tool_calls", "stop_reason": None, "message": MESSAGE, "logprobs": None}
WHOLE = {"model": "m", "usage": USAGE, "choices": [CHOICE]}


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call(index: int, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}


CHUNKS: list[dict[str, Any]] = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "h"}),
    chunk({"reasoning": "m"}),
    chunk({"content": "te"}),
    chunk({"content": "xt"}),
    chunk(call(0, id="c1", function={"name": "add", "arguments": ""})),
    chunk(call(0, function={"arguments": '{"a"'})),
    chunk(call(0, function={"arguments": ": 1}"})),
    chunk(call(1, id="c2", function={"name": "mul", "arguments": "{}"})),
    chunk({}, "tool_calls"),
    {"model": "m", "choices": [], "usage": USAGE},
]


class Streams(Protocol):
    def event(self, chunk: dict[str, Any]) -> bytes: ...

    def end(self) -> bytes: ...


def streamed(translator: Streams) -> list[dict[str, Any]]:
    body = b"".join(translator.event(each) for each in CHUNKS) + translator.end()
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]


def test_a_message_has_a_block_for_each_kind() -> None:
    whole = json.loads(MessagesTranslator("msg_1").whole(WHOLE))
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": whole["content"][0]["signature"]},
        {"type": "text", "text": "text"},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "mul", "input": {}},
    ]
    assert whole["content"][0]["signature"]
    assert whole["stop_reason"] == "tool_use"
    counts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    assert [whole["usage"][name] for name in counts] == [3, 2, 4, 5]


def test_streamed_blocks_add_up_to_the_whole_message() -> None:
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in streamed(MessagesTranslator("msg_1")):
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                is_open = True
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                delta = event["delta"]
                for name in ("text", "thinking"):
                    if name in delta:
                        blocks[-1][name] += delta[name]
                blocks[-1]["json"] += delta.get("partial_json", "")
                blocks[-1] |= {name: delta[name] for name in ("signature",) if name in delta}
            case "content_block_stop":
                is_open = False
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    assert blocks == json.loads(MessagesTranslator("msg_1").whole(WHOLE))["content"]


def test_streamed_items_add_up_to_the_whole_response() -> None:
    kept: list[tuple[bytes, dict[str, Any]]] = []
    whole = json.loads(ResponsesTranslator("resp_1", {}, lambda *each: kept.append(each), lambda: 7).whole(WHOLE))
    events = streamed(ResponsesTranslator("resp_1", {}, lambda *each: kept.append(each), lambda: 7))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    assert whole["output"][0].pop("status") is None, "as vLLM says it"
    assert events[-1]["response"]["output"][0].pop("status") == "completed"
    assert events[-1]["response"] == whole
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done.pop(0) == whole["output"][0] | {"status": "completed"}
    assert done == whole["output"][1:]
    parts = [(event["part"]["type"], event["type"].split(".")[-1]) for event in events if "part" in event]
    kinds = ("reasoning_text", "output_text")
    assert parts == [(kind, when) for kind in kinds for when in ("added", "done")]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert [json.loads(body)["usage"] for body, _ in kept] == [whole["usage"]] * 2
    assert kept[0][1] == kept[1][1] == {"role": "assistant", "content": "text", "tool_calls": CALLS}


def stopped(finish: str, stop: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    """A completion of this end."""
    message = {"content": "text", "role": "assistant", "tool_calls": list(calls)}
    return {**WHOLE, "choices": [{**CHOICE, "message": message, "finish_reason": finish, "stop_reason": stop}]}


@pytest.mark.parametrize(
    ("completion", "reason", "found"),
    [
        (stopped("stop", None), "end_turn", None),
        (stopped("stop", "END"), "stop_sequence", "END"),
        (stopped("length", None), "max_tokens", None),
        (stopped("tool_calls", None, *CALLS), "tool_use", None),
        (stopped("stop", None, *CALLS), "tool_use", None),
        (stopped("tool_calls", "END", *CALLS), "tool_use", None),
        (
            stopped("tool_calls", "END", {**CALLS[0], "function": {"name": "add", "arguments": '{"a'}}),
            "stop_sequence",
            "END",
        ),
        (stopped("length", None, *CALLS), "max_tokens", None),
    ],
)
def test_a_message_says_why_it_ends(completion: dict[str, Any], reason: str, found: str | None) -> None:
    whole = json.loads(MessagesTranslator("msg_1").whole(completion))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, found)
    (choice,) = completion["choices"]
    translator = MessagesTranslator("msg_1")
    for index, each in enumerate(choice["message"]["tool_calls"]):
        translator.event(chunk(call(index, id=each["id"], function=each["function"])))
    last = chunk({}, choice["finish_reason"])
    last["choices"][0]["stop_reason"] = choice["stop_reason"]
    translator.event(last)
    delta = json.loads(translator.end().decode().split("event: message_delta\ndata: ")[1].splitlines()[0])["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": found}


def test_what_is_said_amid_a_call_stands_behind_it() -> None:
    translator = MessagesTranslator("msg_1")
    body = b"".join(
        translator.event(each)
        for each in (
            chunk(call(0, id="c1", function={"name": "add", "arguments": '{"a"'})),
            chunk({"content": "amid"}),
            chunk(call(0, function={"arguments": ": 1}"})),
            chunk(call(1, id="c2", function={"name": "mul", "arguments": "{}"})),
        )
    )
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]
    blocks = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert blocks == ["tool_use", "text", "tool_use"]
    arguments = [event["delta"].get("partial_json") for event in events if event["type"] == "content_block_delta"]
    assert arguments == ['{"a"', ": 1}", None, "{}"], "the call's arguments are not torn apart"


def test_a_streamed_message_counts_its_prompt_at_once() -> None:
    first = {**CHUNKS[0], "usage": {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9}}
    begun = json.loads(MessagesTranslator("msg_1").event(first).decode().split("data: ")[1].splitlines()[0])
    assert begun["type"] == "message_start"
    assert begun["message"]["usage"]["input_tokens"] == 9


LOGPROB = {"token": "te", "logprob": -0.5, "bytes": [116, 101], "top_logprobs": []}


def test_logprobs_of_a_response_stand_with_its_text() -> None:
    told = {**CHOICE, "message": {"content": "te", "role": "assistant"}, "logprobs": {"content": [LOGPROB]}}
    whole = json.loads(
        ResponsesTranslator("resp_1", {}, lambda *_: None, lambda: 7).whole({**WHOLE, "choices": [told]})
    )
    assert whole["output"][0]["content"][0]["logprobs"] == [LOGPROB]
    translator = ResponsesTranslator("resp_1", {}, lambda *_: None, lambda: 7)
    piece = chunk({"content": "te"})
    piece["choices"][0]["logprobs"] = {"content": [LOGPROB]}
    events = (translator.event(piece) + translator.end()).decode()
    (delta,) = [json.loads(line[6:]) for line in events.splitlines() if '"response.output_text.delta"' in line[6:]]
    assert delta["logprobs"] == [{"token": "te", "logprob": -0.5, "top_logprobs": []}]
    last = json.loads(events.splitlines()[-2][6:])
    assert last["response"]["output"] == whole["output"][:1] or last["response"]["output"][0]["content"][0]["logprobs"]


def test_a_response_tells_its_prompt_and_answer_as_tokens() -> None:
    told = {**CHOICE, "message": {"content": "te", "role": "assistant"}, "token_ids": [7]}
    answered = {**WHOLE, "choices": [told], "prompt_text": "<s>q", "prompt_token_ids": [1, 2]}
    whole = json.loads(ResponsesTranslator("resp_1", {}, lambda *_: None, lambda: 7).whole(answered))
    assert whole["input_messages"] == [{"message": "<s>q", "tokens": [1, 2], "type": "raw_message_tokens"}]
    assert whole["output_messages"] == [{"message": "te", "tokens": [7], "type": "raw_message_tokens"}]


def test_a_failure_is_told_in_each_ones_form() -> None:
    error = {"message": "gone", "type": "server_error", "code": "worker_lost"}
    responses = ResponsesTranslator("resp_1", {}, lambda *_: None, lambda: 7)
    responses.event(CHUNKS[0])
    failed = responses.failed(error, streamed=True)
    assert b"event: response.failed" in failed
    assert b"gone" in failed
    assert json.loads(responses.failed(error, streamed=False)) == {"error": error}
    assert b'"type":"api_error","message":"gone"' in MessagesTranslator("msg_1").failed(error, streamed=True)


def test_tools_and_their_results_become_the_same_chat_messages() -> None:
    message = {
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3"}]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    items = [
        {"role": "user", "content": "q"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]
    response = {
        "input": items,
        "max_output_tokens": 5,
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    first = messages_schema.chat_body(msgspec.convert(message, MessagesRequest))
    request = msgspec.convert(response, ResponsesRequest)
    second = responses_schema.chat_body(request, responses_schema.new_messages(request))
    assert first == second
    assert [each["role"] for each in first["messages"]] == ["user", "assistant", "tool"]
    assert first["tool_choice"] == "required"
