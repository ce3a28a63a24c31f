"""From a chat to its prompt: by the model's chat template, or by vLLM in the process beside this frontend."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from mesh.runtime import Threads
from services.frontend.errors import bad_request, context_too_long, out_of_vocabulary
from services.frontend.media.parts import media_parts
from services.frontend.parser_process.prompts import RenderedChat
from services.frontend.requests.content import ContentWriter, TextOrParts, text_of
from services.frontend.requests.models import ServedModel
from services.frontend.requests.schema import ChatCompletionRequest, SamplingFields
from services.frontend.requests.tools import calls_for_template, for_template
from services.frontend.requests.unsupported import PROMPT_TOKENS, unknown_in_messages
from services.frontend.text.chat_template import TAKEN, ChatTemplate, ChatTemplateRefused, effort_variables

_TOLD_TO_RENDERER: Final = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "documents", "reasoning_effort"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("truncate_prompt_tokens", "truncation_side", "max_tokens", "max_completion_tokens", "include_reasoning"),
)
"""Parameters that say something of the prompt."""


async def render_chat(request: ChatCompletionRequest, model: ServedModel, threads: Threads) -> RenderedChat:
    """The prompt of a chat: by the chat template, or by vLLM where this frontend cannot make it. Raises ApiError."""
    if (given := _given_tokens(request, model)) is not None:
        return RenderedChat(given, "")
    outside, unknown = model.prompts, unknown_in_messages(request)
    if outside is not None and (outside.is_only_way or model.text.template is None or unknown is not None):
        _check_text_only(request)
        rendered = await outside.render(prompt_body(request, tells_choice=outside.tells_tools))
        if rendered is not None:
            return rendered
    if unknown is not None:
        raise unknown
    return await _rendered_here(request, model, threads)


def _given_tokens(request: ChatCompletionRequest, model: ServedModel) -> list[int] | None:
    """The prompt of a client that made it before, as those do who prefill elsewhere; None: there is none, or the
    messages are needed themselves. Raises ApiError (400)."""
    param = f"kv_transfer_params.{PROMPT_TOKENS}"
    token_ids = (request.kv_transfer_params or {}).get(PROMPT_TOKENS)
    if token_ids is None or request.echo or media_parts(request.messages):
        return None
    if not isinstance(token_ids, list) or not token_ids or any(type(each) is not int or each < 0 for each in token_ids):
        raise bad_request(f"`{param}` must be a non-empty list of non-negative integers.", param, "invalid_value")
    if max(token_ids) >= model.text.vocabulary_size:
        raise out_of_vocabulary(max(token_ids), model.name, model.text.vocabulary_size, param)
    return token_ids


def _check_text_only(request: ChatCompletionRequest) -> None:
    """Raises ApiError (400) for what vLLM's renderer is not given."""
    if (error := unknown_in_messages(request, to_vllm=True)) is not None:
        raise error
    if parts := media_parts(request.messages):
        message = "Images and the like cannot be served where vLLM makes the prompt beside the frontend."
        raise bad_request(message, parts[0].param, "unsupported_parameter")


def prompt_body(request: ChatCompletionRequest, *, tells_choice: bool) -> bytes:
    """The body of a chat as vLLM's renderer is told of it. `tells_choice`: with `tool_choice`, most of which the
    renderer refuses where it has no parser of what the model calls."""
    given = {name: getattr(request, name) for name in _TOLD_TO_RENDERER if getattr(request, name) is not None}
    if given.get("continue_final_message"):
        given.setdefault("add_generation_prompt", False)
    if not tells_choice:
        given["tool_choice"] = "none"
    return msgspec.json.encode({"model": "", **given})


async def _rendered_here(request: ChatCompletionRequest, model: ServedModel, threads: Threads) -> RenderedChat:
    """Raises ApiError (400) where there is no chat template, or it refuses the chat."""
    template = model.text.template
    if request.tools and model.text.tool_template is not None:
        template = model.text.tool_template
    if template is None:
        raise bad_request(f"`{model.name}` has no chat template; use /v1/completions.", "messages")
    try:
        text = _written(request, model, template)
    except ChatTemplateRefused as error:
        raise bad_request(f"{error}.", "messages") from error
    check_length(text, request, model, "messages")
    token_ids = await model.text.chunked.encode_in(threads, text)
    return RenderedChat(model.text.with_added_tokens(token_ids) if request.add_special_tokens else token_ids, text)


def _written(request: ChatCompletionRequest, model: ServedModel, template: ChatTemplate) -> str:
    """Raises ChatTemplateRefused, and ApiError (400) for parameters that contradict each other."""
    writer = ContentWriter(takes_parts=template.takes_parts, takes=model.media)
    messages = [_template_message(fields, writer.content(fields)) for fields in request.messages]
    if not template.knows_developers and any(message["role"] == "developer" for message in messages):
        messages = _with_developers_as_system(messages)
    given = request.chat_template_kwargs or {}
    variables = {name: value for name, value in given.items() if name not in TAKEN}
    if request.tools or "tools" in given:
        variables["tools"] = for_template(request.tools) if request.tools else given["tools"]
    if request.documents is not None:
        variables["documents"] = request.documents
    if (effort := request.reasoning_effort) is not None:
        variables = {**effort_variables(effort), **variables, "reasoning_effort": effort}
    if request.continue_final_message:
        if request.add_generation_prompt:
            message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
            raise bad_request(message, "add_generation_prompt")
        return template.render_unfinished(messages, variables=variables)
    return template.render(
        messages, add_generation_prompt=request.add_generation_prompt is not False, variables=variables
    )


def _template_message(message: Mapping[str, Any], content: TextOrParts) -> Mapping[str, Any]:
    """What is null is left out, because templates ask whether a field is there."""
    fields = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in fields:
        fields["tool_calls"] = calls_for_template(fields["tool_calls"])
    if "reasoning" in fields:  # the name that templates know
        fields.setdefault("reasoning_content", fields["reasoning"])
    return {**fields, "content": content}


def _with_developers_as_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For a template that does not know OpenAI's newer name of the system's role. Those of both roles are one message
    at the beginning, unless there is one alone and it stands there (vLLM's `_consolidate_system_messages`)."""
    named = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    of_system = [each for each in named if each["role"] == "system"]
    if of_system == named[:1]:
        return list(named)
    texts = [text for each in of_system if (text := text_of(each))]
    others = [each for each in named if each["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def check_length(text: str, request: SamplingFields, model: ServedModel, param: str) -> None:
    """Refuse, before it is tokenised, what is too long whatever its tokens are: 8 MB without a blank cost 600 MB of
    memory. Raises ApiError (400)."""
    fewest_tokens = model.text.fewest_tokens(text)
    if request.truncate_prompt_tokens is None and fewest_tokens >= model.max_model_len_tokens:
        raise context_too_long(fewest_tokens, 1, model.max_model_len_tokens, param, is_least=True)
