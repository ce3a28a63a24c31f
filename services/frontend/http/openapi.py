"""The OpenAPI document: paths from FastAPI, bodies and answers from the types that decode and encode them."""

from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.frontend.answers.decisions import Decisions
from services.frontend.answers.schema import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Error,
    Model,
    ModelList,
)
from services.frontend.answers.scoring import GenerativeScores
from services.frontend.pooling.schema import (
    ClassifiedList,
    ClassifyRequest,
    CohereEmbeddings,
    CohereEmbedRequest,
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequestBody,
    RankedList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from services.frontend.requests.adapter_schema import LoadAdapterBody, RegisterAdapterBody, UnloadAdapterBody
from services.frontend.requests.decision_schema import DecisionRequest
from services.frontend.requests.messages_schema import CountTokensRequest, MessagesRequest, TokenCount
from services.frontend.requests.responses_schema import ResponsesRequest
from services.frontend.requests.schema import BatchChatRequest, ChatCompletionRequest, CompletionRequest, Message
from services.frontend.requests.scoring_schema import ScoringRequest
from services.frontend.requests.text_schema import Detokenized, DetokenizeRequest, Tokenized, TokenizeTextRequest

_REF: Final = "#/components/schemas/{name}"
_DOCUMENTED: Final = (
    ChatCompletionRequest,
    BatchChatRequest,
    CompletionRequest,
    Message,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Model,
    ModelList,
    Error,
    TokenizeTextRequest,
    Tokenized,
    DetokenizeRequest,
    Detokenized,
    EmbeddingRequest,
    EmbeddingList,
    CohereEmbedRequest,
    CohereEmbeddings,
    ClassifyRequest,
    ClassifiedList,
    PoolingRequestBody,
    PoolingList,
    ScoreRequest,
    ScoreList,
    RerankRequest,
    RankedList,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenCount,
    LoadAdapterBody,
    UnloadAdapterBody,
    RegisterAdapterBody,
    ScoringRequest,
    GenerativeScores,
    DecisionRequest,
    Decisions,
)
_REFUSALS: Final = {
    400: "The request is wrong; `param` names the culprit",
    401: "No API key, or an unknown one",
    404: "Unknown model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "Too many requests, in all or of this key; see Retry-After",
    502: "The worker that served the request failed",
    503: "No worker can take the request now",
    504: "Not finished within the request's deadline",
}


def answer_docs(schema: str, description: str, *refusals: int) -> dict[str, Any]:
    """Keyword arguments of a route that answers with `schema`."""
    responses: dict[int | str, dict[str, Any]] = {200: {"description": description, "content": _json(schema)}}
    responses.update({status: {"description": _REFUSALS[status], "content": _json("Error")} for status in refusals})
    return {"responses": responses, "response_model": None}


def generation_docs(request_schema: str, answer_schema: str) -> dict[str, Any]:
    """Keyword arguments of a route that generates."""
    docs = answer_docs(answer_schema, "The answer; a stream of events if `stream` is true", *_REFUSALS)
    docs["responses"][200]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"required": True, "content": _json(request_schema)}
    security: list[dict[str, list[str]]] = [{"apiKey": []}, {}]
    return {**docs, "openapi_extra": {"requestBody": body, "security": security}}


def body_docs(request_schemas: tuple[str, ...], answer_schema: str, description: str) -> dict[str, Any]:
    """Keyword arguments of a route that takes one of these bodies, or none, and answers at once."""
    docs = answer_docs(answer_schema, description, *_REFUSALS)
    extra: dict[str, Any] = {"security": [{"apiKey": []}, {}]}
    if request_schemas:
        schemas = [{"$ref": _REF.format(name=name)} for name in request_schemas]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {**docs, "openapi_extra": extra}


def text_docs(description: str, *request_schemas: str) -> dict[str, Any]:
    """Keyword arguments of an operator's route that takes one of these bodies, or none, and answers in a sentence."""
    docs = body_docs(request_schemas, "Error", description)
    docs["responses"][200]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    docs["responses"][403] = {"description": "The key is not an operator's", "content": _json("Error")}
    return docs


def object_docs(description: str, *refusals: int) -> dict[str, Any]:
    """Keyword arguments of a route that answers with an object of another API, which is documented there."""
    docs = answer_docs("Error", description, *refusals)
    docs["responses"][200]["content"] = {"application/json": {"schema": {"type": "object"}}}
    return docs


def translated_docs(request_schema: str, description: str) -> dict[str, Any]:
    """Keyword arguments of a route that generates in the words of another API."""
    docs = generation_docs(request_schema, "Error")
    return {**docs, "responses": {**docs["responses"], 200: {**object_docs(description)["responses"][200]}}}


def resume_docs() -> dict[str, Any]:
    """Keyword arguments of the route that goes on with a stream."""
    refusals = {status: {"description": _REFUSALS[status], "content": _json("Error")} for status in (400, 401, 429)}
    gone = {"description": "No such stream, or it ended too long ago", "content": _json("Error")}
    unserved = {"description": "This frontend cannot serve the model, or not yet", "content": _json("Error")}
    events = {"description": "The rest of the stream", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    return {
        "responses": {200: events, 404: gone, 503: unserved, **refusals},
        "response_model": None,
        "openapi_extra": {
            "parameters": [
                {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}},
                {"name": "Last-Event-ID", "in": "header", "required": False, "schema": {"type": "string"}},
            ],
            "security": [{"apiKey": []}, {}],
        },
    }


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document; OpenAPI 3.1, whose schemas are JSON Schema 2020-12 as msgspec makes them."""
    if app.openapi_schema is None:
        content = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for operation in [operation for path in content["paths"].values() for operation in path.values()]:
            operation["responses"].pop("422", None)  # FastAPI's own validation error: we have none
        _, schemas = msgspec.json.schema_components(_DOCUMENTED, ref_template=_REF)
        content["components"] = {
            "schemas": schemas,
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        }
        app.openapi_schema = content
    return app.openapi_schema


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=schema)}}}
