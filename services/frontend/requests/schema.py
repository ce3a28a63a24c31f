"""The bodies that clients send. Decoded, checked and documented (OpenAPI) from these types alone.

msgspec rather than pydantic: it decodes and checks a 32k-character request in some 20 microseconds, and a
prompt of token ids without one error object per id. A field that is unknown here is an error to msgspec, by which
`http.body` notices it, leaves it out as vLLM does, and has the client told: a parameter that is ignored in silence
gives another answer than the one asked for. Those that vLLM or OpenAI knows are named here, whether they have an
effect, have none, or are refused (`unsupported`). Sampling parameters that go to the engine as they are come from the
one table of them (`sampling`).
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from controlplane.model.sampling import INT32_MAX
from services.frontend.media.parts import MODALITY_OF
from services.frontend.requests.sampling import body_fields
from services.frontend.requests.structure import ResponseFormat, StructuredOutputs
from services.frontend.requests.tools import ToolChoice, Tools

if TYPE_CHECKING:  # nobody reads those parameters one by one
    ParameterFields = msgspec.Struct
else:
    ParameterFields = msgspec.defstruct("ParameterFields", body_fields(), kw_only=True, forbid_unknown_fields=True)

MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
"""OpenAI takes 4, vLLM any number."""
MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 128

TokenCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
CacheSalt = Annotated[str, Meta(pattern=r"^[^@/\\\x00]{1,128}$")]
ExtraValue = str | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float
ExtraArgument = ExtraValue | Annotated[list[ExtraValue], Meta(max_length=1024)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a streamed answer is sent."""

    include_usage: bool | None = None
    """Send one last chunk with the usage."""
    include_obfuscation: bool | None = None
    """Accepted; this server does not pad its chunks."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk says how many tokens its choice has so far."""


_ROLES_THAT_SPEAK = frozenset({"system", "developer", "user"})


class TextPart(msgspec.Struct, kw_only=True):
    """One part of a message: a text, or `image_url`, `input_audio`, `audio_url` or `video_url` with a field of its
    type's name (see `media.parts`)."""

    type: str
    text: str | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted; without effect, because all prompts are cached."""


class CalledFunction(msgspec.Struct, kw_only=True):
    """What the model called earlier."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """A JSON object, as text or not."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an earlier turn of the model's."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation. Whatever else it holds is given to the chat template, as these fields are."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[TextPart] | msgspec.UnsetType | None = msgspec.UNSET
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    """Of an earlier answer, for templates that want it."""
    function_call: dict[str, Any] | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        """Null is the content of an assistant's turn alone, which may have been a refusal or a call of a tool."""
        if self.content is None and self.role in _ROLES_THAT_SPEAK:
            raise ValueError(f"a message of role `{self.role}` needs `content`")


MessageFields = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Message"})]
"""A `Message` with all that a client has put into it."""


