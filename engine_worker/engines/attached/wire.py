"""What is said to an OpenAI-compatible server, and what its answers mean. Pure.

Fields and formats are those of vLLM 0.19 to 0.32 (`vllm/entrypoints/openai/completion/protocol.py`, `serving.py`).
Servers of others ignore or lack some of them, which `Abilities` says.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from controlplane.model.request import EngineRequest, FinishReason, PositionLogprobs, SamplingParams, TokenLogprob
from controlplane.model.sampling import parameters
from engine_worker.engines.vllm.checkpoint import Vocabulary
from engine_worker.engines.vllm.sampling import sampling_arguments
from mesh.errors import ConfigurationError, EngineFailed

_FINISH_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_STANDARD: Final = frozenset("max_tokens temperature top_p presence_penalty frequency_penalty seed logit_bias".split())
"""What OpenAI's own API has; all that a server other than vLLM is asked for."""
_ALWAYS: Final = frozenset(
    "max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty".split()
)
"""Sent with their defaults too: a server may have others of its own, from the model's generation_config.json."""
_SAMPLE: Final = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ENGINE: Final = re.compile(r'(?:^|,)engine="(\d+)"')
_TOKEN_ID: Final = re.compile(r"token_id:(\d+)\Z")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An entry of /v1/models."""

    name: str
    """What requests call it."""
    root: str
    """vLLM: what it was loaded from, a directory or a name of the Hugging Face Hub; else empty."""
    max_model_len: int | None
    is_vllm: bool


@dataclass(frozen=True, slots=True)
class Abilities:
    """How a server is talked to."""

    is_vllm: bool
    takes_tokens: bool
    """Prompts as token ids; as text if not."""
    tells_tokens: bool
    """Token ids of the answer; its text is tokenised here if not."""

    @property
    def label(self) -> str:
        """For `penstock status`."""
        kind = "vllm" if self.is_vllm else "openai"
        return f"attached-{kind}" if self.takes_tokens and self.tells_tokens else f"attached-{kind}-by-text"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a stream."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None


class StreamError(EngineFailed):
    """What the server said instead of an answer, or in the middle of one."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the server answers {status}: {reason}")
        self.status = status
        self.reason = reason

    @property
    def is_request(self) -> bool:
        """Whether the request is at fault, and would be anywhere."""
        return self.status in (400, 413, 422)


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """What vLLM's /metrics say of one engine core, or of all together."""

    running_requests: int = 0
    waiting_requests: int = 0
    kv_usage: float = 0.0
    """Share of its blocks that requests hold."""
    preemptions_total: int = 0
    block_size: int = 0
    kv_blocks: int = 0
    """Of all its cores, whichever was asked for; 0 where it does not say."""
    cores: int = 0
    """That it has; 0 where it does not say."""
    started_s: float = 0.0
    """When its process began, in Unix time: another one is another life of it."""
    asked_s: float = 0.0
    """When it was asked for them, by the clock of the worker."""


def served_models(content: bytes) -> tuple[ServedModel, ...]:
    """The body of GET /v1/models. Raises `EngineFailed` for anything else."""
    try:
        entries = json.loads(content)["data"]
        return tuple(
            ServedModel(
                name=entry["id"],
                root=entry.get("root") or "",
                max_model_len=entry.get("max_model_len"),
                is_vllm=entry.get("owned_by") == "vllm",
            )
            for entry in entries
            if not entry.get("parent")
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineFailed(f"its /v1/models is no list of models as OpenAI's is: {error!r}") from error


def choose_model(models: Sequence[ServedModel], wanted: str) -> ServedModel:
    """The one of that name, or the first. Raises `ConfigurationError`."""
    found = next((model for model in models if wanted in ("", model.name)), None)
    if found is None:
        names = ", ".join(model.name for model in models) or "none"
        raise ConfigurationError(f"the server has no model {wanted!r}; it has {names}")
    return found


def probe_body(model: str, prompt: Sequence[int] | str) -> dict[str, Any]:
    """A request of one token, which shows what the server takes and tells."""
    return {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}


def tells_tokens(content: bytes) -> bool:
    """Whether the answer to a probe has token ids."""
    try:
        return isinstance(json.loads(content)["choices"][0].get("token_ids"), list)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def refusal(request: EngineRequest, abilities: Abilities) -> str | None:
    """Why an attached server cannot do what the request asks, where other engines could; None if it can."""
    sampling = request.sampling
    if sampling.bad_words:
        return "an attached server takes bad_words as text only, and the mesh has them as tokens"
    if sampling.prompt_logprobs is not None:
        return "an attached server streams, and tells no prompt_logprobs then"
    if sampling.structured_outputs and request.emitted_token_ids:
        return "structured output cannot go on at an attached server, which does not know what was emitted before"
    if not abilities.is_vllm:
        default = SamplingParams(max_tokens=sampling.max_tokens)
        for name in parameters(SamplingParams).keys() - _STANDARD:
            if getattr(sampling, name) != getattr(default, name):
                return f"the attached server is no vLLM, and is not asked for {name}"
    return None


def completion_body(
    request: EngineRequest, model: str, abilities: Abilities, vocabulary: Vocabulary, prompt: Sequence[int] | str
) -> dict[str, Any]:
    """The body of POST /v1/completions for what is left of a request. `prompt`: its context, as the server takes it."""
    arguments = sampling_arguments(request, vocabulary)
    body: dict[str, Any] = {"model": model, "prompt": prompt, "stream": True}
    if not abilities.is_vllm:
        named = {name: arguments[name] for name in _STANDARD if arguments[name] is not None}
        return body | named | ({"add_special_tokens": False} if isinstance(prompt, str) else {})
    default = SamplingParams(max_tokens=1)
    for name in parameters(SamplingParams).keys() - {"vllm_xargs", "bad_words", "prompt_logprobs"}:
        value = arguments[name]
        if value is not None and (name in _ALWAYS or value != getattr(default, name)):
            body[name] = value
    if "logprob_token_ids" in body:  # a server wants both
        body["logprobs"] = request.sampling.logprobs
    if body.get("logprobs") is not None:
        body["return_tokens_as_token_ids"] = True
    if arguments["extra_args"]:
        body["vllm_xargs"] = arguments["extra_args"]
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return body | {"return_token_ids": True, "add_special_tokens": False}


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Message(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_MESSAGE = msgspec.json.Decoder(_Message)


def parse_chunk(data: bytes, sampling: SamplingParams | None) -> Chunk | None:
    """The data of one event; None where it brings nothing. `sampling` says which logprobs were asked for; None: none.

    Raises `StreamError` for an error that came in the middle of a stream, and `EngineFailed` for what is no chunk.
    """
    try:
        message = _MESSAGE.decode(data)
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"the server sent {data[:80]!r}, which is no chunk of a completion: {error}") from error
    if message.error is not None:
        raise error_of(500, data)
    if not message.choices:
        return None
    choice = message.choices[0]
    reason = choice.finish_reason
    return Chunk(
        token_ids=tuple(choice.token_ids or ()),
        text=choice.text,
        logprobs=_positions(choice, sampling),
        finish_reason=None if reason is None else _FINISH_REASONS.get(reason, FinishReason.ERROR),
    )


def error_of(status: int, content: bytes) -> StreamError:
    """An error's body, in OpenAI's form or any other."""
    try:
        body = json.loads(content)
        error = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(error, dict):
            code = error.get("code")
            return StreamError(code if isinstance(code, int) else status, str(error.get("message", error))[:500])
        return StreamError(status, str(error)[:500])
    except ValueError:
        return StreamError(status, content[:500].decode("utf-8", "replace") or "nothing besides")


def parse_metrics(text: str, core: int | None = None) -> ServerMetrics:
    """The text of /metrics; zeros for what is not in it. `core`: of which engine core; None: of all."""
    cores: set[str] = set()
    sums: dict[str, float] = {}
    usages: list[float] = []
    block_size = kv_blocks = 0
    for line in text.splitlines():
        if not line.startswith(("vllm:", "process_start_time_seconds")) or (match := _SAMPLE.match(line)) is None:
            continue
        name, labels, value = match[1], match[2] or "", _number(match[3])
        engine = found[1] if (found := _ENGINE.search(labels)) else ""
        if name == "vllm:num_requests_running":
            cores.add(engine)
        if name == "vllm:cache_config_info":
            info = dict(_LABEL.findall(labels))
            block_size = _whole(info.get("block_size", ""))
            # Of a server with data parallelism each core is said to have the blocks of all (vLLM 0.32).
            kv_blocks = max(kv_blocks, _whole(info.get("num_gpu_blocks", "")))
        elif engine and core is not None and engine != str(core):
            continue
        elif name == "vllm:kv_cache_usage_perc":
            usages.append(value)
        else:
            sums[name] = sums.get(name, 0.0) + value
    return ServerMetrics(
        running_requests=round(sums.get("vllm:num_requests_running", 0.0)),
        waiting_requests=round(sums.get("vllm:num_requests_waiting", 0.0)),
        kv_usage=sum(usages) / len(usages) if usages else 0.0,
        preemptions_total=round(sums.get("vllm:num_preemptions_total", 0.0)),
        block_size=block_size,
        kv_blocks=kv_blocks,
        cores=len(cores),
        started_s=sums.get("process_start_time_seconds", 0.0),
    )


def _positions(choice: _Choice, sampling: SamplingParams | None) -> tuple[PositionLogprobs, ...]:
    logprobs = choice.logprobs
    if sampling is None or sampling.logprobs is None or logprobs is None:
        return ()
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return tuple(
        PositionLogprobs(TokenLogprob(_token_id(token), value if value is not None else 0.0), _top(top, sampling))
        for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, tops, strict=True)
    )


def _top(top: Mapping[str, float] | None, sampling: SamplingParams) -> tuple[TokenLogprob, ...]:
    """The likeliest; a server adds the chosen token where it is none of them. Named tokens come as they are wanted."""
    told = tuple(TokenLogprob(_token_id(token), value) for token, value in (top or {}).items())
    if sampling.logprob_token_ids:
        return told
    return tuple(sorted(told, key=lambda each: -each.logprob)[: sampling.logprobs])


def _token_id(token: str) -> int:
    match = _TOKEN_ID.match(token)
    if match is None:
        raise EngineFailed(f"the server names the token {token!r} by its text, although token ids were asked for")
    return int(match[1])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0
