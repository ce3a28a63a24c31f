"""Bodies of OpenAI's Responses API, and the chat completion that each of them is."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from controlplane.model.sampling import INT32_MAX
from services.frontend.errors import bad_request

Item = dict[str, Any]
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
]
LOGPROBS: Final = "message.output_text.logprobs"
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
_ROLES = frozenset({"user", "assistant", "system", "developer"})


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What form the text of an answer has."""

    format: dict[str, Any] | None = None
    """text, json_object, or json_schema with `name`, `schema` and `strict`."""
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses"""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=4096)]
    """What the user says, or items: messages, function calls and their outputs, reasoning (left out)."""
    model: Annotated[str, Meta(max_length=256)] = ""
    """May be left out where there is one model."""
    instructions: str | None = None
    """Said by the system before all else, and not kept for the next response."""
    max_output_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Go on with the conversation of an earlier response that this frontend keeps."""
    store: bool | None = None
    """Keep this one; true by default."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    """Accepted; without effect: the server calls no tools itself."""
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] | None = None
    """Lower is served first."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto`: of a conversation that is too long, the beginning is left out."""
    background: bool | None = None
    """Answer at once, and make it while nobody waits; it needs `store`."""
    include: list[Included] | None = None
    """`message.output_text.logprobs`; the others are without effect."""
    top_logprobs: int | None = None
    """Of how many rivals, where `include` asks for logprobs."""
    enable_response_messages: bool | None = None
    """Also give the prompt and the answer as text and as tokens."""
    metadata: dict[str, Any] | None = None
    """Given back as it is."""
    user: str | None = None

    # vLLM's, checked as parameters of the chat completion.
    stop: Any = None
    stop_token_ids: Any = None
    seed: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    include_reasoning: Any = None
    structured_outputs: Any = None
    chat_template_kwargs: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    cache_salt: Any = None
    request_id: Any = None
    session_id: Any = None
    watermarking: Any = None

    # OpenAI's, without effect on the answer.
    service_tier: ServiceTier | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


_SAME_IN_CHATS: Final = (
    *("temperature", "top_p", "parallel_tool_calls", "priority", "user", "stop", "stop_token_ids", "seed", "top_k"),
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output", "include_reasoning", "structured_outputs"),
    *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs", "kv_transfer_params"),
    *("ec_transfer_params", "cache_salt", "request_id", "session_id", "watermarking", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
_MEDIA_PARTS: Final = ("input_image", "input_audio")


def new_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """What this request adds to its conversation, as chat messages. Raises ApiError (400) for items that cannot be
    served."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        match item.get("type", "message"):
            case "message":
                messages.append(_message(item, where))
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                output = _text(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output})
            case "reasoning":
                continue
            case other:
                raise bad_request(f"Items of type `{other}` cannot be served.", where)
    if not messages:
        raise bad_request("`input` must hold a message.", "input")
    return messages


def chat_body(request: ResponsesRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat completion's body; `messages`: the whole conversation. Raises ApiError (400)."""
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    functions = [_tool(tool) for tool in request.tools or () if tool.get("type") == "function"]
    given = {
        "model": request.model or None,
        "max_tokens": request.max_output_tokens,
        "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
        "reasoning_effort": (request.reasoning or {}).get("effort"),
        "verbosity": request.text.verbosity if request.text else None,
        "tools": functions or None,
        "tool_choice": _tool_choice(request.tool_choice) if functions or request.tool_choice != "auto" else None,
        "response_format": _format(request.text.format) if request.text and request.text.format else None,
    }
    given |= {name: getattr(request, name) for name in _SAME_IN_CHATS}
    if LOGPROBS in (request.include or ()):
        given |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.enable_response_messages:
        given |= {"return_token_ids": True, "return_prompt_text": True}
    body: dict[str, Any] = {"messages": [*instructions, *messages]}
    body |= {name: value for name, value in given.items() if value is not None}
    # In the background a stream is read all the same where it can be: only streams go on at another frontend.
    if request.stream or (request.background and not request.enable_response_messages):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _message(item: Item, where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_request(
            f"`{where}.role` must be one of {', '.join(sorted(_ROLES))}.", f"{where}.role", "invalid_value"
        )
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _add_call(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Calls that follow each other are of one turn."""
    function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    if messages and messages[-1].get("tool_calls"):
        messages[-1]["tool_calls"].append(call)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def without_effect(request: ResponsesRequest) -> list[str]:
    """Parameters that change nothing here and have no place in a chat completion, such as tools of OpenAI's own."""
    names = [f"tools[{index}]" for index, tool in enumerate(request.tools or ()) if tool.get("type") != "function"]
    names += [f"include[{index}]" for index, each in enumerate(request.include or ()) if each != LOGPROBS]
    return [*names, "max_tool_calls"] if request.max_tool_calls is not None else names


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    schema = {name: form[name] for name in ("name", "description", "schema", "strict") if form.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


def _content(content: Any, where: str) -> Any:
    """A text, or parts as a chat message has them where an image is among them."""
    parts: list[Any] = content if isinstance(content, list) else []
    if not any(isinstance(part, dict) and part.get("type") in _MEDIA_PARTS for part in parts):
        return _text(content, where)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(parts)]


def _part(part: Any, where: str) -> dict[str, Any]:
    match part.get("type") if isinstance(part, dict) else None:
        case "input_image":
            if part.get("file_id"):
                raise bad_request("Files cannot be named by an id here; send `image_url`.", f"{where}.file_id")
            return {"type": "image_url", "image_url": {"url": _string(part, "image_url", where)}}
        case "input_audio":
            return {"type": "input_audio", "input_audio": part.get("input_audio")}
        case _:
            return {"type": "text", "text": _text([part], where)}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"`{where}` must be a text or a list of parts.", where, "invalid_value")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise bad_request(f"Parts of type `{kind}` cannot be served; send text.", f"{where}[{index}]")
        texts.append(part["text"])
    return "\n".join(texts)


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"`{where}.{name}` must be a text.", f"{where}.{name}", "invalid_value")
    return value
