"""Bodies of Anthropic's Messages API, and the chat completion that each of them is.

Blocks become messages as in vLLM 0.32 (`AnthropicServingMessages`), so that both give a model the same prompt.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from controlplane.model.sampling import INT32_MAX
from services.frontend.errors import bad_request
from services.frontend.requests.content import is_billing_line

_TOOL_CHANGES: Final = ("tool_addition", "tool_removal")


class AnthropicTool(msgspec.Struct, kw_only=True):
    """Something that the model may call."""

    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """For chat templates that leave such tools out of the prompt until they are asked for."""
    type: str | None = None


class ToolReference(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_reference"):
    """A tool among `tools`, by name."""

    name: str


class ToolDefinition(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_definition"):
    """A tool that `tools` lacks, or another one of that name."""

    definition: AnthropicTool


class Block(msgspec.Struct, kw_only=True):
    """A part of a turn; its type says which of the other fields it has."""

    type: str
    text: str | None = None
    source: dict[str, Any] | None = None
    """An image: `base64` with `media_type` and `data`, or `url`."""
    thinking: str | None = None
    """What the model thought before an earlier answer, for chat templates that want it."""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    """The arguments of a call (`tool_use`)."""
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    """What a call gave (`tool_result`): a text, or texts, images and references to tools."""
    tool: ToolReference | ToolDefinition | None = None
    """What `tool_addition` or `tool_removal` is about, by which a system's turn changes what may be called."""


Content = str | list[Block]


class AnthropicMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Content
    """A text, or blocks: text, image, tool_use, tool_result, tool_reference, thinking, redacted_thinking; a system's:
    text, tool_addition, tool_removal."""

    @property
    def blocks(self) -> Sequence[Block]:
        """Empty where the content is a text."""
        return () if isinstance(self.content, str) else self.content


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    """Whether it has to."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The form of the text."""

    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """What the answer is to be like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template, as `reasoning_effort`."""
    format: OutputFormat | None = None


class ThinkingEnabled(msgspec.Struct, kw_only=True, tag_field="type", tag="enabled"):
    """The model is to reason."""

    budget_tokens: Annotated[int, Meta(ge=1024, le=INT32_MAX)]
    """The chat's `thinking_token_budget`; less than `max_tokens`."""
    display: str | None = None
    """Without effect, as in vLLM."""


class ThinkingDisabled(msgspec.Struct, kw_only=True, tag_field="type", tag="disabled"):
    """The model is not to reason."""


class ThinkingAdaptive(msgspec.Struct, kw_only=True, tag_field="type", tag="adaptive"):
    """The model is to reason as it sees fit."""

    display: str | None = None
    """Without effect, as in vLLM."""


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens"""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=4096)]
    model: Annotated[str, Meta(max_length=256)] = ""
    system: Content | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Any = None
    """vLLM's, checked as a parameter of the chat completion."""


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    """Without effect."""
    service_tier: str | None = None
    """Without effect."""

    # vLLM's, checked as parameters of the chat completion.
    cache_salt: Any = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    watermarking: Any = None


class TokenCount(msgspec.Struct):
    """POST /v1/messages/count_tokens"""

    input_tokens: int
    context_management: dict[str, int]

    @classmethod
    def of(cls, tokens: int) -> "TokenCount":
        """As vLLM says it."""
        return cls(tokens, {"original_input_tokens": tokens})


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What has to be known of a model's chat template to write a chat for it; see `ChatTemplate`."""

    effort_without_thinking: str = "none"
    wants_system_first: bool = False


