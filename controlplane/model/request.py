"""What a request is: its prompt tokens, the tokens emitted so far and its sampling parameters.

Any worker can continue a request from these three; placement, migration and recovery all rest on that.
"""

from dataclasses import dataclass, field
from enum import StrEnum


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
    """How the next tokens are chosen. Stop *strings* are the frontend's affair and do not appear here."""

    max_tokens: int
    """Counts every generated token, the ones emitted before a migration or recovery included."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 considers every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs; k: the chosen token's and those of the k most likely tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Resume:
    """What lets any frontend go on with the client's stream after the one that has it is gone."""

    client_request_id: str
    """Of the client's request, of which this is one choice."""
    ticket: bytes
    """The frontends' own; workers only keep it."""


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
    resume: Resume | None = None
    """None: it ends with its frontend."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate at one position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token's logprob and its most likely rivals, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one engine step added to one request."""

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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """All that one engine step brought forth: at most one delta per request."""

    deltas: tuple[TokenDelta, ...] = field(default=())
