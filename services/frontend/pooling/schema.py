"""Bodies and answers of pooling models, in vLLM's form: OpenAI's embeddings, poolings, classes, scores, and rankings as
Jina's and Cohere's clients ask for them."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from controlplane.model.pooling import PoolingTask
from controlplane.model.sampling import INT32_MAX
from services.frontend.requests.schema import CacheSalt, Message, MessageFields, TokenId

MAX_INPUTS = 2048
"""OpenAI's bound."""

Inputs: TypeAlias = (
    str | Annotated[list[str | TokenId | MessageFields | list[TokenId | MessageFields]], Meta(min_length=1)]
)
"""A text, several, the token ids of one, those of several; or a conversation, or several."""
Conversations: TypeAlias = Annotated[list[MessageFields | list[MessageFields]], Meta(min_length=1)]
"""A conversation, or several."""


EmbedDtype: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness: TypeAlias = Literal["native", "little", "big"]


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a text that is written in parts. Images and the like are refused by name."""

    type: str
    text: str | None = None


class Parts(msgspec.Struct, kw_only=True):
    """A text in parts (`content`), or as some clients write a document (`text`)."""

    content: Annotated[list[TextPart], Meta(min_length=1)] | None = None
    text: str | None = None


Text: TypeAlias = str | Parts
Texts: TypeAlias = Text | Annotated[list[Text], Meta(max_length=MAX_INPUTS)]


class PoolingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all bodies hold."""

    model: Annotated[str, Meta(max_length=256)] = ""
    """May be left out where there is one model."""
    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] | None = None
    """Lower is served first."""


class PromptFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """What all bodies of vLLM's hold."""

    user: str | None = None
    """Accepted; without effect."""
    request_id: str | None = None
    """The client's own id of the request; the header `x-request-id` goes before it."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    """Keep so many tokens of each input; -1: as many as fit the model. Without it, what is too long is refused."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are taken off: the first ones stay by default, and the tokens that the model wants around a text.
    With a side, these count like any other."""
    padding: Literal["max_length", "do_not_pad"] | None = None
    """`max_length`: fill each input up to the model's context with the tokenizer's padding."""
    use_activation: bool | None = None
    """Normalise vectors, or squash scores; by default as the model has it."""
    cache_salt: CacheSalt | None = None
    """Only inputs of the same salt find this one's KV in the prefix cache."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Refused."""


class InputFields(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """What bodies hold that take inputs of any form. A conversation is what the chat template makes of it."""

    input: Inputs | None = None
    messages: Conversations | None = None
    """In place of `input`."""
    add_special_tokens: bool | None = None
    """Put around each input what the model wants there; true for a text, false for a conversation, whose template has
    it."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    """Refused: the model's own is used."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    media_io_kwargs: dict[str, Any] | None = None
    """Refused."""
    normalize: bool | None = None
    """Refused: vLLM's former name of `use_activation`."""

    def __post_init__(self) -> None:
        """Raises ValueError, with the path as msgspec tells it, for a body without an input, and for a message that is
        none."""
        if self.input is None and self.messages is None:
            raise ValueError("Object missing required field `input`")
        given = self.input if self.messages is None else self.messages
        conversations = self.conversations
        is_one = conversations == [given]
        for index, conversation in enumerate(conversations):
            try:
                msgspec.convert(conversation, list[Message])
            except msgspec.ValidationError as error:
                at = f"$.{self.conversations_param}{'' if is_one else f'[{index}]'}["
                raise ValueError(str(error).replace("- at `$[", f"- at `{at}")) from error

    @property
    def conversations_param(self) -> str:
        """The parameter that conversations come from."""
        return "input" if self.messages is None else "messages"

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        """Empty where the inputs are texts or tokens."""
        given: Any = self.input if self.messages is None else self.messages
        if isinstance(given, str) or given is None:
            return []
        if all(isinstance(each, dict) for each in given):
            return [given]
        is_several = all(isinstance(each, list) and each and isinstance(each[0], dict) for each in given)
        if self.messages is not None and not is_several:
            raise ValueError("`messages` must hold the messages of one conversation, or conversations")
        return list(given) if is_several else []


class VectorFields(InputFields, kw_only=True, forbid_unknown_fields=True):
    """What bodies hold that are answered with vectors."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    """`bytes`: the vectors behind each other, with a header `metadata` that says which bytes belong to which input;
    `bytes_only`: without it."""
    embed_dtype: EmbedDtype = "float32"
    """How base64 and bytes hold one number."""
    endianness: Endianness = "native"
    """The order of its bytes; `native`: that of the server's machine."""
    dimensions: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    """Cut vectors to so many, where the model was trained for it."""


class EmbeddingRequest(VectorFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings"""


class ClassifyRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """POST /classify"""


class PoolingRequestBody(VectorFields, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling"""

    task: PoolingTask | None = None
    """By default what the model is for."""


class ScoringFields(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """What bodies hold that compare texts."""

    max_tokens_per_query: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    """Keep so many tokens of each query before anything else; 0: all."""
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    """The same of each document."""
    instruction: str | None = None
    """Accepted; without effect: pairs are written without a template, as by a vLLM server without `--chat-template`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """The same."""


class ScoreRequest(ScoringFields, kw_only=True, forbid_unknown_fields=True):
    """POST /score: one text against each of several, or as many pairs. The two sides have four pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankRequest(ScoringFields, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank"""

    query: Text
    documents: Texts
    top_n: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    """Give the best so many only; 0 or null: all."""
    return_documents: bool | None = None
    """Whether results bear their documents; true by default."""


class CohereContent(msgspec.Struct, kw_only=True):
    """A part of an input."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: dict[str, str] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a part without what its type says."""
        if getattr(self, self.type) is None:
            raise ValueError(f"Object missing required field `{self.type}`")


class CohereInput(msgspec.Struct, kw_only=True):
    """An input in parts."""

    content: list[CohereContent]


class CohereEmbedRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v2/embed, with texts, images or inputs in parts"""

    input_type: str | None = None
    """The use of the vectors, where the model has an instruction for it: its `config_sentence_transformers.json`, or
    `task_instructions` in its `config.json`, names them."""
    texts: Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    images: Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    inputs: Annotated[list[CohereInput], Meta(max_length=MAX_INPUTS)] | None = None
    output_dimension: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    """Cut vectors to so many, where the model was trained for it."""
    embedding_types: list[Literal["float", "binary", "ubinary", "base64"]] | None = None
    """`binary` and `ubinary`: a bit for each number, set where it is not negative, as signed or unsigned bytes."""
    truncate: Literal["NONE", "START", "END"] = "END"
    """Where tokens are taken off of what is too long."""
    max_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    """How much is kept of each input; by default what fits the model."""

    def __post_init__(self) -> None:
        """Raises ValueError unless there are inputs of one kind."""
        given = [each for each in (self.texts, self.images, self.inputs) if each is not None]
        if len(given) != 1 or not given[0]:
            raise ValueError("exactly one of texts, images and inputs must be there, and hold something")


class RankingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class PoolingUsage(RankingUsage):
    """The same, in the form of those that generate."""

    completion_tokens: int = 0
    completion_tokens_details: None = None
    prompt_tokens_details: None = None


class EmbeddingData(msgspec.Struct):
    """The vector of one input."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct):
    """POST /v1/embeddings"""

    id: str
    created: int
    model: str
    data: list[EmbeddingData]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class PoolingData(msgspec.Struct):
    """What the model makes of one input: a vector, one for each token, or either in base64."""

    index: int
    data: list[float | list[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingList(msgspec.Struct):
    """POST /pooling"""

    id: str
    created: int
    model: str
    data: list[PoolingData]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class ClassifiedInput(msgspec.Struct):
    """The likeliest class of one input, and the probability of each."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifiedList(msgspec.Struct):
    """POST /classify"""

    id: str
    created: int
    model: str
    data: list[ClassifiedInput]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class ScoreData(msgspec.Struct):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct):
    """POST /score"""

    id: str
    created: int
    model: str
    data: list[ScoreData]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class RankedText(msgspec.Struct, kw_only=True):
    """A document, as it was written."""

    text: str | None = None
    multi_modal: list[TextPart] | None = None


class RankedDocument(msgspec.Struct):
    """One document's rank."""

    index: int
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class RankedList(msgspec.Struct):
    """POST /rerank, best first"""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RankingUsage


class VectorsByType(msgspec.Struct, kw_only=True):
    """The vectors of all inputs, in each form that was asked for."""

    floats: list[list[float]] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="float")
    binary: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    ubinary: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    base64: list[str] | msgspec.UnsetType = msgspec.UNSET


class BilledUnits(msgspec.Struct):
    """What the inputs were made of."""

    input_tokens: int
    image_tokens: int = 0


class CohereVersion(msgspec.Struct, frozen=True):
    """The version of the API."""

    version: str = "2"


class CohereMeta(msgspec.Struct):
    """Facts of an answer."""

    billed_units: BilledUnits
    api_version: CohereVersion = CohereVersion()


class CohereEmbeddings(msgspec.Struct):
    """POST /v2/embed"""

    id: str
    embeddings: VectorsByType
    meta: CohereMeta
    texts: list[str] | msgspec.UnsetType = msgspec.UNSET
    """The inputs, if they were texts."""
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
