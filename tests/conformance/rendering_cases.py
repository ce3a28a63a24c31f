"""Prompts: of what a chat template is not given by every client, and of a model whose prompts only vLLM writes."""

from typing import Any

from tests.conformance.case import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Case
from tests.conformance.chat_cases import NAMED
from tests.conformance.chat_cases import TOOL as ADD_TOOL
from tests.conformance.messages_cases import ANTHROPIC_TOOL
from tests.conformance.other_cases import FLAT_TOOL

COUNT = "Count from 2 up to 12."
ASKED: list[dict[str, Any]] = [{"role": "user", "content": COUNT}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"sum": 7}'}}
TURNS: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": "2, 3", "reasoning": "It counts."},
    {"role": "user", "content": "Go on."},
]
CALLED: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "7"},
]
BILLING = "x-anthropic-billing-header: cc_version=2; cch=00a1;\nBe brief."


def _chat(name: str, messages: list[dict[str, Any]] = ASKED, model: str = "demo-large", **fields: Any) -> Case:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    return Case(f"chat: {name}", CHAT, body, served=model)


def _known(name: str, *parts: dict[str, Any], role: str = "user", **fields: Any) -> Case:
    """With parts between what the user says first and last."""
    return _chat(f"rendering, {name}", [*ASKED, {"role": role, "content": list(parts)}, *ASKED], **fields)


def _written(name: str, messages: list[dict[str, Any]] = ASKED, **fields: Any) -> Case:
    return _chat(f"written by vLLM, {name}", messages, "written", **fields)


def _toolless(name: str, path: str = CHAT, **fields: Any) -> Case:
    """Of a model whose chat template has no place for tools."""
    body: dict[str, Any] = {"model": "toolless", "temperature": 0}
    body |= {"input": COUNT, "max_output_tokens": 12} if path == RESPONSES else {"messages": ASKED, "max_tokens": 12}
    subject = {CHAT: "chat", RESPONSES: "responses"}.get(path, "messages")
    given = {key: value for key, value in {**body, **fields}.items() if value is not ...}
    return Case(f"{subject}: no place for tools, {name}", path, given, served="toolless")


def _other(subject: str, name: str, path: str, **fields: Any) -> Case:
    return Case(f"{subject}: written by vLLM, {name}", path, {"model": "written", **fields}, served="written")


CASES = [
    _known("part refusal", {"type": "refusal", "refusal": "No."}, role="assistant"),
    _known("part input_text", {"type": "input_text", "text": "Hm"}),
    _known("part output_text", {"type": "output_text", "text": "Hm"}, role="assistant"),
    _known("part thinking", {"type": "thinking", "thinking": "Hm"}, role="assistant"),
    _known("part tool_reference", {"type": "tool_reference", "name": "add"}, role="tool", tools=[TOOL]),
    _known("parts without text", {"type": "text", "text": ""}, {"type": "text", "text": ""}),
    _known("part text and others", {"type": "text", "text": "Hm"}, {"type": "input_text", "text": "Hm"}),
    _known("parts none"),
    _chat("rendering, role function", [*ASKED, {"role": "function", "name": "add", "content": "7"}]),
    _chat(
        "rendering, function_call",
        [*ASKED, {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": "{}"}}, *ASKED],
    ),
    _chat("rendering, billing header", [{"role": "system", "content": BILLING}, *ASKED]),
    _chat(
        "rendering, billing header alone",
        [{"role": "system", "content": [{"type": "text", "text": BILLING.partition("\n")[0]}]}, *ASKED],
    ),
    _chat("rendering, a calling turn", CALLED, tools=[TOOL]),
    _chat("rendering, truncated to one", add_special_tokens=True, truncate_prompt_tokens=1),
    _chat("rendering, truncated", add_special_tokens=True, truncate_prompt_tokens=7, truncation_side="left"),
    _written("plain"),
    _written("plain, streamed", stream=True, stream_options={"include_usage": True}),
    _written("a system's message", [{"role": "system", "content": "Be brief."}, *ASKED]),
    _written("turns", TURNS),
    _written("tools", CALLED, tools=[TOOL], tool_choice="none"),
    _written(
        "parts", [{"role": "user", "content": [{"type": "text", "text": COUNT}, {"type": "text", "text": "Now."}]}]
    ),
    _written("reasoning_effort", reasoning_effort="high"),
    _written("reasoning_effort none", reasoning_effort="none"),
    _written("thinking", chat_template_kwargs={"thinking": True}),
    _written("unknown role", [{"role": "wizard", "content": COUNT}]),
    _written("an image", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]),
    _written("beyond the context", [{"role": "user", "content": COUNT * 2000}]),
    _written("beyond it by tokens", [{"role": "user", "content": COUNT * 300}]),
    _written("truncated", truncate_prompt_tokens=9),
    _written("truncated on the right", truncate_prompt_tokens=9, truncation_side="right"),
    _written("continued", [*ASKED, {"role": "assistant", "content": "2, 3"}], add_generation_prompt=False),
    _written("n", n=2, temperature=1, seed=7),
    _written("logprobs", logprobs=True, top_logprobs=2),
    _written("json", response_format={"type": "json_object"}),
    _written("beam search", use_beam_search=True, n=2, max_tokens=4, return_token_ids=False),
    _other("responses", "plain", RESPONSES, input="Add 1 and 2.", max_output_tokens=12, temperature=0),
    _other("responses", "streamed", RESPONSES, input="Add 1 and 2.", max_output_tokens=12, temperature=0, stream=True),
    _other("messages", "plain", MESSAGES, messages=ASKED, max_tokens=12, temperature=0),
    _other("messages", "a system", MESSAGES, system="Be brief.", messages=ASKED, max_tokens=12, temperature=0),
    _other("messages", "no thinking", MESSAGES, messages=ASKED, max_tokens=12, thinking={"type": "disabled"}),
    _other("messages", "tokens counted", f"{MESSAGES}/count_tokens", messages=ASKED),
    _other("tokenizer", "a chat", "/tokenize", messages=ASKED),
    _other("tokenizer", "a chat of names", "/tokenize", messages=ASKED, return_token_strs=True),
    _other("completions", "plain", COMPLETIONS, prompt=COUNT, max_tokens=5, temperature=0),
    _toolless("tools", tools=[ADD_TOOL]),
    _toolless("tools, streamed", tools=[ADD_TOOL], stream=True, stream_options={"include_usage": True}),
    _toolless("none", tools=[ADD_TOOL], tool_choice="none"),
    _toolless("required", tools=[ADD_TOOL], tool_choice="required", max_tokens=60),
    _toolless("named", tools=[ADD_TOOL], tool_choice=NAMED, max_tokens=60),
    _toolless("calls and tools", messages=CALLED, tools=[ADD_TOOL]),
    _toolless("calls", messages=CALLED),
    _toolless("tools", RESPONSES, tools=[FLAT_TOOL]),
    _toolless("required", RESPONSES, tools=[FLAT_TOOL], tool_choice="required", max_output_tokens=60),
    _toolless("tools", MESSAGES, tools=[ANTHROPIC_TOOL]),
    _toolless("any", MESSAGES, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=60),
    _toolless("one", MESSAGES, tools=[ANTHROPIC_TOOL], tool_choice={"type": "tool", "name": "add"}, max_tokens=60),
    _toolless("tools counted", f"{MESSAGES}/count_tokens", tools=[ANTHROPIC_TOOL], max_tokens=...),
]
