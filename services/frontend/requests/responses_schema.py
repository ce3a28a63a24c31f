"""Bodies of OpenAI's Responses API, and the chat completion that each of them is."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from controlplane.model.sampling import INT32_MAX
from services.frontend.errors import bad_request
from services.frontend.requests.responses_tools import (
    chat_tool_choice,
    chat_tools,
    custom_arguments,
    flat_name,
    is_named,
    uncallable,
)

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
    """What the user says, or items: messages, reasoning, calls of functions and custom tools, and their outputs."""
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
    metadata: dict[str, str] | None = None
    """Given back as it is."""
    prompt: Any = None
    """Refused: there are no templates of prompts here."""
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
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_UNFINISHED: Final = ("in_progress", "incomplete")


def new_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """What this request adds to its conversation, as chat messages. Raises ApiError (400) for items that cannot be
    served."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                _add_to_turn(messages, "content", _text(item.get("content"), f"{where}.content"))
            case "message":
                messages.append(_message(item, where))
            case "function_call" | "custom_tool_call":
                _add_call(messages, item, where)
            case "function_call_output" | "custom_tool_call_output":
                output = _content(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output})
            case "reasoning":
                _add_to_turn(messages, "reasoning", _reasoning(item, where))
            case other:
                raise bad_request(f"Items of type `{other}` cannot be served.", where)
    return messages


def continues_last(request: ResponsesRequest) -> bool:
    """Whether the answer goes on with the last item, a message that is not complete."""
    last: Item = request.input[-1] if isinstance(request.input, list) else {}
    return last.get("type", "message") in ("message", "reasoning") and last.get("status") in _UNFINISHED


def chat_body(request: ResponsesRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat completion's body; `messages`: the whole conversation. Raises ApiError (400)."""
    if request.prompt is not None:
        raise bad_request("prompt template is not supported.", "prompt", "unsupported_parameter")
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    tools = request.tools or []
    functions = chat_tools(tools)
    choice = chat_tool_choice(request.tool_choice, tools)
    given = {
        "model": request.model or None,
        "max_tokens": request.max_output_tokens,
        "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
        "reasoning_effort": (request.reasoning or {}).get("effort"),
        "verbosity": request.text.verbosity if request.text else None,
        "tools": functions or None,
        "tool_choice": choice if functions or choice != "auto" else None,
        "response_format": _format(request.text.format) if request.text and request.text.format else None,
    }
    given |= {name: getattr(request, name) for name in _SAME_IN_CHATS}
    if LOGPROBS in (request.include or ()):
        given |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.enable_response_messages:
        given |= {"return_token_ids": True, "return_prompt_text": True}
    body: dict[str, Any] = {"messages": [*instructions, *messages]}
    body |= {name: value for name, value in given.items() if value is not None}
    if continues_last(request):
        body |= {"continue_final_message": True, "add_generation_prompt": False}
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


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn that items which follow each other are of."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _add_to_turn(messages: list[dict[str, Any]], name: str, text: str) -> None:
    """A turn says, and thinks, one thing: with a second one the next turn begins."""
    turn = _turn(messages)
    if name in turn:
        messages.append({"role": "assistant", name: text})
    else:
        turn[name] = text


def _add_call(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    name = _string(item, "name", where)
    if item["type"] == "custom_tool_call":
        arguments = custom_arguments(_string({"input": "", **item}, "input", where))
    else:
        arguments = _string(item, "arguments", where)
    if item.get("namespace") is not None:
        name = flat_name(_string(item, "namespace", where), name)
    call = {
        "id": _string(item, "call_id", where),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    _turn(messages).setdefault("tool_calls", []).append(call)


def _reasoning(item: Item, where: str) -> str:
    """What was thought, or its summary."""
    if item.get("encrypted_content"):
        raise bad_request("Encrypted reasoning cannot be read here.", f"{where}.encrypted_content")
    for name in ("content", "summary"):
        if parts := item.get(name):
            return _text(parts[:1] if isinstance(parts, list) else parts, f"{where}.{name}")
    return ""


def without_effect(request: ResponsesRequest) -> list[str]:
    """Parameters that change nothing here and have no place in a chat completion, such as tools of OpenAI's own."""
    names = [f"tools[{index}]" for index in uncallable(request.tools or [])]
    names += [f"include[{index}]" for index, each in enumerate(request.include or ()) if each != LOGPROBS]
    if isinstance(request.tool_choice, dict) and not is_named(request.tool_choice):
        names.append("tool_choice")
    return [*names, "max_tool_calls"] if request.max_tool_calls is not None else names


def _format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    schema = {name: form[name] for name in ("name", "description", "schema", "strict") if form.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


def _content(content: Any, where: str) -> Any:
    """A text, or parts as a chat message has them."""
    if not isinstance(content, list):
        return _text(content, where)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    match part.get("type") if isinstance(part, dict) else None:
        case "input_image":
            if part.get("file_id"):
                raise bad_request("Files cannot be named by an id here; send `image_url`.", f"{where}.file_id")
            return {"type": "image_url", "image_url": {"url": _string(part, "image_url", where)}}
        case "input_audio":
            return {"type": "input_audio", "input_audio": part.get("input_audio")}
        case _:
            return {"type": "text", "text": _part_text(part, where)}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"`{where}` must be a text or a list of parts.", where, "invalid_value")
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind in _TEXT_PARTS else part.get("refusal") if kind == "refusal" else None
    if not isinstance(text, str):
        raise bad_request(f"Parts of type `{kind}` cannot be served; send text.", where)
    return text


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"`{where}.{name}` must be a text.", f"{where}.{name}", "invalid_value")
    return value
