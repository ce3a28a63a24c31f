"""Anthropic's Messages: parameters, blocks and what is counted."""

from typing import Any

from tests.conformance.case import MESSAGES, Case
from tests.conformance.chat_cases import ADD, SUM
from tests.conformance.other_cases import ASKED, PRIOR, of_model

COUNT = "/v1/messages/count_tokens"
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": SUM}
OTHER_TOOL = {"name": "wait", "input_schema": {"properties": {}}, "defer_loading": True}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=00a1;"}
BRIEF = {"type": "text", "text": "Be brief."}
CALL = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"sum": 7, "why": "größer"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
WAIT = {"type": "tool_reference", "name": "wait"}


def message(name: str, served: str = "demo-large", **fields: Any) -> Case:
    """A greedy message of a few tokens; a field that is `...` is left out."""
    body = {"model": served, "messages": ADD, "max_tokens": 12, "temperature": 0} | fields
    return Case(
        f"messages: {name}", MESSAGES, {key: value for key, value in body.items() if value is not ...}, served=served
    )


def blocks(name: str, *content: dict[str, Any], role: str = "user", **fields: Any) -> Case:
    """A turn of these blocks between what is asked first and last."""
    return message(f"blocks, {name}", messages=[ADD[0], {"role": role, "content": list(content)}, ADD[0]], **fields)


def result(name: str, content: Any, **fields: Any) -> Case:
    """A tool's result."""
    return blocks(f"result of {name}", {"type": "tool_result", "tool_use_id": "call_1", "content": content}, **fields)


def system_amid(name: str, *content: dict[str, Any], served: str = "demo-large", **fields: Any) -> Case:
    """What the system says between two turns."""
    turns = [ADD[0], {"role": "system", "content": list(content)}, ADD[0]]
    return message(f"a system amid, {name}", served, messages=turns, system="Hello.", **fields)


