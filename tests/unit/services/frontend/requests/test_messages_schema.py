"""Anthropic's Messages as chats: what a chat template makes of a difference, and what is refused."""

from typing import Any

import msgspec
import pytest

from services.frontend.errors import ApiError
from services.frontend.requests.messages_schema import (
    AnthropicMessage,
    Block,
    MessagesRequest,
    TemplateFacts,
    chat_body,
)

ADD = {"name": "add", "input_schema": {"properties": {}}}
LATER = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
BILLING = "x-anthropic-billing-header: cch=1;"
TALK = [
    {"role": "user", "content": "a"},
    {"role": "system", "content": [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": "b"},
]


PLAIN = TemplateFacts()


def chat(facts: TemplateFacts = PLAIN, **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 2000, "messages": [{"role": "user", "content": "a"}], **fields}
    return chat_body(msgspec.convert(body, MessagesRequest), facts)


def said(*blocks: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    """The chat's messages of one message with these blocks."""
    messages: list[dict[str, Any]] = chat(messages=[{"role": role, "content": list(blocks)}])["messages"]
    return messages


def test_what_the_system_says_is_one_text_without_the_bill() -> None:
    system = [{"type": "text", "text": text} for text in (BILLING, "You are", "", " brief.")]
    assert chat(system=system)["messages"][0] == {"role": "system", "content": "You are brief."}
    assert [each["role"] for each in chat(system=[{"type": "text", "text": BILLING}])["messages"]] == ["user"]


@pytest.mark.parametrize(
    ("wants_system_first", "expected"),
    [
        (False, [("system", "Hello."), ("user", "a"), ("system", "Be brief."), ("user", "b")]),
        (True, [("system", "Hello.Be brief."), ("user", "a"), ("user", "b")]),
    ],
)
def test_a_system_amid_the_turns_stands_where_the_template_takes_it(
    wants_system_first: bool, expected: list[tuple[str, str]]
) -> None:
    messages = chat(TemplateFacts(wants_system_first=wants_system_first), system="Hello.", messages=TALK)["messages"]
    assert [(each["role"], each["content"]) for each in messages] == expected


def test_an_earlier_thought_is_told() -> None:
    blocks = [{"type": "thinking", "thinking": "h"}, {"type": "redacted_thinking", "data": "x"}]
    (turn,) = said(*blocks, {"type": "thinking", "thinking": "m"}, {"type": "text", "text": "1"}, role="assistant")
    assert turn == {"role": "assistant", "reasoning": "hm", "content": "1"}


def test_a_result_brings_its_images_and_the_tools_it_found() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "aGk="}}
    found = {"type": "tool_reference", "tool_name": "add"}
    content = [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}, found]
    messages = said({"type": "text", "text": "And?"}, {"type": "tool_result", "tool_use_id": "c", "content": content})
    url = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,aGk="}}
    assert messages == [
        {"role": "tool", "tool_call_id": "c", "content": "a\nb"},
        {"role": "user", "content": [url]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "tool_reference", "name": "add"}]},
        {"role": "user", "content": "And?"},
    ]


def test_a_system_s_turn_changes_what_may_be_called() -> None:
    def after(*changes: dict[str, Any]) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": "a"}, {"role": "system", "content": list(changes)}]
        tools = chat(messages=messages, tools=[ADD, LATER]).get("tools", [])
        return [tool["function"] for tool in tools]

    later = {"type": "tool_reference", "name": "later"}
    assert after()[1]["defer_loading"] is True
    assert "defer_loading" not in after({"type": "tool_addition", "tool": later})[1]
    new = {"type": "tool_definition", "definition": {"name": "new", "input_schema": {}}}
    assert [each["name"] for each in after({"type": "tool_addition", "tool": new})] == ["add", "later", "new"]
    gone = {"type": "tool_removal", "tool": later}
    assert [each["name"] for each in after(gone)] == ["add"]
    assert [each["name"] for each in after(gone, {"type": "tool_addition", "tool": later})] == ["add", "later"]
    assert after()[0]["parameters"] == {"properties": {}, "type": "object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"system": [{"type": "telepathy"}]}, "system[0]"),
        ({"system": [{"type": "tool_addition"}]}, "system[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_removal"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]},
            "messages[0].content[0].tool",
        ),
        (
            {
                "messages": [
                    {
                        "role": "system",
                        "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "add"}}],
                    }
                ]
            },
            "messages[0].content[0].tool.name",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            "messages[0].content[0].content[0].source",
        ),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ],
)
def test_what_cannot_be_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_call_that_is_nested_too_deeply_is_refused() -> None:
    arguments: dict[str, Any] = {}
    for _ in range(5000):
        arguments = {"a": arguments}
    call = Block(type="tool_use", id="c", name="add", input=arguments)
    request = MessagesRequest(max_tokens=5, messages=[AnthropicMessage(role="assistant", content=[call])])
    with pytest.raises(ApiError, match="nested too deeply"):
        chat_body(request)


def test_a_choice_among_no_tools_says_nothing() -> None:
    assert chat(tool_choice={"type": "auto"}).keys() == {"messages", "max_tokens"}
    assert chat(tool_choice={"type": "any"}).keys() == {"messages", "max_tokens"}, "there is nothing to call"
