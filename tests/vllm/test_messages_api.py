"""Anthropic's Messages against vLLM's own reading of them: the chat that each is, and the events of its answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.frontend.answers.messages import MessagesTranslator
from services.frontend.answers.sse import encode
from services.frontend.errors import ApiError
from services.frontend.http.body import decode_leniently
from services.frontend.requests.messages_schema import CountTokensRequest, MessagesRequest, TemplateFacts, chat_body
from services.frontend.text.chat_template import ChatTemplate
from tests.examples import examples

pytestmark = pytest.mark.vllm

TEXTS = st.sampled_from(["", "Hi", " there\n", "größer", "x-anthropic-billing-header: cc=1"])
NAMES = st.sampled_from(["f", "g"])
SOURCES = st.sampled_from(
    [
        {"type": "base64", "media_type": "image/png", "data": "aGk="},
        {"type": "base64", "data": "aGk="},
        {"data": "aGk="},
        {"type": "url", "url": "https://example.org/a.png"},
    ]
)
ITEMS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.just("text")}, optional={"text": TEXTS}),
        st.fixed_dictionaries({"type": st.just("image"), "source": SOURCES}),
        st.fixed_dictionaries({"type": st.just("tool_reference")}, optional={"tool_name": NAMES, "name": NAMES}),
        st.just({"type": "search_result", "title": "A"}),
    ),
    max_size=3,
)


def block(kind: str, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=optional)


TOOLS = st.fixed_dictionaries(
    {"name": NAMES, "input_schema": st.sampled_from([{"type": "object"}, {"properties": {"a": {"type": "integer"}}}])},
    optional={
        "description": st.sampled_from(["", "Adds."]),
        "strict": st.booleans(),
        "defer_loading": st.booleans(),
        "type": st.just("custom"),
        "cache_control": st.just({"type": "ephemeral"}),
    },
)
REFERENCES = st.fixed_dictionaries({"type": st.just("tool_reference"), "name": NAMES})
DEFINITIONS = st.fixed_dictionaries({"type": st.just("tool_definition"), "definition": TOOLS})
TOOL_CHANGES = st.one_of(
    st.fixed_dictionaries({"type": st.just("tool_addition"), "tool": REFERENCES | DEFINITIONS}),
    st.fixed_dictionaries({"type": st.just("tool_removal"), "tool": REFERENCES}),
)
BLOCKS = st.one_of(
    block("text", text=TEXTS, cache_control=st.just({"type": "ephemeral"})),
    block("image", source=SOURCES),
    block("thinking", thinking=TEXTS, signature=st.just("x")),
    block("redacted_thinking", data=st.just("x")),
    st.fixed_dictionaries(
        {"type": st.just("tool_use"), "id": st.sampled_from(["a", "b"])},
        optional={"name": NAMES, "input": st.sampled_from([{}, {"a": 1, "größe": "é"}])},
    ),
    block("tool_result", tool_use_id=st.sampled_from(["a", "b"]), content=TEXTS | ITEMS, is_error=st.booleans()),
    block("tool_reference", tool_name=NAMES),
)
ODD_BLOCKS = st.sampled_from(
    [
        {"type": "document"},
        {"type": "tool_addition"},
        {"type": "tool_removal", "tool": {"type": "tool_definition", "definition": {"name": "f", "input_schema": {}}}},
        {"type": "tool_use", "id": "a", "name": "f", "input": "no object"},
        {"type": "thinking", "thinking": 5},
    ]
)
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant"]),
            "content": TEXTS | st.lists(BLOCKS, max_size=4) | st.lists(BLOCKS | TOOL_CHANGES | ODD_BLOCKS, max_size=2),
        }
    ),
    st.fixed_dictionaries(
        {"role": st.just("system"), "content": TEXTS | st.lists(BLOCKS | TOOL_CHANGES | ODD_BLOCKS, max_size=3)}
    ),
)
CHOICES = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["auto", "any", "none"])}, optional={"disable_parallel_tool_use": st.booleans()}
    ),
    st.just({"type": "tool", "name": "f"}),
    st.just({"type": "tool"}),
)
THINKING = st.sampled_from(
    [
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        {"type": "enabled"},
        {"type": "disabled"},
        {"type": "disabled", "budget_tokens": 5},
        {"type": "adaptive"},
    ]
)
OUTPUT_CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "effort": st.sampled_from(["low", "xhigh"]),
        "format": st.sampled_from(
            [{"type": "json_schema", "schema": {"type": "object"}}, {"type": "json_schema"}, {"schema": {}}]
        ),
    },
)
SHARED = {
    "system": TEXTS | st.lists(BLOCKS | ODD_BLOCKS, max_size=3),
    "tools": st.lists(TOOLS, min_size=1, max_size=2, unique_by=lambda tool: tool["name"]),
    "tool_choice": CHOICES,
    "thinking": THINKING,
    "output_config": OUTPUT_CONFIGS,
    "chat_template_kwargs": st.just({"a": 1}),
}
SAMPLING = {
    "temperature": st.sampled_from([0.0, 0.5]),
    "top_p": st.just(0.5),
    "top_k": st.sampled_from([0, 3]),
    "stop_sequences": st.sampled_from([[], ["9"]]),
    "stream": st.booleans(),
    "metadata": st.just({"user_id": "ann"}),
    "cache_salt": st.just("c2FsdA"),
    "watermarking": st.booleans(),
    "vllm_xargs": st.just({"a": 1}),
}


def ours(body: Mapping[str, Any], kind: type[CountTokensRequest], facts: TemplateFacts) -> dict[str, Any] | None:
    """None: it is refused."""
    try:
        request, _ = decode_leniently(encode(dict(body)), kind)
        return chat_body(request, facts)
    except ApiError as error:
        if error.status != 400:
            raise
        return None


def vllm(body: Mapping[str, Any], name: str, facts: TemplateFacts) -> Any:
    """None: it is refused."""
    from vllm.entrypoints.anthropic import protocol
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    try:
        return AnthropicServingMessages.to_chat_completion_request(
            getattr(protocol, name).model_validate(body),
            merge_inline_system=facts.wants_system_first,
            disabled_thinking_effort=facts.effort_without_thinking,  # type: ignore[arg-type]
        )
    except ValueError:
        return None


def comparable(chat: Any) -> dict[str, Any]:
    """What a chat asks for, in vLLM's own terms."""
    fields: dict[str, Any] = chat.model_dump(exclude={"request_id", "max_completion_tokens", "metadata"})
    fields["stop"] = fields["stop"] or None
    if not fields["tools"]:  # vLLM keeps an empty list, which it reads as none, and a choice among nothing
        fields |= {"tools": None, "tool_choice": "none", "parallel_tool_calls": True}
    return fields


