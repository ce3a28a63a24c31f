"""Parameters that would change the answer and that this server does not implement: refused by name."""

from collections.abc import Iterator

from services.frontend.errors import ApiError
from services.frontend.media.parts import MODALITY_OF, is_media
from services.frontend.requests.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    TextPart,
)
from services.frontend.text.chat_template import TAKEN

RESERVED_ARGUMENTS = frozenset(("kv_transfer_params", "ec_transfer_params"))
"""Of vLLM's extra arguments, by which requests move."""
_PART_FIELDS = frozenset(TextPart.__struct_fields__)


_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "spaces_between_special_tokens", "session_id"),
)


def without_effect(request: SamplingFields) -> list[str]:
    """Parameters that the client has given and that change nothing here."""
    return [name for name in _WITHOUT_EFFECT if getattr(request, name, None) is not None]


def refuse_unsupported(request: SamplingFields) -> None:
    """Raises ApiError (400, `param` set) for the first one found."""
    for param, reason in _unsupported(request):
        message = f"`{param}` is not supported by this server: {reason}"
        raise ApiError(400, message, param=param, code="unsupported_parameter")


def _unsupported(request: SamplingFields) -> Iterator[tuple[str, str]]:
    if request.stream_options is not None:
        if not request.stream:
            yield "stream_options", "it is only allowed with `stream: true`."
        if request.stream_options.continuous_usage_stats and not request.stream_options.include_usage:
            yield "stream_options.continuous_usage_stats", "it is only allowed with `include_usage: true`."
    if request.stream and request.prompt_logprobs is not None:  # type: ignore[attr-defined]
        yield "prompt_logprobs", "it is not allowed with `stream: true`."
    if request.logprob_token_ids:
        yield "logprob_token_ids", "other requests of the batch would get logprobs of these tokens; ask for rivals."
    for name in RESERVED_ARGUMENTS & (request.vllm_xargs or {}).keys():
        yield f"vllm_xargs.{name}", "the mesh sets it."
    if request.length_penalty not in (None, 1.0) and not request.use_beam_search:
        yield "length_penalty", "it is only allowed with `use_beam_search: true`."
    if isinstance(request, ChatCompletionRequest):
        yield from _unsupported_chat(request)
    if isinstance(request, CompletionRequest):
        yield from _unsupported_completion(request)


def _unsupported_chat(request: ChatCompletionRequest) -> Iterator[tuple[str, str]]:
    for param, value in (("functions", request.functions), ("function_call", request.function_call)):
        if value not in (None, [], "none", "auto"):
            yield param, "it is the former name of `tools` and `tool_choice`."
    if any(modality != "text" for modality in request.modalities or ()):
        yield "modalities", "answers are plain text."
    if request.audio:
        yield "audio", "answers are plain text."
    if request.web_search_options is not None:
        yield "web_search_options", "it does not search the web."
    for param, effort in (("reasoning_effort", request.reasoning_effort), ("verbosity", request.verbosity)):
        if effort not in (None, "none", "medium"):
            yield param, "its models have no such setting."
    if request.chat_template is not None:
        yield "chat_template", "the model's own is used; give it variables by `chat_template_kwargs`."
    for name in request.chat_template_kwargs or ():
        if name in TAKEN:
            yield f"chat_template_kwargs.{name}", "it is a parameter of its own."
    for index, message in enumerate(request.turns()):
        yield from _unsupported_message(index, message)
        content = request.messages[index].get("content")
        for part_index, part in enumerate(content if isinstance(content, list) else ()):
            for name in () if is_media(part) else part.keys() - _PART_FIELDS:
                yield f"messages[{index}].content[{part_index}].{name}", "the parts of a text are joined without it."


def _unsupported_message(index: int, message: Message) -> Iterator[tuple[str, str]]:
    where = f"messages[{index}]"
    if message.function_call:
        yield f"{where}.function_call", "it is the former name of `tool_calls`."
    if message.role == "function":
        yield f"{where}.role", "it is the former name of the role `tool`."
    for part_index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part.type not in MODALITY_OF and (part.type != "text" or part.text is None):
            served = ", ".join(("text", *MODALITY_OF))
            yield f"{where}.content[{part_index}]", f"content of type `{part.type}`; there are {served}."


def _unsupported_completion(request: CompletionRequest) -> Iterator[tuple[str, str]]:
    if request.best_of is not None and request.best_of != (request.n or 1):
        yield "best_of", "every answer that is made is returned; leave it out or set it to `n`."
    if request.suffix:
        yield "suffix", "text can only be continued."