class CascadeHints(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a request may ask of a cascade."""

    quality: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    """Accept an answer only from this score on, instead of by the thresholds in force."""
    latency_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None
    """Give the best answer there is by then; counted from the request's arrival."""
    max_tier: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """The last model that may be asked."""


class SamplingFields(ParameterFields, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What both endpoints know, beside the parameters that come from the table."""

    model: Annotated[str, Meta(max_length=256)] = ""
    """May be left out where there is one model."""
    max_tokens: TokenCount | None = None
    """Longest answer; by default what the context leaves (16 for completions, as OpenAI documents)."""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1 - MAX_CHOICES)] | None = None
    """The i-th choice uses seed + i."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    """From token id, as a string, to what is added to its logit; at most 100 either way."""
    include_stop_str_in_output: bool | None = None
    """Show the string or the token that ended the answer."""
    skip_special_tokens: bool | None = None
    """False: show the special tokens in the answer."""
    spaces_between_special_tokens: bool | None = None
    """Accepted; without effect: there is no blank but those that the model wrote."""
    add_special_tokens: bool | None = None
    """Put the tokens around the prompt that the model wants there; true for a prompt, false for a conversation, whose
    template has them."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    """Use so many tokens of the prompt only; -1: as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are taken off; left by default."""
    return_token_ids: bool | None = None
    """Also give the token ids of prompt and answer."""
    return_tokens_as_token_ids: bool | None = None
    """Spell tokens as `token_id:7` in logprobs."""
    use_beam_search: bool | None = None
    """Answer with the `n` likeliest texts that `n` beams find, all at once at the end."""
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    """Of a beam search: above 1 favours longer answers, below 1 shorter ones."""
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that the answer must not hold, as far as it spells them with the tokens that they have by themselves or
    behind a blank."""
    vllm_xargs: Annotated[dict[str, ExtraArgument], Meta(max_length=64)] | None = None
    """For custom logits processors and other plugins of vLLM."""
    cache_salt: CacheSalt | None = None
    """Only requests of the same salt find this one's KV in the prefix cache, so that none can tell by its speed what
    others asked."""
    request_id: str | None = None
    """The client's own id of the request; the header `x-request-id` goes before it."""
    session_id: str | None = None
    """Accepted; without effect: what requests share is found by their tokens."""
    user: str | None = None
    watermarking: bool | None = None
    """Accepted; without effect: engines of a mesh mark nothing."""
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    """Accepted; without effect: a chunk holds what has come."""
    kv_transfer_params: dict[str, Any] | None = None
    """Accepted; without effect: the mesh moves KV by itself."""
    ec_transfer_params: dict[str, Any] | None = None
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] | None = None

    response_format: ResponseFormat | None = None
    """What the text must fit, in OpenAI's terms."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must fit, in vLLM's terms."""

    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] | None = None
    """Lower is served first."""

    penstock: CascadeHints | None = None
    """Only with a cascade as the model."""

    # OpenAI's, without effect on the answer.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def schemas(self) -> Iterator[dict[str, Any] | str]:
        """All JSON schemas that it brings."""
        of_format = None if self.response_format is None else self.response_format.json_schema
        if of_format is not None and of_format.schema is not None:
            yield of_format.schema
        if self.structured_outputs is not None and self.structured_outputs.json is not None:
            yield self.structured_outputs.json

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, in the one form that it is worked with."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatCompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[MessageFields], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None
    """Takes precedence over max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    """End the prompt with what begins an answer; true unless a message is continued."""
    continue_final_message: bool | None = None
    """Go on with the text of the last message instead of answering it."""
    echo: bool | None = None
    """Put the last message before the answer, if it is the assistant's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `enable_thinking`."""
    documents: list[dict[str, Any]] | None = None
    """For chat templates that know documents."""
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """`auto` is the default where there are tools; `required` and a function's name make sure of a call."""
    parallel_tool_calls: bool | None = None
    """Unless false, one answer may hold several calls."""
    include_reasoning: bool | None = None
    """Unless false, the answer shows the reasoning before it, where the model marks it."""
    chat_template: str | None = None
    """Refused: the model's own is used."""

    return_prompt_text: bool | None = None
    """Also give what the chat template made of the conversation."""
    reasoning_effort: ReasoningEffort | None = None
    """A variable of the chat template; `enable_thinking` follows from it where `chat_template_kwargs` does not have
    it."""
    media_io_kwargs: dict[str, Any] | None = None
    """Refused, as by a vLLM server that was not told to take it."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """The same."""

    # Accepted, without effect, as vLLM does.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    """A hint for speed; accepted."""
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, with the path as msgspec tells it, for a message that is none."""
        try:
            self.turns()
        except msgspec.ValidationError as error:
            if not _name_types(self.messages):
                raise ValueError(str(error).replace("- at `$[", "- at `$.messages[")) from error
            self.__post_init__()

    def schemas(self) -> Iterator[dict[str, Any] | str]:
        yield from super().schemas()
        for tool in self.tools or ():
            if tool.function.parameters is not None:
                yield tool.function.parameters

    def turns(self) -> list[Message]:
        """The messages as far as this server knows their fields."""
        return msgspec.convert(self.messages, list[Message])


def _name_types(messages: Sequence[dict[str, Any]]) -> bool:
    """Give parts of messages that have no `type` that of the medium that they hold, as vLLM does. Whether there were
    any."""
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    parts = [part for content in contents for part in content if isinstance(part, dict) and "type" not in part]
    typed = [(part, kind) for part in parts if (kind := next((each for each in MODALITY_OF if each in part), None))]
    for part, kind in typed:
        part["type"] = kind
    return bool(typed)


class BatchChatRequest(msgspec.Struct, kw_only=True):
    """POST /v1/chat/completions/batch: the body of a chat completion, with several conversations."""

    messages: Annotated[list[Annotated[list[MessageFields], Meta(min_length=1)]], Meta(min_length=1)]
    """Each gets a choice of its own, in their order."""
    n: int | None = None
    """Refused above 1."""
    use_beam_search: bool | None = None
    """Refused."""
    tool_choice: Any = None
    """Refused but for `none`. Tools and streaming are without effect."""


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v1/completions"""

    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    """16 by default; 0 computes the prompt only."""
    prompt: str | list[str | TokenId | list[TokenId]]
    """A text, several, the token ids of one prompt, or those of several."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | bool | None = None
    """Rivals of each token; a boolean, which is a chat's way, counts as 0 or 1, as in vLLM."""
    echo: bool | None = None
    """Put the prompt before the answer, and its logprobs before the answer's."""
    best_of: int | None = None
    """Accepted; without effect: every answer that is made is returned."""
    suffix: str | None = None
    """Refused."""
    prompt_embeds: Any = None
    """Refused."""

    def __post_init__(self) -> None:
        """Makes a number of `logprobs`."""
        if self.logprobs is not None:
            self.logprobs = int(self.logprobs)


GenerationRequest: TypeAlias = ChatCompletionRequest | CompletionRequest
"""The body of a request that generates, at either endpoint."""