def is_unfit(choice: Mapping[str, Any] | None, tools: Any) -> bool:
    """Whether it makes sure of a call that nobody has a tool for."""
    names = [tool.function.name for tool in tools or ()]
    return choice is not None and (
        (choice["type"] == "any" and not names) or (choice["type"] == "tool" and choice.get("name") not in names)
    )


def same_chats(body: Mapping[str, Any], facts: TemplateFacts, kind: type[CountTokensRequest], name: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    chat, stock = ours(body, kind, facts), vllm(body, name, facts)
    if stock is not None and is_unfit(body.get("tool_choice"), stock.tools):
        return  # the chat is refused here, as one with such a choice is by vLLM
    assert (chat is None) == (stock is None), chat
    if chat is not None:
        if kind is CountTokensRequest:
            stock.thinking_token_budget = None  # changes no prompt
        assert comparable(ChatCompletionRequest.model_validate(chat)) == comparable(stock)


FACTS = st.builds(TemplateFacts, st.sampled_from(["none", "low"]), wants_system_first=st.booleans())


@settings(max_examples=examples(200, thorough=8000), deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=4), st.fixed_dictionaries({}, optional=SHARED | SAMPLING), FACTS)
def test_a_message_is_the_chat_that_it_is_to_vllm(
    messages: list[dict[str, Any]], fields: dict[str, Any], facts: TemplateFacts
) -> None:
    body = {"model": "m", "max_tokens": 2000, "messages": messages, **fields}
    same_chats(body, facts, MessagesRequest, "AnthropicMessagesRequest")


