"""OpenAI's Responses against vLLM's own reading of them: the chat that each is, and the events of its answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.answers.responses import ResponsesTranslator
from services.frontend.answers.sse import encode
from services.frontend.errors import ApiError
from services.frontend.http.body import decode_leniently
from services.frontend.requests.responses_schema import ResponsesRequest, chat_body, new_messages
from tests.examples import examples

pytestmark = pytest.mark.vllm

TEXTS = st.sampled_from(["", "Hi", " there\n", "größer"])
NAMES = st.sampled_from(["f", "g"])
IDS = st.sampled_from(["a", "b"])
ARGUMENTS = st.sampled_from(["{}", '{"a": 1}', '{"input": "x"}'])
STATUSES = st.sampled_from(["completed", "in_progress", "incomplete"])
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("input_text"), "text": TEXTS}), min_size=1, max_size=3)
SAID = st.tuples(st.fixed_dictionaries({"type": st.just("output_text"), "text": TEXTS})).map(list)
THOUGHT = st.tuples(st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": TEXTS})).map(list)
SUMMARY = st.lists(st.fixed_dictionaries({"type": st.just("summary_text"), "text": TEXTS}), max_size=2)
ITEMS = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "developer"]), "content": TEXTS | PARTS}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS}, optional={"type": st.just("message")}),
    st.fixed_dictionaries(
        {"type": st.just("message"), "role": st.just("assistant"), "content": SAID}, optional={"status": STATUSES}
    ),
    st.fixed_dictionaries(
        {"type": st.just("reasoning"), "summary": SUMMARY},
        optional={"content": THOUGHT, "status": STATUSES, "encrypted_content": st.sampled_from([None, "x"])},
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call"), "call_id": IDS, "name": NAMES, "arguments": ARGUMENTS},
        optional={"namespace": st.just("n"), "id": st.just("fc_1")},
    ),
    st.fixed_dictionaries({"type": st.just("custom_tool_call"), "call_id": IDS, "name": NAMES, "input": TEXTS}),
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["function_call_output", "custom_tool_call_output"]),
            "call_id": IDS,
            "output": TEXTS | PARTS,
        }
    ),
)
SCHEMAS = st.sampled_from([{"type": "object", "properties": {}}, {"properties": {"a": {"type": "integer"}}}])
FUNCTIONS = st.fixed_dictionaries(
    {"type": st.just("function"), "name": NAMES, "parameters": SCHEMAS, "strict": st.sampled_from([None, True, False])},
    optional={"description": st.sampled_from(["", "Adds."])},
)
CUSTOM = st.fixed_dictionaries(
    {"type": st.just("custom"), "name": st.just("c")},
    optional={
        "description": st.just("Any text."),
        "format": st.sampled_from(
            [{"type": "text"}, {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}]
        ),
    },
)
NAMESPACES = st.fixed_dictionaries(
    {
        "type": st.just("namespace"),
        "name": st.sampled_from(["n", "m"]),
        "description": st.just("Some."),
        "tools": st.lists(FUNCTIONS, min_size=1, max_size=2, unique_by=lambda tool: tool["name"]),
    }
)
TOOLS = st.lists(
    FUNCTIONS | CUSTOM | NAMESPACES | st.just({"type": "web_search"}),
    min_size=1,
    max_size=3,
    unique_by=lambda tool: tool.get("name", ""),
)
CHOICES = st.one_of(
    st.sampled_from(["auto", "none", "required"]),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function", "custom"]), "name": st.sampled_from(["f", "g", "c", "n__f", "n__h"])}
    ),
)


def ours(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The chat; None: it is refused."""
    try:
        request, _ = decode_leniently(encode(dict(body)), ResponsesRequest)
        return chat_body(request, new_messages(request))
    except ApiError as error:
        if error.status != 400:
            raise
        return None


