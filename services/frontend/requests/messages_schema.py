"""Bodies of Anthropic's Messages API, and the chat completion that each of them is."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from controlplane.model.sampling import INT32_MAX
from services.frontend.errors import bad_request

Block = dict[str, Any]
Content = str | list[Block]


class AnthropicMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Content
    """A text, or blocks: text, image, tool_use, tool_result, thinking."""


class AnthropicTool(msgspec.Struct, kw_only=True):
    """Something that the model may call."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


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


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """Whether the model is to reason: adaptive leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1024, le=INT32_MAX)] | None = None
    """The chat's `thinking_token_budget`, if enabled."""
    display: str | None = None
    """Without effect, as in vLLM."""


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens"""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=4096)]
    model: Annotated[str, Meta(max_length=256)] = ""
    system: Content | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    """Without effect."""
    service_tier: str | None = None
    """Without effect."""
    output_config: OutputConfig | None = None

    # vLLM's, checked as parameters of the chat completion.
    cache_salt: Any = None
    chat_template_kwargs: Any = None
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


_SAME_IN_CHATS: Final = (
    *("metadata", "service_tier", "cache_salt", "chat_template_kwargs", "vllm_xargs", "kv_transfer_params"),
    *("ec_transfer_params", "watermarking"),
)


def disables_thinking(request: CountTokensRequest) -> bool:
    """Whether its client wants an answer without reasoning before it."""
    return request.thinking is not None and request.thinking.type == "disabled"


def chat_body(request: CountTokensRequest, effort_without_thinking: str = "none") -> dict[str, Any]:
    """The chat completion's body. `effort_without_thinking`: see `ChatTemplate`. Raises ApiError (400) for what it has
    no place for."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for index, message in enumerate(request.messages):
        messages += _turns(message, f"messages[{index}].content")
    body: dict[str, Any] = {"messages": messages}
    if request.model:
        body["model"] = request.model
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        body |= _tool_choice(request.tool_choice)
    if isinstance(request, MessagesRequest):
        body |= _sampling(request)
    if disables_thinking(request):
        body["reasoning_effort"] = effort_without_thinking
    return body


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    thinking, budget_tokens = request.thinking, None
    if thinking is not None and thinking.type == "enabled":
        budget_tokens = thinking.budget_tokens
        if budget_tokens is None:
            raise bad_request(
                "`thinking.budget_tokens` is missing.", "thinking.budget_tokens", "missing_required_parameter"
            )
    given = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences or None,
        "thinking_token_budget": budget_tokens,
        **{name: getattr(request, name) for name in _SAME_IN_CHATS},
    }
    if (config := request.output_config) is not None:
        given["reasoning_effort"] = config.effort
        if config.format is not None and config.format.schema is not None:
            schema = {"name": "output", "schema": config.format.schema}
            given["response_format"] = {"type": config.format.type, "json_schema": schema}
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return body


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicToolChoice) -> dict[str, Any]:
    if choice.type == "tool":
        if not choice.name:
            raise bad_request("`tool_choice.name` is missing.", "tool_choice.name", "missing_required_parameter")
        wanted: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        wanted = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    parallel = (
        {}
        if choice.disable_parallel_tool_use is None
        else {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    )
    return {"tool_choice": wanted, **parallel}


def _turns(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        here = f"{where}[{index}]"
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": _string(block, "text", here)})
            case "image":
                parts.append(_image(block.get("source"), f"{here}.source"))
            case "tool_use":
                function = {"name": _string(block, "name", here), "arguments": _json(block.get("input") or {})}
                calls.append({"id": _string(block, "id", here), "type": "function", "function": function})
            case "tool_result":
                content = _text(block.get("content") or "", f"{here}.content")
                tool_call_id = _string(block, "tool_use_id", here)
                results.append({"role": "tool", "tool_call_id": tool_call_id, "content": content})
            case "thinking" | "redacted_thinking":
                continue
            case other:
                raise bad_request(f"Blocks of type `{other}` cannot be served; send text or images.", here)
    turns = list(results)
    if parts or calls or not results:
        said: Content = (
            parts if any(part["type"] != "text" for part in parts) else "\n".join(each["text"] for each in parts)
        )
        turn: dict[str, Any] = {"role": message.role, "content": said}
        if calls:
            turn["tool_calls"] = calls
        turns.append(turn)
    return turns


def _image(source: Any, where: str) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise bad_request(f"`{where}` must be an object.", where, "invalid_value")
    match source.get("type"):
        case "url":
            url = _string(source, "url", where)
        case "base64":
            url = f"data:{_string(source, 'media_type', where)};base64,{_string(source, 'data', where)}"
        case other:
            raise bad_request(f"Images of source `{other}` cannot be served; send `base64` or `url`.", f"{where}.type")
    return {"type": "image_url", "image_url": {"url": url}}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise bad_request("Only blocks of type `text` can be served here.", f"{where}[{index}]")
        texts.append(_string(block, "text", f"{where}[{index}]"))
    return "\n".join(texts)


def _string(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_request(f"`{where}.{name}` must be a text.", f"{where}.{name}", "invalid_value")
    return value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