@settings(max_examples=examples(100, thorough=4000), deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=3), st.fixed_dictionaries({}, optional=SHARED), FACTS)
def test_what_is_counted_is_the_chat_that_it_is_to_vllm(
    messages: list[dict[str, Any]], fields: dict[str, Any], facts: TemplateFacts
) -> None:
    same_chats({"model": "m", "messages": messages, **fields}, facts, CountTokensRequest, "AnthropicCountTokensRequest")


def test_a_budget_is_less_than_the_answer_may_have() -> None:
    body = {
        "model": "m",
        "max_tokens": 1024,
        "messages": [{"role": "user", "content": "Hi"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    assert ours(body, MessagesRequest, TemplateFacts()) is None
    assert vllm(body, "AnthropicMessagesRequest", TemplateFacts()) is None


@pytest.mark.parametrize(
    ("template", "wants_system_first"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", False),
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", False),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{{ m.content }}{% endfor %}",
            True,
        ),
        ("{{ bos_token + 'x' }}{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", True),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_what_takes_a_system_amid_the_turns_is_found_as_by_vllm(template: str, wants_system_first: bool) -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    assert ChatTemplate(template, {}, lambda: 0.0).wants_system_first is wants_system_first
    assert AnthropicServingMessages._detect_merge_inline_system(template) is wants_system_first


ARGUMENTS = st.sampled_from(['{"a": 1}', "{}", '{"a"'])
DELTAS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"content": st.sampled_from(["", "a", "b"])}),
        st.fixed_dictionaries({"reasoning": st.sampled_from(["", "h", "m"])}),
        st.fixed_dictionaries({"new": NAMES, "arguments": st.just("") | ARGUMENTS}),
        st.fixed_dictionaries({"more": ARGUMENTS}),
    ),
    max_size=6,
)
ENDS = st.tuples(st.sampled_from(["stop", "length", "tool_calls"]), st.sampled_from([None, "END", 7]))
USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 4}}


def chunks_of(deltas: Sequence[Mapping[str, Any]], finish: str, stop: int | str | None) -> list[dict[str, Any]]:
    """A streamed chat completion."""
    told: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    calls = 0
    for delta in deltas:
        if "new" in delta:
            function = {"name": delta["new"], "arguments": delta["arguments"]}
            told.append({"tool_calls": [{"index": calls, "id": f"c{calls}", "type": "function", "function": function}]})
            calls += 1
        elif "more" not in delta:
            told.append(dict(delta))
        elif calls:
            told.append({"tool_calls": [{"index": calls - 1, "function": {"arguments": delta["more"]}}]})
    told.append({})
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in told]
    choices[-1] |= {"finish_reason": finish, "stop_reason": stop}
    shared = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return [*({**shared, "choices": [each]} for each in choices), {**shared, "choices": [], "usage": USAGE}]


def events_in(body: str) -> list[dict[str, Any]]:
    """Without what differs on purpose: signatures, and what Anthropic says besides."""
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
    for event in events:
        event.pop("message", None)
        event.pop("usage", None)
        if "signature" in event.get("delta", ()):
            event["delta"]["signature"] = "x"
    return events


async def vllm_events(chunks: Sequence[Mapping[str, Any]]) -> str:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    async def lines() -> AsyncIterator[str]:
        for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    converter = AnthropicServingMessages.message_stream_converter
    return "".join([event async for event in converter(None, lines())])  # type: ignore[arg-type]


@settings(max_examples=examples(200, thorough=8000), deadline=None)
@given(DELTAS, ENDS)
def test_an_answer_is_streamed_as_by_vllm(deltas: list[dict[str, Any]], end: tuple[str, int | str | None]) -> None:
    chunks = chunks_of(deltas, *end)
    assume(any(delta.get("content") or delta.get("reasoning") or "new" in delta for delta in deltas))
    translator = MessagesTranslator("x")
    body = b"".join(map(translator.event, chunks)) + translator.end()
    assert events_in(body.decode()) == events_in(asyncio.run(vllm_events(chunks)))