def vllm(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same of its own reading."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest as Request
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
    from vllm.exceptions import VLLMValidationError

    try:
        request = Request.model_validate(json.loads(json.dumps(body)))
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        told = request.build_chat_params(None, "auto").chat_template_kwargs
    except (ValueError, VLLMValidationError):
        return None
    choice: Any = request.tool_choice
    return {
        "messages": messages,
        "tools": construct_tool_dicts(request.tools, request.tool_choice),
        "tool_choice": choice if isinstance(choice, str) else {"function": {"name": choice.name}},
        "continue_final_message": told["continue_final_message"],
    }


def spoken(message: Mapping[str, Any]) -> dict[str, Any]:
    """What of a message the prompt is made of."""
    content = message.get("content")
    calls = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return {
        "role": message["role"],
        "content": content if content is None or isinstance(content, str) else [part["text"] for part in content],
        "reasoning": message.get("reasoning"),
        "calls": calls,
        "answers": message.get("tool_call_id"),
    }


def told(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function without what it does not say."""
    return {name: value for name, value in tool["function"].items() if value is not None}


@settings(max_examples=examples(200, thorough=8000), deadline=None)
@given(st.lists(ITEMS, min_size=1, max_size=6), st.fixed_dictionaries({}, optional={"instructions": TEXTS}))
def test_an_input_is_the_chat_that_it_is_to_vllm(items: list[dict[str, Any]], fields: dict[str, Any]) -> None:
    body = {"model": "m", "input": items, **fields}
    chat, stock = ours(body), vllm(body)
    assert (chat is None) == (stock is None)
    if chat is not None and stock is not None:
        assert [spoken(message) for message in chat["messages"]] == [spoken(each) for each in stock["messages"]]
        assert chat.get("continue_final_message", False) == stock["continue_final_message"]


@settings(max_examples=examples(200, thorough=8000), deadline=None)
@given(TOOLS, st.none() | CHOICES)
def test_tools_are_those_that_vllm_tells_the_model(tools: list[dict[str, Any]], choice: Any) -> None:
    body = {"model": "m", "input": "Hi", "tools": tools, **({} if choice is None else {"tool_choice": choice})}
    chat, stock = ours(body), vllm(body)
    assert (chat is None) == (stock is None), (chat, stock)
    if chat is not None and stock is not None:
        assert [told(tool) for tool in chat.get("tools", ())] == [told(tool) for tool in stock["tools"] or ()]
        named = chat.get("tool_choice", "auto")
        assert (named if isinstance(named, str) else {"function": named["function"]}) == stock["tool_choice"]


PAYLOADS = st.sampled_from(
    [
        '{"input": "*** Begin\\n+größer \\"a\\"\\u00e9\\ud83d\\ude42\\\\"}',
        '{"input":"x"}',
        '{ "input" : "" }',
        '{"input": 5}',
        '{"other": "x"}',
        '{"input": "cut sho',
        "no JSON",
        '{"input": "a", "more": 1}',
        '{"a": 1}',
        "",
    ]
)
CALLS = st.tuples(st.sampled_from(["f", "c", "n__g", "unknown"]), PAYLOADS, st.integers(1, 7))
DELTAS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"content": st.sampled_from(["a", "b"])}),
        st.fixed_dictionaries({"reasoning": st.sampled_from(["h", "m"])}),
        CALLS,
    ),
    max_size=5,
)
ABOUT = ("response.created", "response.in_progress", "response.completed")
"""Events that have the whole response."""
KNOWN: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "parameters": {}, "strict": None},
    {"type": "custom", "name": "c"},
    {"type": "namespace", "name": "n", "description": "", "tools": [{"type": "function", "name": "g"}]},
]


def chunks_of(deltas: Sequence[Any]) -> list[dict[str, Any]]:
    """The deltas of a streamed chat completion; of a call, its arguments come so many characters at once."""
    chunks: list[dict[str, Any]] = []
    calls = 0
    for delta in deltas:
        if isinstance(delta, dict):
            chunks.append(delta)
            continue
        name, arguments, step = delta
        function = {"name": name, "arguments": ""}
        chunks.append({"tool_calls": [{"index": calls, "id": f"c{calls}", "type": "function", "function": function}]})
        pieces = [arguments[place : place + step] for place in range(0, len(arguments), step)]
        chunks += [{"tool_calls": [{"index": calls, "function": {"arguments": piece}}]} for piece in pieces]
        calls += 1
    return chunks


def translated(chunks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    translator = ResponsesTranslator("resp_1", {"tools": KNOWN}, lambda *_: None, lambda: 9)
    body = b""
    for chunk in chunks:
        choice = {"index": 0, "delta": chunk, "finish_reason": None}
        body += translator.event({"model": "m", "choices": [choice]})
    body += translator.end()
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]
    return [event for event in events if event["type"] not in ABOUT]


def vllm_events(chunks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    from openai.types.responses.tool import Tool
    from pydantic import TypeAdapter
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, _StateType

    processor = SimpleStreamingEventProcessor(tools=TypeAdapter(list[Tool]).validate_python(KNOWN))
    events: list[Any] = []
    for chunk in chunks:
        delta = DeltaMessage.model_validate(chunk)
        state, call = processor.resolve_target_state(delta)
        if state == _StateType.NONE:
            continue
        if processor.needs_transition(state, call):
            events += processor.close_current()
            events += processor.open(state, call)
        events += processor.emit_delta(delta, None)  # type: ignore[arg-type]
    events += processor.close_current()
    return [event.model_dump(mode="json", by_alias=True) for event in events]


def joined(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With deltas that follow each other as one: where a text is cut is a matter of time."""
    told: list[dict[str, Any]] = []
    for event in events:
        if told and "delta" in event and told[-1]["type"] == event["type"]:
            told[-1] |= {"delta": told[-1]["delta"] + event["delta"]}
        else:
            told.append(dict(event))
    return told


def comparable(value: Any) -> Any:
    """Without ids, numbers and what is null or empty."""
    if isinstance(value, dict):
        return {
            name: comparable(each)
            for name, each in value.items()
            if name not in ("id", "item_id", "sequence_number") and each is not None and each != []
        }
    return [comparable(each) for each in value] if isinstance(value, list) else value


@settings(max_examples=examples(200, thorough=8000), deadline=None)
@given(DELTAS)
def test_an_answer_is_streamed_as_by_vllm(deltas: list[Any]) -> None:
    chunks = chunks_of(deltas)
    assert comparable(joined(translated(chunks))) == comparable(joined(vllm_events(chunks)))