CASES = [
    message("plain"),
    message("plain, streamed", stream=True),
    message("to the end", max_tokens=60, messages=[{"role": "user", "content": "Add 1 and 2."}]),
    message("to the end, streamed", max_tokens=60, stream=True, messages=[{"role": "user", "content": "Add 1 and 2."}]),
    message("model missing", model=...),
    message("model unknown", model="nobody"),
    message("max_tokens missing", max_tokens=...),
    message("max_tokens 0", max_tokens=0),
    message("messages empty", messages=[]),
    message("turns", messages=PRIOR),
    message("parts", messages=[{"role": "user", "content": [{"type": "text", "text": ASKED}]}]),
    message(
        "cache_control",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": ASKED, "cache_control": {"type": "ephemeral"}}]}
        ],
    ),
    message("system", system="Be brief."),
    message("system of parts", system=[{"type": "text", "text": "Be brief."}]),
    message("a system's message", messages=[{"role": "system", "content": "Be brief."}, *ADD]),
    message("stop_sequences", stop_sequences=["9"]),
    message("stop_sequences, streamed", stop_sequences=["9"], stream=True),
    message("top_k", top_k=1),
    message("top_p", top_p=0.5),
    message("metadata", metadata={"user_id": "ann"}),
    message("tools", tools=[ANTHROPIC_TOOL]),
    message("tools any", tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=60),
    message("tools any, streamed", tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=60, stream=True),
    message("tools named", tools=[ANTHROPIC_TOOL], tool_choice={"type": "tool", "name": "add"}, max_tokens=60),
    message("tools none", tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"}),
    message("tool_choice without a name", tools=[ANTHROPIC_TOOL], tool_choice={"type": "tool"}),
    message(
        "a tool's result",
        tools=[ANTHROPIC_TOOL],
        messages=[
            {"role": "user", "content": ASKED},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call_1", "name": "add", "input": {"sum": 7}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "7"}]},
        ],
    ),
    message("thinking disabled", thinking={"type": "disabled"}),
    message("thinking enabled", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048),
    message("thinking adaptive", thinking={"type": "adaptive"}),
    message("output_config effort", output_config={"effort": "low"}),
    message("output_config format", output_config={"format": {"type": "json_schema", "schema": SUM}}),
    message("cache_salt", cache_salt="c2FsdA"),
    message("chat_template_kwargs", chat_template_kwargs={"enable_thinking": False}),
    message("vllm_xargs", vllm_xargs={"a": 1}),
    message("kv_transfer_params", kv_transfer_params={}),
    message("watermarking", watermarking=False),
    message("unknown parameter", mood="good"),
    message(
        "an earlier thought",
        messages=[
            ADD[0],
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "x", "signature": "y"}, {"type": "text", "text": "1"}],
            },
            ADD[0],
        ],
    ),
    of_model("messages", "count_tokens", "/v1/messages/count_tokens", messages=ADD),
    of_model("messages", "count_tokens of tools", "/v1/messages/count_tokens", messages=ADD, tools=[ANTHROPIC_TOOL]),
    of_model("messages", "count_tokens of nothing", "/v1/messages/count_tokens"),
    message("system of several parts", system=[BRIEF, {"type": "text", "text": ""}, BRIEF]),
    message("system with a billing header", system=[BILLING, BRIEF]),
    message("system of a billing header", system=[BILLING]),
    message("system of an image", system=[IMAGE]),
    message("system of an unknown block", system=[{"type": "telepathy"}]),
    system_amid("plain", BRIEF),
    system_amid("a billing header", BILLING),
    system_amid("nothing"),
    system_amid("written by vLLM", BRIEF, served="written"),
    system_amid("a tool added", {"type": "tool_addition", "tool": WAIT}, tools=[ANTHROPIC_TOOL, OTHER_TOOL]),
    system_amid("a tool taken away", {"type": "tool_removal", "tool": WAIT}, tools=[ANTHROPIC_TOOL, OTHER_TOOL]),
    system_amid("a tool that nobody knows", {"type": "tool_addition", "tool": WAIT}, tools=[ANTHROPIC_TOOL]),
    system_amid(
        "a tool of its own",
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": OTHER_TOOL}},
        tools=[ANTHROPIC_TOOL],
    ),
    blocks("several texts", BRIEF, {"type": "text", "text": ""}, BRIEF),
    blocks("an empty text", {"type": "text", "text": ""}),
    blocks("none"),
    blocks("none of the assistant", role="assistant"),
    blocks("thoughts", {"type": "thinking", "thinking": "x"}, {"type": "thinking", "thinking": "y"}, role="assistant"),
    blocks("a redacted thought", {"type": "redacted_thinking", "data": "x"}, role="assistant"),
    blocks("calls", BRIEF, CALL, CALL, role="assistant"),
    blocks("a call without arguments", {"type": "tool_use", "id": "call_1", "name": "add"}, role="assistant"),
    blocks("a tool_reference", {"type": "tool_reference", "tool_name": "add"}),
    blocks("an image", IMAGE),
    blocks("a document", {"type": "document", "source": {"type": "text", "data": "x"}}),
    blocks("a result of the assistant", {"type": "tool_result", "content": "7"}, role="assistant"),
    blocks("a tool_addition of the user", {"type": "tool_addition", "tool": WAIT}),
    result("texts", [BRIEF, BRIEF]),
    result("nothing", None),
    result("an unknown item", [{"type": "search_result", "title": "x"}, BRIEF]),
    result("a tool_reference", [BRIEF, {"type": "tool_reference", "tool_name": "add"}]),
    result("no items", [5]),
    message("tools that wait", tools=[OTHER_TOOL]),
    message("tools without a schema", tools=[{"name": "add"}]),
    message("tool_choice auto, no tools", tool_choice={"type": "auto"}),
    message("tools any, but none", tool_choice={"type": "any"}),
    message("tools any, an empty list", tool_choice={"type": "any"}, tools=[]),
    message("tools named, but none", tool_choice={"type": "tool", "name": "add"}),
    message("thinking disabled, with a budget", thinking={"type": "disabled", "budget_tokens": 5}),
    message("thinking enabled, no budget", thinking={"type": "enabled"}),
    message("thinking beyond the answer", thinking={"type": "enabled", "budget_tokens": 1024}),
    message("output_config empty schema", output_config={"format": {"type": "json_schema", "schema": {}}}),
    of_model(
        "messages", "count_tokens of a system amid", COUNT, messages=[*ADD, {"role": "system", "content": [BRIEF]}]
    ),
    of_model("messages", "count_tokens, output_config", COUNT, messages=ADD, output_config={"effort": "low"}),
    of_model("messages", "count_tokens, chat_template_kwargs", COUNT, messages=ADD, chat_template_kwargs={"a": 1}),
]
