"""From a client's request to what the engines are asked: token ids, sampling parameters, choices."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from controlplane.model.request import SamplingParams
from controlplane.model.sampling import INT32_MAX
from controlplane.sampling_message import sampling_message
from mesh.runtime import Threads
from penstock.v1 import request_pb2
from services.frontend.errors import bad_request, context_too_long, out_of_vocabulary
from services.frontend.media.parts import check_taken, media_parts
from services.frontend.media.service import ExpandedMedia, MediaLoader
from services.frontend.parser_process.answer import ParserRequest
from services.frontend.requests.content import text_of
from services.frontend.requests.models import ServedModel
from services.frontend.requests.rendering import check_length, render_chat
from services.frontend.requests.sampling import values_in
from services.frontend.requests.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    SamplingFields,
)
from services.frontend.requests.strict_tools import strict_structure
from services.frontend.requests.structure import check_large_schemas, structure_of
from services.frontend.requests.tools import (
    calls_structure,
    check_tools,
    earlier_calls,
    effective_choice,
    parser_body,
)

COMPLETION_MAX_TOKENS = 16
"""OpenAI's documented default for completions."""
MAX_LOGIT_BIASES = 1024
MAX_BIAS = 100.0
"""OpenAI's bound; vLLM cuts what is beyond."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and what its answers may hold."""

    token_ids: list[int]
    sampling: request_pb2.SamplingParams
    """Without the seed, which differs by choice."""
    echo: str = ""
    """Text that every answer begins with."""
    media: request_pb2.PromptMedia | None = None
    """Images and the like, of which some of `token_ids` are."""
    text: str | None = None
    """What a conversation was rendered to, where the client wants it."""

    @property
    def media_tokens(self) -> Mapping[str, int]:
        """By modality: tokens that stand for images and the like."""
        if self.media is None:
            return {}
        counts: Counter[str] = Counter()
        modality_of = {item.media_hash: item.modality for item in self.media.items}
        for span in self.media.spans:
            counts[modality_of[span.media_hash]] += span.length
        return counts


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A checked request. Choice i belongs to prompt i // n."""

    request_id: str
    model: ServedModel
    prompts: tuple[Prompt, ...]
    n: int
    seed: int | None
    stop: tuple[str, ...]
    priority: int
    cache_salt: str = ""
    ticket: bytes = b""
    """For another frontend to go on with the stream; empty: it ends with this one."""
    structure_param: str = ""
    """The parameter that the text has to fit something by, if it has."""
    read_by: ParserRequest | None = None
    """What the parser process reads the answers by; None: this frontend does."""
    is_rendered_outside: bool = False
    """vLLM made the prompt, in that process."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def vllm_parts(self) -> str:
        """What vLLM's own parts do of it, for `explain`; empty: nothing."""
        parts = ("prompt", self.is_rendered_outside), ("answer", self.read_by is not None)
        return ", ".join(name for name, is_theirs in parts if is_theirs)

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens and the request's stop tokens: one that ended an answer is not shown."""
        return self.model.text.eos_token_ids.union(self.prompts[0].sampling.stop_token_ids)

    def sampling_of(self, choice: int) -> request_pb2.SamplingParams:
        """The sampling parameters of one choice: seed + its place among the choices of its prompt."""
        sampling = request_pb2.SamplingParams()
        sampling.CopyFrom(self.prompts[choice // self.n].sampling)
        if self.seed is not None:
            sampling.seed = self.seed + choice % self.n
        return sampling

    def engine_request_id(self, choice: int) -> str:
        """The first choice has the client's request id, so that a lone one is found by it everywhere."""
        return self.request_id if choice == 0 else f"{self.request_id}-{choice}"


async def plan_request(
    request: GenerationRequest,
    request_id: str,
    model: ServedModel,
    max_choices: int,
    threads: Threads,
    media: MediaLoader | None = None,
) -> GenerationPlan:
    """Render, tokenise and check. `media` loads images and the like; None: they are refused. Raises ApiError (400,
    `param` set) for what this model cannot serve."""
    await check_large_schemas(request.schemas(), threads)
    if isinstance(request, ChatCompletionRequest):
        return await plan_chat(request, request_id, model, threads, media)
    return await plan_completion(request, request_id, model, max_choices, threads)


async def prompt_ids(request: GenerationRequest, model: ServedModel, threads: Threads) -> list[list[int]]:
    """The prompts of a request that somebody else serves, as tokens: those of a conversation with its images as the
    placeholders that stand for them. Nothing else is checked. Raises ApiError (400) where there is no such prompt."""
    if isinstance(request, ChatCompletionRequest):
        media_parts(request.messages)
        rendered = await render_chat(request, model, threads)
        max_tokens = request.max_completion_tokens or request.max_tokens
        return [_truncated(rendered.token_ids, request, model, max_tokens)]
    wholes = [await _prompt_ids(each, request, model, threads) for each in _prompts(request.prompt)]
    return [_truncated(whole, request, model, request.max_tokens) for whole in wholes]


async def plan_chat(
    request: ChatCompletionRequest,
    request_id: str,
    model: ServedModel,
    threads: Threads,
    media: MediaLoader | None = None,
) -> GenerationPlan:
    """Raises ApiError (400) for what this model cannot serve."""
    parts = media_parts(request.messages)
    check_taken(parts, model.name, model.media)
    structure, structure_param = _chat_structure(request, model)
    read_by: ParserRequest | None = None
    if model.outside is not None and (request.tools or model.outside.reads_reasoning):
        read_by, structure = await model.outside.prepare(parser_body(request), earlier_calls(request.messages))
    logprobs = _chat_logprobs(request)
    rendered = await render_chat(request, model, threads)
    _check_choice(request, model)
    token_ids = rendered.token_ids
    expanded: ExpandedMedia | None = None
    if parts:
        if media is None:
            raise bad_request("Images, recordings and films are not taken here.", parts[0].param)
        if request.truncate_prompt_tokens is not None:
            message = "A prompt with images, recordings or films cannot be truncated."
            raise bad_request(message, "truncate_prompt_tokens", "unsupported_parameter")
        expanded = await media.expand(model.engine_model, parts, token_ids, request.n or 1)
        token_ids = expanded.token_ids
    max_tokens = request.max_completion_tokens or request.max_tokens
    if max_tokens is None and (default := model.sampling_defaults.get("max_tokens")) is not None:
        max_tokens = max(1, min(default, model.max_model_len_tokens - len(token_ids)))
    is_marked = not rendered.is_by_vllm and bool(request.add_special_tokens)
    token_ids = _truncated(token_ids, request, model, max_tokens, is_marked=is_marked)
    sampling = _sampling(request, model, len(token_ids), max_tokens, logprobs, structure, "messages")
    prompt = Prompt(
        token_ids,
        sampling,
        _echoed_message(request),
        None if expanded is None else expanded.media,
        rendered.text if request.return_prompt_text else None,
    )
    plan = _plan(request, request_id, model, (prompt,), structure_param)
    if read_by is None and not rendered.is_by_vllm:
        return plan
    return replace(plan, read_by=read_by, is_rendered_outside=rendered.is_by_vllm)


async def plan_completion(
    request: CompletionRequest, request_id: str, model: ServedModel, max_choices: int, threads: Threads
) -> GenerationPlan:
    """Raises ApiError (400) for what this model cannot serve."""
    sources = _prompts(request.prompt)
    if len(sources) * (request.n or 1) > max_choices:
        raise bad_request(f"At most {max_choices} answers (prompts times n) can be asked for at once.", "prompt")
    structure, structure_param = structure_of(request.response_format, request.structured_outputs)
    # Engines generate one token at least; it is not shown where none is wanted.
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens or 1
    prompts = []
    for source in sources:
        whole = await _prompt_ids(source, request, model, threads)
        is_marked = isinstance(source, str) and request.add_special_tokens is not False
        token_ids = _truncated(whole, request, model, max_tokens, is_marked=is_marked)
        echo = ""
        if request.echo and not request.return_token_ids:  # vLLM tells the prompt's tokens in its place
            echo = source if isinstance(source, str) else model.text.decode(token_ids, skip_special_tokens=False)
        sampling = _sampling(request, model, len(token_ids), max_tokens, request.logprobs, structure, "prompt")
        prompts.append(Prompt(token_ids, sampling, echo))
    return _plan(request, request_id, model, tuple(prompts), structure_param)


def _plan(
    request: SamplingFields, request_id: str, model: ServedModel, prompts: tuple[Prompt, ...], structure_param: str
) -> GenerationPlan:
    return GenerationPlan(
        request_id,
        model,
        prompts,
        request.n or 1,
        request.seed,
        request.stop_strings,
        request.priority or 0,
        request.cache_salt or "",
        structure_param=structure_param,
    )


def _check_choice(request: ChatCompletionRequest, model: ServedModel) -> None:
    """Raises ApiError (400) where nobody could tell what the model calls by itself."""
    if request.tools and request.tool_choice in (None, "auto") and not model.tool_call_parser:
        message = (
            f"`{model.name}` is served without --tool-call-parser, so that what it calls by itself is not understood: "
            "set `tool_choice` to `required`, `none` or a function, or start its workers with the option."
        )
        raise bad_request(message, "tool_choice")


def _chat_structure(request: ChatCompletionRequest, model: ServedModel) -> tuple[str, str]:
    """What the text has to fit, and by which parameter."""
    structure, param = structure_of(request.response_format, request.structured_outputs)
    tools = request.tools or []
    check_tools(tools, request.tool_choice)
    choice = effective_choice(tools, request.tool_choice)
    if calls := calls_structure(tools, choice, is_parallel=request.parallel_tool_calls is not False):
        return calls, "tool_choice"
    if choice == "auto" and not structure and (strict := strict_structure(tools, model.tool_call_parser)):
        return strict, "tools"
    return structure, param


def _echoed_message(request: ChatCompletionRequest) -> str:
    """vLLM's reading: the last message belongs to the answer if it is of the same role."""
    last = request.messages[-1]
    return text_of(last) if request.echo and last["role"] == "assistant" else ""


def _chat_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    if not prompt:
        raise bad_request("`prompt` must not be empty.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, int)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(ids) == len(prompt):
        return [ids]
    if len(texts) == len(prompt):
        return texts
    if len(lists) == len(prompt):
        return lists
    raise bad_request("`prompt` must hold only texts, only token ids, or only lists of token ids.", "prompt")


def _truncated(
    token_ids: list[int],
    request: SamplingFields,
    model: ServedModel,
    max_tokens: int | None,
    *,
    is_marked: bool = False,
) -> list[int]:
    """What `truncate_prompt_tokens` leaves of a prompt. `is_marked`: the tokens that the model wants around a text are
    around it, and stay unless the client says from which side tokens are taken, as in vLLM."""
    limit = request.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit == 0:
        raise bad_request("A prompt must keep at least one token.", "truncate_prompt_tokens")
    if limit < 0:
        limit = max(1, model.max_model_len_tokens - (max_tokens or 1))
    if len(token_ids) <= limit:
        return token_ids
    if is_marked and request.truncation_side is None and (marks := len(model.text.with_added_tokens([]))):
        bare = model.text.without_added_tokens(token_ids)
        return model.text.with_added_tokens(bare[len(bare) - max(0, limit - marks) :])
    return token_ids[:limit] if request.truncation_side == "right" else token_ids[-limit:]


async def _prompt_ids(
    source: str | list[int], request: CompletionRequest, model: ServedModel, threads: Threads
) -> list[int]:
    if isinstance(source, str):
        check_length(source, request, model, "prompt")
        token_ids = await model.text.chunked.encode_in(threads, source)
        if request.add_special_tokens is not False:
            token_ids = model.text.with_added_tokens(token_ids)
    else:
        token_ids = source
        if token_ids and max(token_ids) >= model.text.vocabulary_size:
            raise out_of_vocabulary(max(token_ids), model.name, model.text.vocabulary_size, "prompt")
    if not token_ids:
        raise bad_request("A prompt must hold at least one token.", "prompt")
    return token_ids


def _sampling(
    request: SamplingFields,
    model: ServedModel,
    prompt_tokens: int,
    max_tokens: int | None,
    logprobs: int | None,
    structure: str,
    prompt_param: str,
) -> request_pb2.SamplingParams:
    if request.logprob_token_ids:  # type: ignore[attr-defined]
        _check_named_logprobs(request, logprobs)
    left_tokens = model.max_model_len_tokens - prompt_tokens
    if left_tokens < (max_tokens or 1):
        raise context_too_long(prompt_tokens, max_tokens or 1, model.max_model_len_tokens, prompt_param)
    sampling = SamplingParams(
        max_tokens=max_tokens or left_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(request, model),
        bad_words=_bad_words(request, model),
        structured_outputs=structure,
        vllm_xargs=msgspec.json.encode(request.vllm_xargs).decode() if request.vllm_xargs else "",
        **{**_without_length(model.sampling_defaults), **values_in(request)},
    )
    if isinstance(request, CompletionRequest) and request.echo and sampling.prompt_logprobs is None:
        sampling = replace(sampling, prompt_logprobs=logprobs)
    for name, token_ids in sampling.listed_token_ids.items():
        if token_ids and max(token_ids) >= model.text.vocabulary_size:
            raise out_of_vocabulary(max(token_ids), model.name, model.text.vocabulary_size, name)
    if sampling.thinking_token_budget is not None and not model.reasoning_parser:
        message = f"`{model.name}` does not reason, as far as its workers know: they have no `reasoning_parser`."
        raise bad_request(message, "thinking_token_budget")
    if sampling.min_tokens > sampling.max_tokens:
        message = f"`min_tokens` must be at most max_tokens, which is {sampling.max_tokens}."
        raise bad_request(message, "min_tokens")
    return sampling_message(sampling)


def _check_named_logprobs(request: SamplingFields, logprobs: int | None) -> None:
    """vLLM's rules. Raises ApiError (400)."""
    if logprobs is None:
        raise bad_request("`logprob_token_ids` needs `logprobs`.", "logprob_token_ids")
    if isinstance(request, CompletionRequest) and request.echo and request.max_tokens == 0:
        message = "`logprob_token_ids` are of generated tokens, and an echo with `max_tokens: 0` has none."
        raise bad_request(message, "logprob_token_ids")


def _without_length(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`max_tokens` is a default of its own: /v1/completions has another one, and the context limits it."""
    return {name: value for name, value in defaults.items() if name != "max_tokens"}


def _bad_words(request: SamplingFields, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled by itself and behind a blank, if that takes as many tokens: vLLM's reading of them."""
    words: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(request.bad_words or ()):
        bare = tuple(model.text.encode(word.lstrip()))
        behind_blank = tuple(model.text.encode(" " + word.lstrip()))
        if not bare:
            raise bad_request("A bad word must hold at least one token.", f"bad_words[{index}]")
        words[bare] = None
        if len(behind_blank) == len(bare) and behind_blank[0] != bare[0]:
            words[behind_blank] = None
    return tuple(words)


def _is_number(token_id: str) -> bool:
    return token_id.isascii() and token_id.isdecimal() and len(token_id) <= len(str(INT32_MAX))


def _logit_bias(request: SamplingFields, model: ServedModel) -> tuple[tuple[int, float], ...]:
    biases = request.logit_bias or {}
    if len(biases) > MAX_LOGIT_BIASES:
        raise bad_request(f"At most {MAX_LOGIT_BIASES} tokens can be biased.", "logit_bias")
    if odd := [token_id[:32] for token_id in biases if not _is_number(token_id)]:
        raise bad_request(f"Not the ids of tokens: {', '.join(f'`{each}`' for each in odd[:16])}.", "logit_bias")
    for token_id in biases:
        if int(token_id) >= model.text.vocabulary_size:
            raise out_of_vocabulary(int(token_id), model.name, model.text.vocabulary_size, "logit_bias")
    return tuple((int(token_id), max(-MAX_BIAS, min(MAX_BIAS, bias))) for token_id, bias in biases.items())
