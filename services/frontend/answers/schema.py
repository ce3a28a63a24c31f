"""What the endpoint answers, as OpenAI defines it and vLLM extends it: encoded from these types and documented by them.

Fields that are always null belong to parts of vLLM that a mesh does not have: its clients read them without asking
whether they are there.
"""

from importlib.metadata import version
from typing import Final, Literal

import msgspec

SYSTEM_FINGERPRINT: Final = f"penstock-{version('penstock')}"

FinishReason = Literal["stop", "length", "tool_calls"]
StopReason = int | str | None
"""The stop token or the stop string that ended an answer; null for the end of sequence and for all other ends."""


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    """Found in the prefix cache of the instance."""
    created_cache_tokens: int | msgspec.UnsetType | None = None
    """Of a chat: computed, and in whole blocks, so that later prompts find them there."""
    multimodal_tokens: dict[str, int] | msgspec.UnsetType | None = None
    """Of a chat with images or the like: those that stand for them, by modality."""

    def in_stream(self) -> "PromptTokensDetails":
        """As the last chunk of a stream says it, without what is null."""
        created = msgspec.UNSET if self.created_cache_tokens is None else self.created_cache_tokens
        return PromptTokensDetails(self.cached_tokens, created, self.multimodal_tokens or msgspec.UNSET)


class CompletionTokensDetails(msgspec.Struct):
    """What the generated tokens of a chat are."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all prompts and all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """Left out while a stream goes on."""
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType | None = msgspec.UNSET
    """Of a chat with a model that reasons."""

    def whole(self) -> "Usage":
        """As an answer that is not streamed says it: every field is there."""
        is_known = isinstance(self.completion_tokens_details, CompletionTokensDetails)
        return self if is_known else msgspec.structs.replace(self, completion_tokens_details=None)

    def in_stream(self) -> "Usage":
        """As the last chunk of a stream says it."""
        details = self.prompt_tokens_details
        if isinstance(details, msgspec.UnsetType):
            return self
        return msgspec.structs.replace(self, prompt_tokens_details=details.in_stream())

    @property
    def cached_tokens(self) -> int:
        """Found in the prefix cache; 0 while a stream goes on."""
        details = self.prompt_tokens_details
        return 0 if isinstance(details, msgspec.UnsetType) else details.cached_tokens


class PromptLogprob(msgspec.Struct):
    """A token at one place of the prompt; vLLM's form."""

    logprob: float
    rank: int | None
    """1: the likeliest; null: not among those that were asked for."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, place by place; null for the first token, which nothing comes before."""


class TopLogprob(msgspec.Struct):
    """A candidate at one position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The chosen token and its rivals."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Logprobs of a chat choice."""

    content: list[ChatTokenLogprob]


class CalledFunction(msgspec.Struct):
    """What is to be called."""

    name: str
    arguments: str
    """JSON, unless the answer was cut off; not checked against the tool's schema."""


class ToolCall(msgspec.Struct):
    """A call that the model asks for."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """The message that the model wrote."""

    content: str | None
    """Null where there is nothing but calls or reasoning."""
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    """What the model thought before it answered."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One of the `n` answers to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason = None
    token_ids: list[int] | None = None
    """With `return_token_ids`: the answer's, the one that ended it included."""
    routed_experts: None = None


class TierFacts(msgspec.Struct):
    """What came of asking a tier of a cascade."""

    model: str
    score: float | None
    """0 to 100; null where its answer was not judged."""
    judge: str | None
    """Who gave the score, or why nobody did."""
    seconds: float | None
    """It took, until it was cut where it was; null where it failed."""
    prompt_tokens: int
    completion_tokens: int
    failure: str | None = None
    """Why it gave no answer."""
    given_up: bool = False
    """Its answer was not written to its end, because it could not score enough any more."""
    cut: bool = False
    """Its answer was not there by the request's deadline."""
    begun_ahead: bool = False
    """It was asked before the answer of the tier before was decided."""
    abandoned: bool = False
    """It was asked ahead and not needed: it was aborted, and its tokens count."""


class CascadeFacts(msgspec.Struct):
    """How a cascade came to its answer."""

    tier: str
    """The model whose answer this is."""
    because: str
    """score, accepts_all, last_tier, deadline, judge_down or tier_failed."""
    compromise: bool
    """Whether the cascade would have gone on, had it been able to."""
    seconds: float | None
    """From the request's arrival; null in a stream's chunks while the answer is being written."""
    tiers: list[TierFacts]
    """All that were asked, in turn, one that was asked again twice; while the answer is being written, those before."""


