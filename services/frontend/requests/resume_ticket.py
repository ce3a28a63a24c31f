"""What a worker keeps for the frontends, so that any of them can go on with a client's stream."""

from typing import Final

import msgspec

from services.frontend.parser_process.answer import ParserRequest
from services.frontend.requests.api_keys import ApiKey
from services.frontend.requests.plan import GenerationPlan
from services.frontend.requests.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest

MAX_TICKET_BYTES: Final = 64 * 1024
"""Of a larger one (an echoed prompt) the stream cannot be resumed."""


class ResumeTicket(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one client request. The prompts' tokens and the sampling parameters are the worker's own."""

    n: int
    echoes: list[str]
    """By prompt: what its answers begin with."""
    created_unix_s: int
    key_name: str = ""
    """Whose API key it was asked with; only that one may resume."""
    chat: ChatCompletionRequest | None = None
    """The body without its messages."""
    completion: CompletionRequest | None = None
    """The body without its prompt."""
    read_by: ParserRequest | None = None
    is_rendered_outside: bool = False
    """See `GenerationPlan`."""

    @property
    def choices(self) -> int:
        """How many choices the request has, of all its prompts together."""
        return self.n * len(self.echoes)

    @property
    def request(self) -> GenerationRequest:
        """The body without what it asks about."""
        request = self.chat or self.completion
        assert request is not None, "decode_ticket() has checked it"
        return request


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(ResumeTicket)
_LEFT_OUT: Final = frozenset(
    (
        *("metadata", "response_format", "structured_outputs", "documents", "prediction"),
        *("allowed_token_ids", "bad_words", "logit_bias", "logprob_token_ids", "stop_token_ids", "vllm_xargs"),
        "kv_transfer_params",
    )
)
"""What may be large, and is the worker's or over once the request was placed."""
_NO_MESSAGES: Final = [{"role": "assistant"}]


def encode_ticket(request: GenerationRequest, plan: GenerationPlan, key: ApiKey | None, created_unix_s: int) -> bytes:
    """For a streamed answer to `request`; empty if it cannot be resumed: logprobs of tokens before are not kept."""
    if not request.stream or plan.prompts[0].sampling.HasField("logprobs"):
        return b""
    ticket = ResumeTicket(
        n=plan.n,
        echoes=[prompt.echo for prompt in plan.prompts],
        created_unix_s=created_unix_s,
        key_name="" if key is None else key.name,
        chat=msgspec.structs.replace(request, messages=_NO_MESSAGES, **_without(request))
        if isinstance(request, ChatCompletionRequest)
        else None,
        completion=msgspec.structs.replace(request, prompt="", **_without(request))
        if isinstance(request, CompletionRequest)
        else None,
        read_by=plan.read_by,
        is_rendered_outside=plan.is_rendered_outside,
    )
    encoded = _ENCODER.encode(ticket)
    return encoded if len(encoded) <= MAX_TICKET_BYTES else b""


def _without(request: GenerationRequest) -> dict[str, None]:
    return dict.fromkeys(_LEFT_OUT.intersection(request.__struct_fields__))


def decode_ticket(ticket: bytes) -> ResumeTicket:
    """Raises ValueError for what no frontend of this version wrote."""
    try:
        decoded = _DECODER.decode(ticket)
    except msgspec.MsgspecError as error:
        raise ValueError(f"a ticket cannot be read: {error}") from error
    if (decoded.chat is None) == (decoded.completion is None):
        raise ValueError("a ticket must hold one request")
    return decoded
