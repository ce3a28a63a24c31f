"""Parameters that this server does not keep: those that would change the answer are refused by name, and the client is
told of the others that they are without effect."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from services.frontend.errors import ApiError
from services.frontend.media.parts import MODALITY_OF, is_media, unknown_fields
from services.frontend.requests.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    StreamOptions,
    TextPart,
)
from services.frontend.requests.strict_tools import keeps_strict
from services.frontend.requests.tools import Tool
from services.frontend.text.chat_template import TAKEN

PROMPT_TOKENS: Final = "prompt_token_ids"
"""Of `kv_transfer_params`: the prompt of a chat as tokens."""
RESERVED_ARGUMENTS = frozenset(("kv_transfer_params", "ec_transfer_params"))
"""Of vLLM's extra arguments, by which requests move."""
_PART_FIELDS = frozenset(TextPart.__struct_fields__)


_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "spaces_between_special_tokens", "session_id", "watermarking", "stream_interval", "audio"),
    *("routed_experts_prompt_start", "functions", "function_call", "modalities", "web_search_options", "verbosity"),
    "ec_transfer_params",
)
_BEAMS_KEEP: Final = frozenset(
    (
        *("model", "prompt", "messages", "use_beam_search", "length_penalty", "n", "max_tokens", "ignore_eos"),
        *("max_completion_tokens", "temperature", "stream", "stream_options", "echo", "include_stop_str_in_output"),
        *("skip_special_tokens", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
        *("return_token_ids", "return_prompt_text", "priority", "cache_salt", "add_generation_prompt", "request_id"),
        *("continue_final_message", "chat_template_kwargs", "documents", "reasoning_effort"),
        *("logprobs", "top_logprobs", "return_tokens_as_token_ids"),
        *("tools", "parallel_tool_calls", "include_reasoning"),
    )
)
"""Parameters that mean something to a beam search."""
_KNOWN_TO_VLLM: Final = frozenset(("refusal", "thinking", "input_text", "output_text", "tool_reference"))
"""Types of parts that are text to it. Others (`input_image`, `image_embeds`, `prompt_embeds`) would have it fetch and
unpack what a client names, which is not what its process is for."""
_TELLABLE = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")
MAX_TOLD = 32
"""Of the names that a client has given, which are of any number and length."""


def without_effect(
    request: SamplingFields, *, reads_parts: bool = False, knows_tools: bool = True, tool_parser: str = ""
) -> list[str]:
    """Parameters that the client has given and that change nothing here. `reads_parts`: the chat template goes through
    the parts of a message, and may know fields of theirs that nobody else does; `knows_tools`: it has a place for
    tools. `tool_parser`: the model's, which may have calls of strict tools checked without such a place."""
    names = [name for name in _WITHOUT_EFFECT if getattr(request, name, None) is not None]
    if request.length_penalty not in (None, 1.0) and not request.use_beam_search:
        names.append("length_penalty")
    if isinstance(request, CompletionRequest) and request.best_of not in (None, request.n or 1):
        names.append("best_of")
    transfer, is_chat = request.kv_transfer_params, isinstance(request, ChatCompletionRequest)
    if transfer is not None and not (is_chat and transfer.keys() == {PROMPT_TOKENS}):
        names.append("kv_transfer_params")
    if isinstance(request, ChatCompletionRequest):
        if request.tools and not knows_tools and not _shape_calls(request, request.tools, tool_parser):
            names.append("tools")
        taken = TAKEN if request.tools else TAKEN - {"tools"}
        names += [f"chat_template_kwargs.{name}" for name in request.chat_template_kwargs or () if name in taken]
        if not reads_parts:
            names += _fields_of_parts(request)
    return [*names, *(name for name in lost_to_beams(request) if name not in names)]


def _shape_calls(request: ChatCompletionRequest, tools: Sequence[Tool], tool_parser: str) -> bool:
    """What the model writes is made a call of one of the tools, whether or not its prompt names them."""
    if request.tool_choice in (None, "auto"):
        return keeps_strict(tools, tool_parser)
    return request.tool_choice != "none"


def lost_to_beams(request: SamplingFields) -> list[str]:
    """What a beam search does not keep of a request; nothing if it is none."""
    if not request.use_beam_search:
        return []
    return [
        name
        for name in request.__struct_fields__
        if name not in _BEAMS_KEEP and not _asks_nothing(getattr(request, name))
    ]


def _asks_nothing(value: object) -> bool:
    """Not 0, which asks for logprobs without rivals, or for a seed."""
    return value is None or value is False or value in ([], {}, "", "none", "auto")


def tellable(names: Sequence[str]) -> list[str]:
    """Those of the names that may stand in a header, the first ones if they are many."""
    return [name for name in names if _TELLABLE.fullmatch(name)][:MAX_TOLD]


def _fields_of_parts(request: ChatCompletionRequest) -> Iterator[str]:
    """The parts of a text are joined, without whatever else they hold; media are read without it."""
    for index, message in enumerate(request.messages):
        content = message.get("content")
        for part_index, part in enumerate(content if isinstance(content, list) else ()):
            where = f"messages[{index}].content[{part_index}]"
            if part.get("type") == "text":
                yield from (f"{where}.{name}" for name in part.keys() - _PART_FIELDS)
            elif is_media(part):
                yield from unknown_fields(part, where)


def refuse_unsupported(request: SamplingFields) -> None:
    """Raises ApiError (400, `param` set) for the first one found."""
    for param, reason in _unsupported(request):
        message = f"`{param}` is not supported by this server: {reason}"
        raise ApiError(400, message, param=param, code="unsupported_parameter")


def _unsupported(request: SamplingFields) -> Iterator[tuple[str, str]]:
    if request.stream_options not in (None, StreamOptions()) and not request.stream:
        yield "stream_options", "it is only allowed with `stream: true`."
    if request.stream and request.prompt_logprobs:  # type: ignore[attr-defined]
        yield "prompt_logprobs", "it is not allowed with `stream: true`."
    for name in RESERVED_ARGUMENTS & (request.vllm_xargs or {}).keys():
        yield f"vllm_xargs.{name}", "the mesh sets it."
    if isinstance(request, ChatCompletionRequest):
        yield from _unsupported_chat(request)
    if isinstance(request, CompletionRequest):
        yield from _unsupported_completion(request)


def _unsupported_chat(request: ChatCompletionRequest) -> Iterator[tuple[str, str]]:
    for name in ("media_io_kwargs", "mm_processor_kwargs"):
        if getattr(request, name):
            yield name, "how media are read is up to those who run the model."
    if request.chat_template is not None:
        yield "chat_template", "the model's own is used; give it variables by `chat_template_kwargs`."
    if "chat_template" in (request.chat_template_kwargs or ()):
        yield "chat_template_kwargs.chat_template", "the model's own is used."


def unknown_in_messages(request: ChatCompletionRequest, *, to_vllm: bool = False) -> ApiError | None:
    """An error (400, `param` set) that names the first thing in the messages that this frontend cannot render; with
    `to_vllm`, the first one that vLLM's own renderer is not given either."""
    for index, message in enumerate(request.turns()):
        for param, reason, is_known_to_vllm in _unknown_in_message(index, message):
            if not (to_vllm and is_known_to_vllm):
                said = f"`{param}` is not supported by this server: {reason}"
                return ApiError(400, said, param=param, code="unsupported_parameter")
    return None


def _unknown_in_message(index: int, message: Message) -> Iterator[tuple[str, str, bool]]:
    """Where it is, why it is refused, and whether vLLM knows it."""
    where = f"messages[{index}]"
    if message.function_call:
        yield f"{where}.function_call", "it is the former name of `tool_calls`.", True
    if message.role == "function":
        yield f"{where}.role", "it is the former name of the role `tool`.", True
    for part_index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part.type not in MODALITY_OF and (part.type != "text" or part.text is None):
            served = ", ".join(("text", *MODALITY_OF))
            reason = f"content of type `{part.type}`; there are {served}."
            yield f"{where}.content[{part_index}]", reason, part.type in _KNOWN_TO_VLLM


def _unsupported_completion(request: CompletionRequest) -> Iterator[tuple[str, str]]:
    if request.prompt_embeds:
        yield "prompt_embeds", "a prompt is text or token ids."
    if request.suffix is not None:
        yield "suffix", "text can only be continued."