_SAME_IN_CHATS: Final = (
    *("metadata", "service_tier", "cache_salt", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"),
    "watermarking",
)


def asks_for_template(request: CountTokensRequest) -> bool:
    """Whether its chat depends on `TemplateFacts`."""
    return disables_thinking(request) or any(message.role == "system" for message in request.messages)


def disables_thinking(request: CountTokensRequest) -> bool:
    """Whether its client wants an answer without reasoning before it."""
    return isinstance(request.thinking, ThinkingDisabled)


def without_effect(request: CountTokensRequest) -> list[str]:
    """Parameters that change nothing here and have no place in a chat completion."""
    wants_call = request.tool_choice is not None and request.tool_choice.type in ("any", "tool")
    return ["tool_choice"] if wants_call and not _tools_in_effect(request) else []


def chat_body(request: CountTokensRequest, template: TemplateFacts = TemplateFacts()) -> dict[str, Any]:
    """The chat completion's body. Raises ApiError (400) for what it has no place for."""
    try:
        messages = list(_messages(request, wants_system_first=template.wants_system_first))
    except RecursionError as error:
        raise bad_request("The arguments of a call are nested too deeply.", "messages") from error
    tools = [_tool(tool) for tool in _tools_in_effect(request)]
    given = {
        "messages": messages,
        "model": request.model or None,
        "tools": tools or None,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    if request.tool_choice is not None:
        given |= _tool_choice(request.tool_choice, has_tools=bool(tools))
    if (config := request.output_config) is not None:
        given["reasoning_effort"] = config.effort
        if config.format is not None and config.format.schema:
            schema = {"name": config.format.type, "schema": config.format.schema}
            given["response_format"] = {"type": config.format.type, "json_schema": schema}
    if disables_thinking(request):
        given["reasoning_effort"] = template.effort_without_thinking
    if isinstance(request, MessagesRequest):
        given |= _sampling(request)
    return {name: value for name, value in given.items() if value is not None}


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    given: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences or None,
        **{name: getattr(request, name) for name in _SAME_IN_CHATS},
    }
    if isinstance(request.thinking, ThinkingEnabled):
        budget_tokens = given["thinking_token_budget"] = request.thinking.budget_tokens
        if budget_tokens >= request.max_tokens:
            raise bad_request("`thinking.budget_tokens` must be less than `max_tokens`.", "thinking.budget_tokens")
    if request.stream:
        given |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return given


def _tools_in_effect(request: CountTokensRequest) -> list[AnthropicTool]:
    """Those at the end of the conversation: a chat template sees one list of tools."""
    tools = {tool.name: tool for tool in request.tools or ()}
    if len(tools) != len(request.tools or ()):
        return list(request.tools or ())  # the chat names the two that are called the same
    removed: set[str] = set()
    for block, where in _tool_changes(request):
        match block.tool:
            case ToolDefinition(definition=definition) if block.type == "tool_addition":
                name = definition.name
                tools[name] = definition
            case ToolReference(name=name) if name in tools:
                if block.type == "tool_addition":
                    tools[name] = msgspec.structs.replace(tools[name], defer_loading=None)
            case ToolReference(name=name):
                raise bad_request(f"There is no tool `{name}` among `tools`.", f"{where}.tool.name")
            case _:
                wanted = "a `tool_reference`" if block.type == "tool_removal" else "`tool`"
                raise bad_request(f"A block of type `{block.type}` needs {wanted}.", f"{where}.tool")
        if block.type == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _tool_changes(request: CountTokensRequest) -> Iterator[tuple[Block, str]]:
    """With the place of each. Raises ApiError (400) for one that stands where only what is said may."""
    for index, message in enumerate(request.messages):
        for number, block in enumerate(message.blocks):
            if block.type in _TOOL_CHANGES:
                where = f"messages[{index}].content[{number}]"
                if message.role != "system":
                    raise bad_request(f"Only a message of role `system` may hold a `{block.type}`.", where)
                yield block, where


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"},
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: AnthropicToolChoice, *, has_tools: bool) -> dict[str, Any]:
    if choice.type == "tool" and not choice.name:
        raise bad_request("`tool_choice.name` is missing.", "tool_choice.name", "missing_required_parameter")
    if not has_tools:
        return {}
    wanted: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    return {
        "tool_choice": wanted or {"type": "function", "function": {"name": choice.name}},
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _messages(request: CountTokensRequest, *, wants_system_first: bool) -> Iterator[dict[str, Any]]:
    """The conversation as that of a chat. With `wants_system_first`, what the system says amid it stands before it."""
    system = request.system or ""
    first = [system] if isinstance(system, str) else _system_texts(system, "system")
    if wants_system_first:
        for index, message in enumerate(request.messages):
            if message.role == "system":
                first += _system_texts(message.content, f"messages[{index}].content")
    if text := "".join(first):
        yield {"role": "system", "content": text}
    for index, message in enumerate(request.messages):
        where = f"messages[{index}].content"
        if message.role != "system":
            yield from _turns(message, where)
        elif not wants_system_first and (text := "".join(_system_texts(message.content, where))):
            yield {"role": "system", "content": text}


def _system_texts(content: Content, where: str) -> list[str]:
    """Without the line by which Claude Code says who pays. It has another value in each request, so that no prefix of
    the prompt would be cached from there on."""
    blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
    for index, block in enumerate(blocks):
        _check_type(block, f"{where}[{index}]")
        if where == "system" and block.type in _TOOL_CHANGES:
            raise bad_request(f"Only messages may hold a `{block.type}`.", f"{where}[{index}]")
    return [block.text for block in blocks if block.type == "text" and block.text and not is_billing_line(block.text)]


def _turns(message: AnthropicMessage, where: str) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, before what is said beside them."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        here = f"{where}[{index}]"
        _check_type(block, here)
        if block.type == "text" and block.text:
            parts.append({"type": "text", "text": block.text})
        elif block.type == "image" and block.source:
            parts.append(_image(block.source, f"{here}.source"))
        elif block.type == "thinking" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id or f"call_{index}", "type": "function", "function": function})
        elif block.type == "tool_result" and message.role == "user":
            yield from _result(block, f"{here}.content")
        elif block.type == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block.content or ''}"})
    turn: dict[str, Any] = {"role": message.role}
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    if parts:
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        turn["content"] = parts[0]["text"] if is_text else parts
    if parts or message.role == "assistant":
        yield turn


