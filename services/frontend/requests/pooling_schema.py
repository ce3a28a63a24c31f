"""Bodies and answers of pooling models: OpenAI's embeddings, vLLM's pooling and scores, rerankings as Jina's and
Cohere's clients ask for them."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from controlplane.model.pooling import PoolingTask
from controlplane.model.sampling import INT32_MAX
from services.frontend.requests.schema import TokenId

MAX_INPUTS = 2048
"""OpenAI's bound."""

Inputs = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
"""A text, several, the token ids of one, or those of several."""
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class PoolingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all of them know."""

    model: Annotated[str, Meta(max_length=256)] = ""
    """May be left out where there is one model."""
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] | None = None
    """Lower is served first."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    """Keep so many tokens of each input, the first ones; -1: as many as fit the model. Without it, what is too long is
    refused."""
    use_activation: bool | None = None
    """Normalise vectors, or squash scores; by default as the model has it."""


class InputFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Of those that take inputs of any form."""

    input: Inputs
    add_special_tokens: bool = True
    """Put around each text what the model wants there."""


class VectorFields(InputFields, kw_only=True, forbid_unknown_fields=True):
    """Of those that are answered with vectors."""

    encoding_format: Literal["float", "base64"] | None = None
    """base64: the little-endian 32-bit floats."""
    dimensions: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    """Cut vectors to so many, where the model was trained for it."""


class EmbeddingRequest(VectorFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings"""


class ClassifyRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """POST /classify"""


class PoolingRequestBody(VectorFields, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling"""

    task: PoolingTask | None = None
    """By default the first that the model does."""


class ScoreRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /score: one text against each of several, or as many pairs"""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    """Another name of text_1."""
    documents: Texts | None = None
    """Another name of text_2."""


class DocumentText(msgspec.Struct, kw_only=True):
    """A document, as some clients write it."""

    text: str


class RerankRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank"""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | DocumentText], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    """Give the best so many only; 0 or null: all."""
    return_documents: bool | None = None
    """Whether results bear their documents; true by default."""


class PoolingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingData(msgspec.Struct):
    """Of one input."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct):
    """POST /v1/embeddings"""

    model: str
    data: list[EmbeddingData]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class PoolingData(msgspec.Struct):
    """Of one input: a vector, one for each token, or either in base64."""

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
    """Of one input: the likeliest class, and the probability of each."""

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
    """Of one pair."""

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


class RankedDocument(msgspec.Struct):
    """One document's rank."""

    index: int
    relevance_score: float
    document: DocumentText | msgspec.UnsetType = msgspec.UNSET


class RankedList(msgspec.Struct):
    """POST /rerank, best first"""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage
