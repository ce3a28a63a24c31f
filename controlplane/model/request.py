"""What a request is: its prompt tokens, the tokens emitted so far and its sampling parameters.

Any worker can continue a request from these three; placement, migration and recovery all rest on that.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from controlplane.model.adapter import Adapter
from controlplane.model.media import MediaSpan, PromptMedia
from controlplane.model.sampling import INT32_MAX, TOKEN_IDS, Bounds, parameter, parameters

MAX_NAMED_LOGPROBS: Final = 128
"""vLLM takes so many `logprob_token_ids`."""


class FinishReason(StrEnum):
    """Why a request produces no more tokens."""

    STOP = "stop"
    """The end-of-sequence token or one of `stop_token_ids` was sampled."""
    LENGTH = "length"
    """`max_tokens` or the model's context length was reached."""
    ABORT = "abort"
    """Whoever submitted the request took it back."""
    ERROR = "error"
    """The engine could not go on; the accompanying message says why."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next tokens are chosen. This is the table of parameters: `controlplane.model.sampling` says what follows
    from a line of it. Stop *strings* are the frontend's affair and do not appear here."""

    max_tokens: int = parameter(is_in_body=False)
    """Counts every generated token, the ones emitted before a migration or recovery included."""
    min_tokens: int = parameter(0, "Tokens that are generated before the answer may end.", Bounds(0, INT32_MAX))
    temperature: float = parameter(1.0, "0 always takes the likeliest token.", Bounds(0, 2))
    top_p: float = parameter(
        1.0, "Consider the likeliest tokens that have this probability together.", Bounds(0, 1, is_low_open=True)
    )
    top_k: int = parameter(
        0,
        "Consider so many of the likeliest tokens; 0 and -1 consider every token.",
        Bounds(-1, INT32_MAX),
        from_body=lambda top_k: max(0, top_k),
    )
    min_p: float = parameter(
        0.0, "Consider tokens that are at least this likely, relative to the likeliest.", Bounds(0, 1)
    )
    presence_penalty: float = parameter(
        0.0, "Taken off the logits of tokens that the answer holds already.", Bounds(-2, 2)
    )
    frequency_penalty: float = parameter(
        0.0, "Taken off the logits of tokens for each time that the answer holds them already.", Bounds(-2, 2)
    )
    repetition_penalty: float = parameter(
        1.0,
        "Divides the logits of tokens that prompt or answer hold already; below 1 it favours them.",
        Bounds(0, 100, is_low_open=True),
    )
    seed: int | None = parameter(None, is_in_body=False)
    """Of this choice: a client's seed and the choice's number."""
    stop_token_ids: tuple[int, ...] = parameter((), "Tokens that end the answer; they are not shown.", TOKEN_IDS)
    thinking_token_budget: int | None = parameter(
        None,
        "End the reasoning behind so many tokens, of a model that reasons; -1: whenever it ends by itself.",
        Bounds(-1, INT32_MAX),
        from_body=lambda budget: None if budget == -1 else budget,
    )
    ignore_eos: bool = parameter(False, "Go on behind an end-of-sequence token.")
    logprobs: int | None = parameter(None, is_in_body=False)
    """None: no logprobs; k: the chosen token's and those of the k most likely tokens, unless `logprob_token_ids` says
    of which ones."""
    logprob_token_ids: tuple[int, ...] = parameter(
        (),
        "With `logprobs`: those of the chosen token and of these, instead of the likeliest.",
        TOKEN_IDS,
        max_items=MAX_NAMED_LOGPROBS,
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter((), is_in_body=False)
    """From token id to what is added to its logit, by token id."""
    allowed_token_ids: tuple[int, ...] = parameter(
        (), "Nothing but these tokens is generated.", TOKEN_IDS, min_items=1, max_items=16_384
    )
    bad_words: tuple[tuple[int, ...], ...] = parameter((), is_in_body=False)
    """Sequences of tokens of which the last one is never generated behind the others."""
    prompt_logprobs: int | None = parameter(
        None, "Logprobs of each token of the prompt, and of so many of the likeliest at its place.", Bounds(0, 20)
    )
    structured_outputs: str = parameter("", is_in_body=False)
    """What the answer's text must fit: the fields of vLLM's `StructuredOutputsParams` (`json`, `regex`, `choice`,
    `grammar`, ...) as a JSON object. Empty: anything."""
    vllm_xargs: str = parameter("", is_in_body=False)
    """A JSON object for custom logits processors and other plugins of vLLM, its `extra_args`. Empty: nothing."""

    @property
    def listed_token_ids(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters that are lists of tokens, by their names."""
        listed = (name for name, each in parameters(SamplingParams).items() if each.bounds is TOKEN_IDS)
        return {name: getattr(self, name) for name in listed}

    @property
    def named_token_ids(self) -> tuple[int, ...]:
        """Every token that a parameter names; an engine refuses one that its model does not have."""
        return (
            *(token_id for token_ids in self.listed_token_ids.values() for token_id in token_ids),
            *(token_id for token_id, _ in self.logit_bias),
            *(token_id for word in self.bad_words for token_id in word),
        )


@dataclass(frozen=True, slots=True)
class Resume:
    """What lets any frontend go on with the client's stream after the one that has it is gone."""

    client_request_id: str
    """Of the client's request, of which this is one choice."""
    ticket: bytes
    """The frontends' own; workers only keep it."""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """Another instance that has the KV of a prompt's first tokens, to be pulled before the rest is computed."""

    instance_id: str
    tokens: int
    comes_ms: int = 0
    """It is computing them, or loads them from its host's memory, for about so long; 0: it has them."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose account a request is served."""

    name: str = ""
    """Of the API key; empty without one."""
    share: float = 1.0
    """Of what is to be had where tenants compete, as a multiple of another's."""


NO_TENANT: Final = Tenant()
MAX_TURN: Final = (1 << 31) - 1


def engine_priority(priority: int, turn: int = 0) -> int:
    """What an engine orders requests by, lower first: priorities, and among equal ones turns. Fits into 64 bits."""
    return priority * (MAX_TURN + 1) + turn


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as an engine sees it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    emitted_token_ids: tuple[int, ...] = ()
    """Generated elsewhere already; the engine goes on after them and never emits them again."""
    priority: int = 0
    """Lower is served first, as in vLLM."""
    turn: int = 0
    """Among those of its priority, from 0 to `MAX_TURN`: lower is served first. The instance gives it."""
    tenant: Tenant = NO_TENANT
    resume: Resume | None = None
    """None: it ends with its frontend."""
    cache_salt: str = ""
    """Its blocks in the prefix cache are found by requests of the same salt only."""
    traceparent: str = ""
    """What its spans are a part of, as the W3C's header of this name says it; see `mesh.tracing`."""
    media: PromptMedia | None = None
    """What the prompt holds besides text; its tokens are among `prompt_token_ids`."""
    adapter: Adapter | None = None
    """The LoRA adapter that answers it; None: the model as it is."""

    @property
    def engine_priority(self) -> int:
        """Its priority and its turn."""
        return engine_priority(self.priority, self.turn)

    @property
    def media_spans(self) -> tuple[MediaSpan, ...]:
        """Where the prompt's tokens stand for media."""
        return () if self.media is None else self.media.spans

    @property
    def adapter_digest(self) -> str:
        """Of its adapter; empty without one."""
        return "" if self.adapter is None else self.adapter.digest


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A candidate token at one position, with its log-probability."""

    token_id: int
    logprob: float
    rank: int = 0
    """1: the likeliest of the vocabulary; 0: not known."""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token's logprob and its most likely rivals, best first; or behind its own those of the tokens that
    `logprob_token_ids` names."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens that one engine step added to one request."""

    request_id: str
    offset: int
    """Index, within all generated tokens of the request, of the first of `token_ids`."""
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    """As many as `token_ids` where logprobs were asked for, otherwise none."""
    finish_reason: FinishReason | None = None
    error: str = ""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; set on a request's first delta."""
    queued_ms: float | None = None
    """How long the request waited in the engine's queue; on its first delta, where the engine tells."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """Of the prompt's tokens but the first, which nothing comes before; on the first delta of a request that asked for
    them and has not emitted anything elsewhere."""
    may_go_elsewhere: bool = False
    """Of an error: this instance cannot serve the request now, and another one may."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """All that one engine step brought forth: at most one delta per request."""

    deltas: tuple[TokenDelta, ...] = field(default=())