class ChatCompletion(msgspec.Struct):
    """POST /v1/chat/completions, not streamed"""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: None = None
    system_fingerprint: str = SYSTEM_FINGERPRINT
    prompt_logprobs: PromptLogprobs | None = None
    """Where they were asked for."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""
    prompt_text: str | None = None
    """With `return_prompt_text`: what the chat template made of the conversation."""
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None
    penstock: CascadeFacts | msgspec.UnsetType = msgspec.UNSET
    """How a cascade came to the answer; left out where a model was asked."""


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a called function."""

    name: str | None = None
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a call; id, type and name come with the first one."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason | msgspec.UnsetType = msgspec.UNSET
    """With the last chunk of the choice."""
    token_ids: list[int] | msgspec.UnsetType | None = None
    """With `return_token_ids`: those that came since the last chunk of this choice. The first chunk has no such
    field."""


class ChatCompletionChunk(msgspec.Struct):
    """POST /v1/chat/completions, streamed: `data: ` and one of these, then `data: [DONE]`"""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | msgspec.UnsetType = msgspec.UNSET
    """In the last chunk."""
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    """In the first chunk; null without `return_token_ids`."""
    prompt_text: str | msgspec.UnsetType | None = msgspec.UNSET
    """In the first chunk; null without `return_prompt_text`."""
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    """With `stream_options.include_usage` on the last chunk, with `continuous_usage_stats` on every one."""
    penstock: CascadeFacts | msgspec.UnsetType = msgspec.UNSET
    """Only of a cascade: in the first chunk as far as it is known, and whole from the last token on."""


class CompletionLogprobs(msgspec.Struct):
    """Logprobs of a completion choice, position by position."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One answer, or its part of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`; of a stream, in the first chunk of each choice."""
    token_ids: list[int] | None = None
    """With `return_token_ids`: those that came since the last chunk of this choice."""
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET
    """Where they were asked for; chunks have no such field."""
    routed_experts: msgspec.UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct):
    """POST /v1/completions; streamed, each chunk is one of these"""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    service_tier: msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType = msgspec.UNSET
    """In the last chunk of a stream."""
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: msgspec.UnsetType | None = msgspec.UNSET
    ec_transfer_params: msgspec.UnsetType | None = msgspec.UNSET
    metrics: msgspec.UnsetType | None = msgspec.UNSET
    penstock: CascadeFacts | msgspec.UnsetType = msgspec.UNSET
    """How a cascade came to the answer; left out where a model was asked."""


class ModelFacts(msgspec.Struct):
    """What OpenAI's form of a model has no place for."""

    vocab_size: int
    """Token ids that a prompt may hold: 0 to vocab_size - 1."""
    tasks: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Of a pooling model: what can be asked of it, by vLLM's names."""
    tiers: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Of a cascade: its models, smallest first."""
    sampling_defaults: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """Sampling parameters of requests that leave them out, where they are not vLLM's."""


class ModelPermission(msgspec.Struct):
    """What may be done with a model."""

    id: str
    created: int
    object: Literal["model_permission"] = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class Model(msgspec.Struct):
    """A model that can be asked for."""

    id: str
    created: int
    max_model_len: int
    """Tokens of prompt and answer together."""
    penstock: ModelFacts
    object: Literal["model"] = "model"
    owned_by: str = "penstock"
    root: str | None = None
    """Of a LoRA adapter where it was loaded from, of any other model its name."""
    parent: str | None = None
    """Of a LoRA adapter: the model that it changes."""
    permission: list[ModelPermission] = []

    def __post_init__(self) -> None:
        """Says who may do what, in OpenAI's old form, which some clients read."""
        self.root = self.root or self.id
        self.permission = [ModelPermission(f"modelperm-{self.id}", self.created)]


class ModelList(msgspec.Struct):
    """GET /v1/models"""

    data: list[Model]
    object: Literal["list"] = "list"


class ErrorObject(msgspec.Struct):
    """What went wrong, in OpenAI's form. `param` names the culprit in the body; programs go by `code`."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """The body of every answer with a status of 400 or more, and of a stream's last event when it fails."""

    error: ErrorObject
