"""What a response of OpenAI's Responses says of its request."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.frontend.requests.responses_schema import LOGPROBS, ResponsesRequest
from services.frontend.requests.responses_tools import chat_tool_choice

_WEB_SEARCH_FACTS: Final = ("external_web_access", "filters", "search_context_size", "user_location")
_TOOL_FACTS: Final[Mapping[str, Sequence[str]]] = {
    "function": ("description", "strict", "allowed_callers", "async", "defer_loading", "output_schema"),
    "custom": ("allowed_callers", "async", "defer_loading", "description", "format"),
    "web_search": _WEB_SEARCH_FACTS,
    "web_search_2025_08_26": _WEB_SEARCH_FACTS,
    "web_search_preview": ("search_content_types", "search_context_size", "user_location"),
    "file_search": ("filters", "max_num_results", "ranking_options"),
    "code_interpreter": ("allowed_callers",),
    "mcp": (
        *("allowed_callers", "allowed_tools", "authorization", "connector_id", "defer_loading", "headers"),
        *("require_approval", "server_description", "server_url", "tunnel_id"),
    ),
}
"""What a tool of each type may hold, which a response says as null where it does not."""
_CONTAINER_FACTS: Final = ("file_ids", "memory_limit", "network_policy")
"""The same of the container that a code interpreter is to run in, where it is described."""
_FORMAT_FACTS: Final = ("description", "strict")
_REASONING_FACTS: Final = ("context", "effort", "generate_summary", "mode", "summary")


def response_facts(body: ResponsesRequest, created_at: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults`: sampling parameters of requests that leave them out."""
    tools = body.tools or []
    return {
        "created_at": created_at,
        "background": body.background is True,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt": None,
        "reasoning": None if body.reasoning is None else _with_nulls(body.reasoning, _REASONING_FACTS),
        "service_tier": body.service_tier or "auto",
        "store": body.store is not False,
        "temperature": _or_default(body.temperature, defaults, "temperature", 1.0),
        "text": _text_facts(body),
        "tool_choice": _choice_facts(body.tool_choice or "auto", tools) if tools else "none",
        "tools": [_tool_facts(tool) for tool in tools],
        "top_p": 1.0 if body.temperature == 0 else _or_default(body.top_p, defaults, "top_p", 1.0),
        "presence_penalty": _or_default(body.presence_penalty, defaults, "presence_penalty", 0.0),
        "frequency_penalty": _or_default(body.frequency_penalty, defaults, "frequency_penalty", 0.0),
        "top_logprobs": body.top_logprobs or 0 if LOGPROBS in (body.include or ()) else None,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _choice_facts(choice: str | dict[str, Any], tools: Sequence[dict[str, Any]]) -> str | dict[str, Any]:
    """A function of a namespace by the name that the model knows."""
    named = chat_tool_choice(choice, tools)
    if isinstance(choice, str) or isinstance(named, str):
        return choice
    return {**choice, "name": named["function"]["name"]}


def _text_facts(body: ResponsesRequest) -> dict[str, Any] | None:
    if body.text is None:
        return None
    form = body.text.format
    if form is not None and form.get("type") == "json_schema":
        form = _with_nulls(form, _FORMAT_FACTS)
    return {"format": form, "verbosity": body.text.verbosity}


def _tool_facts(tool: dict[str, Any]) -> dict[str, Any]:
    facts = _with_nulls(tool, _TOOL_FACTS.get(tool.get("type", ""), ()))
    if tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
        facts["tools"] = [_tool_facts(inner) if isinstance(inner, dict) else inner for inner in tool["tools"]]
    if isinstance(tool.get("container"), dict):
        facts["container"] = _with_nulls(tool["container"], _CONTAINER_FACTS)
    return facts


def _with_nulls(fields: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {**dict.fromkeys(names), **fields}


def _or_default(value: float | None, defaults: Mapping[str, Any], name: str, otherwise: float) -> float:
    return float(value if value is not None else defaults.get(name, otherwise))
