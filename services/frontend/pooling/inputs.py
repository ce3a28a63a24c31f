"""From the inputs of a pooling request to prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from controlplane.model.sampling import INT32_MAX
from services.frontend.errors import ApiError, bad_request, context_too_long, out_of_vocabulary
from services.frontend.media.parts import check_taken, media_parts
from services.frontend.pooling.call import PoolingCall
from services.frontend.pooling.schema import MAX_INPUTS, InputFields, PromptFields
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import prompt_ids
from services.frontend.requests.schema import ChatCompletionRequest
from services.frontend.requests.unsupported import refuse_unsupported

WHOLE_CONTEXT = -1
"""As `truncate_prompt_tokens`: as many tokens as the model takes."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How prompts are made to fit a model."""

    model: ServedModel
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    is_padded: bool = False

    @classmethod
    def of(cls, body: PromptFields, model: ServedModel) -> "Fit":
        """Raises ApiError (400) for what could never fit."""
        limit = model.max_model_len_tokens
        if body.mm_processor_kwargs:
            message = "`mm_processor_kwargs` is not supported by this server: how media are read is not the client's."
            raise bad_request(message, "mm_processor_kwargs", "unsupported_parameter")
        if (body.truncate_prompt_tokens or 0) > limit:
            raise bad_request(
                f"`truncate_prompt_tokens` is greater than the model's context of {limit} tokens. Please request a "
                "smaller truncation size.",
                "truncate_prompt_tokens",
            )
        is_padded = body.padding == "max_length"
        if is_padded and model.text.pad_token_id is None:
            raise bad_request(f"The tokenizer of `{model.name}` has no token for padding.", "padding")
        return cls(model, body.truncate_prompt_tokens, body.truncation_side, is_padded)

    @property
    def kept_tokens(self) -> int | None:
        """So many tokens stay of a prompt; None: all, or it is refused."""
        if self.truncate_prompt_tokens == WHOLE_CONTEXT:
            return self.model.max_model_len_tokens
        return self.truncate_prompt_tokens

    def text(self, token_ids: list[int], param: str) -> list[int]:
        """The prompt of a text's tokens, with the model's own around them. They stay where a text is cut, unless the
        client says on which side: so do a tokenizer's truncation and vLLM's. Raises ApiError (400)."""
        text, kept = self.model.text, self.kept_tokens
        if kept is not None and self.truncation_side is None:
            token_ids = token_ids[: max(0, kept - len(text.with_added_tokens([])))]
        return self.tokens(text.with_added_tokens(token_ids), param)

    def cut(self, prompt: list[int]) -> list[int]:
        """What stays of a prompt, or of values that go with its tokens."""
        kept = self.kept_tokens
        if kept is None or len(prompt) <= kept:
            return prompt
        return prompt[len(prompt) - kept :] if self.truncation_side == "left" else prompt[:kept]

    def tokens(self, prompt: list[int], param: str) -> list[int]:
        """The prompt cut and padded. `param`: where in the body it comes from. Raises ApiError (400)."""
        limit, prompt = self.model.max_model_len_tokens, self.cut(prompt)
        if not prompt:
            raise bad_request("An input must hold at least one token.", param)
        if len(prompt) > limit:
            raise context_too_long(len(prompt), 0, limit, param)
        if max(prompt) >= (size := self.model.text.vocabulary_size):
            raise out_of_vocabulary(max(prompt), self.model.name, size, param)
        pad_token_id = self.model.text.pad_token_id
        if self.is_padded and pad_token_id is not None:
            prompt = prompt + [pad_token_id] * (limit - len(prompt))
        return prompt


async def text_tokens(call: PoolingCall, text: str, fit: Fit, param: str) -> list[int]:
    """Without the model's own around them. Raises ApiError (400) for a text that is too long whatever its tokens
    are."""
    limit, fewest_tokens = call.model.max_model_len_tokens, call.model.text.fewest_tokens(text)
    if fit.kept_tokens is None and fewest_tokens > limit:
        raise context_too_long(fewest_tokens, 0, limit, param, is_least=True)
    return await call.model.text.chunked.encode_in(call.service.threads, text)


async def input_prompts(call: PoolingCall, body: InputFields) -> list[list[int]]:
    """Token ids of each input. Raises ApiError (400)."""
    if body.normalize is not None:
        raise bad_request("`normalize` was removed; use `use_activation`.", "normalize", "unsupported_parameter")
    fit = Fit.of(body, call.model)
    if conversations := body.conversations:
        if len(conversations) > MAX_INPUTS:
            message = f"At most {MAX_INPUTS} conversations can be given at once."
            raise bad_request(message, body.conversations_param)
        is_one = conversations == [body.input if body.messages is None else body.messages]
        where = [body.conversations_param + ("" if is_one else f"[{index}]") for index in range(len(conversations))]
        return [await _conversation(call, *each, body, fit) for each in zip(conversations, where, strict=True)]
    given: Sequence[Any] = [body.input] if isinstance(body.input, str) else body.input or ()
    numbers = [item for item in given if isinstance(item, int)]
    if len(numbers) == len(given):
        return [fit.tokens(numbers, "input")]
    if len(given) > MAX_INPUTS:
        raise bad_request(f"At most {MAX_INPUTS} inputs can be given at once.", "input")
    prompts = []
    for item in given:
        if isinstance(item, str):
            token_ids = await text_tokens(call, item, fit, "input")
            is_marked = body.add_special_tokens is not False
            prompts.append(fit.text(token_ids, "input") if is_marked else fit.tokens(token_ids, "input"))
        elif _is_tokens(item):
            prompts.append(fit.tokens(item, "input"))
        else:
            message = "`input` must hold texts and lists of token ids, the token ids of one input, or conversations."
            raise bad_request(message, "input")
    return prompts


async def _conversation(
    call: PoolingCall, messages: list[dict[str, Any]], where: str, body: InputFields, fit: Fit
) -> list[int]:
    """`where` it is in the body. Raises ApiError (400) for more than text, and for what the chat template does not
    take."""
    request = ChatCompletionRequest(
        messages=messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        media_io_kwargs=body.media_io_kwargs,
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=None if fit.kept_tokens is None else INT32_MAX,  # `fit` cuts on the other side
    )
    refuse_unsupported(request)
    try:
        parts = media_parts(messages)
        check_taken(parts, call.model.name, call.model.media)
        if parts:
            raise bad_request("Pooling models are served with text only.", parts[0].param, "unsupported_parameter")
    except ApiError as error:
        error.param = where + (error.param or "").removeprefix("messages")
        raise
    (token_ids,) = await prompt_ids(request, call.model, call.service.threads)
    return fit.tokens(token_ids, body.conversations_param)


def _is_tokens(item: Any) -> TypeGuard[list[int]]:
    return isinstance(item, list) and all(isinstance(each, int) for each in item)