def _result(block: Block, where: str) -> Iterator[dict[str, Any]]:
    """A call's result. A chat has images in what a user says alone, and tools that were found in a message without
    texts."""
    items: list[dict[str, Any]] = block.content if isinstance(block.content, list) else []
    texts, images, found = [block.content] if isinstance(block.content, str) else [], [], []
    for index, item in enumerate(items):
        match item.get("type"):
            case "text":
                texts.append(_string(item, "text", f"{where}[{index}]", ""))
            case "image":
                images.append(_image(item.get("source"), f"{where}[{index}].source"))
            case "tool_reference":
                name = item.get("tool_name") or item.get("name")
                found += [{"type": "tool_reference", "name": name}] if name else []
    result = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
    yield {**result, "content": "\n".join(texts)}
    if images:
        yield {"role": "user", "content": images}
    if found:
        yield {**result, "content": found}


_BLOCKS: Final = (
    *("text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"),
    *_TOOL_CHANGES,
)


def _check_type(block: Block, where: str) -> None:
    """Raises ApiError (400)."""
    if block.type not in _BLOCKS:
        raise bad_request(f"Blocks of type `{block.type}` cannot be served; send text or images.", where)


def _image(source: Any, where: str) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise bad_request(f"`{where}` must be an object.", where, "invalid_value")
    match source.get("type", "base64"):
        case "url":
            url = _string(source, "url", where)
        case "base64":
            url = f"data:{_string(source, 'media_type', where, 'image/jpeg')};base64,{_string(source, 'data', where)}"
        case other:
            raise bad_request(f"Images of source `{other}` cannot be served; send `base64` or `url`.", f"{where}.type")
    return {"type": "image_url", "image_url": {"url": url}}


def _string(fields: dict[str, Any], name: str, where: str, default: str | None = None) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str):
        raise bad_request(f"`{where}.{name}` must be a text.", f"{where}.{name}", "invalid_value")
    return value
