"""POST /v1/embeddings, /v2/embed, /classify, /pooling, /score and /rerank: what pooling models serve."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane.model.pooling import PoolingTask
from services.frontend.answers.sse import encode
from services.frontend.errors import ApiError
from services.frontend.http.body import decode_leniently, timely_body
from services.frontend.http.exchange import CLIENT_CLOSED_REQUEST, without_effect_header
from services.frontend.http.openapi import body_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.http.request_ids import REQUEST_ID_HEADER, id_headers, new_request_id
from services.frontend.placement.pooler import Vectors
from services.frontend.pooling import cohere
from services.frontend.pooling.call import PoolingCall
from services.frontend.pooling.inputs import input_prompts
from services.frontend.pooling.numbers import in_base64, in_bytes
from services.frontend.pooling.schema import (
    ClassifiedInput,
    ClassifiedList,
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingData,
    EmbeddingList,
    EmbeddingRequest,
    Parts,
    PoolingData,
    PoolingFields,
    PoolingList,
    PoolingRequestBody,
    PoolingUsage,
    PromptFields,
    RankedDocument,
    RankedList,
    RankedText,
    RankingUsage,
    RerankRequest,
    ScoreData,
    ScoreList,
    ScoreRequest,
    ScoringFields,
    Text,
    VectorFields,
)
from services.frontend.pooling.scores import scores, sides
from services.frontend.requests.api_keys import tenant_of
from services.frontend.requests.ended import NO_TOKENS, Asked, Progress, Tokens
from services.frontend.requests.service import FrontendService, allowed_priority

Body = TypeVar("Body", bound=PoolingFields)
Result = TypeVar("Result")
_JSON, _BYTES = "application/json", "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Pooled:
    """What goes back to the client, and what it has cost."""

    content: bytes
    prompt_tokens: int
    media_type: str = _JSON
    headers: dict[str, str] = field(default_factory=dict)


def pooling_routes(frontend: FrontendService) -> APIRouter:
    """The endpoints of pooling models."""
    router = APIRouter(tags=["pooling"], route_class=RawRoute)

    @router.post("/v1/embeddings", **body_docs(("EmbeddingRequest",), "EmbeddingList", "The vectors"))
    async def create_embeddings(request: Request) -> Response:
        """A vector of each input."""
        return await answer_embeddings(frontend, request)

    @router.post("/v2/embed", **body_docs(("CohereEmbedRequest",), "CohereEmbeddings", "The vectors"))
    async def create_cohere_embeddings(request: Request) -> Response:
        """The same in Cohere's words."""
        return await _answer(frontend, request, None, CohereEmbedRequest, "embd", _cohere_embeddings)

    @router.post("/classify", **body_docs(("ClassifyRequest",), "ClassifiedList", "The classes"))
    async def classify(request: Request) -> Response:
        """The likeliest class of each input, and the probability of every class."""
        return await answer_classes(frontend, request)

    @router.post("/pooling", **body_docs(("PoolingRequestBody",), "PoolingList", "Vectors or scores"))
    async def pool(request: Request) -> Response:
        """Whatever the model makes of each input."""
        return await answer_pooling(frontend, request)

    @router.post("/score", **body_docs(("ScoreRequest",), "ScoreList", "The scores"))
    @router.post("/v1/score", **body_docs(("ScoreRequest",), "ScoreList", "The scores"))
    async def score(request: Request) -> Response:
        """How well two texts fit."""
        return await answer_scores(frontend, request)

    @router.post("/rerank", **body_docs(("RerankRequest",), "RankedList", "The documents, best first"))
    @router.post("/v1/rerank", **body_docs(("RerankRequest",), "RankedList", "The documents, best first"))
    @router.post("/v2/rerank", **body_docs(("RerankRequest",), "RankedList", "The documents, best first"))
    async def rerank(request: Request) -> Response:
        """Documents in the order in which they fit a query."""
        return await answer_ranking(frontend, request)

    return router


async def answer_embeddings(frontend: FrontendService, request: Request, body: bytes | None = None) -> Response:
    """`body`, here and below: None if it has not been read yet. Raises ApiError."""
    return await _answer(frontend, request, body, EmbeddingRequest, "embd", _embeddings)


async def answer_classes(frontend: FrontendService, request: Request, body: bytes | None = None) -> Response:
    """Raises ApiError."""
    return await _answer(frontend, request, body, ClassifyRequest, "classify", _classes)


async def answer_pooling(frontend: FrontendService, request: Request, body: bytes | None = None) -> Response:
    """Raises ApiError."""
    return await _answer(frontend, request, body, PoolingRequestBody, "pooling", _pooling)


async def answer_scores(frontend: FrontendService, request: Request, body: bytes | None = None) -> Response:
    """Raises ApiError."""
    return await _answer(frontend, request, body, ScoreRequest, "score", _score)


async def answer_ranking(frontend: FrontendService, request: Request, body: bytes | None = None) -> Response:
    """Raises ApiError."""
    return await _answer(frontend, request, body, RerankRequest, "rerank", _rerank)


async def _embeddings(call: PoolingCall, body: EmbeddingRequest) -> Pooled:
    prompts, rows = await _vectors(call, body, "embed")
    if packed := _in_bytes(call, body, prompts, rows, is_flat=True):
        return packed

    def shown(each: Vectors) -> list[float] | str:
        is_base64 = body.encoding_format == "base64"
        return in_base64(each, body.embed_dtype, body.endianness) if is_base64 else each[0].tolist()

    data = [EmbeddingData(index, shown(each)) for index, each in enumerate(rows)]
    usage = _usage(prompts)
    return _json(EmbeddingList(call.request_id, _now(call), call.model.name, data, usage), usage)


async def _cohere_embeddings(call: PoolingCall, body: CohereEmbedRequest) -> Pooled:
    asked = cohere.as_embedding_request(body, call.model)
    prompts, task = await input_prompts(call, asked), call.task("embed", "model")
    cohere.check_lengths(body, prompts)
    rows = await call.pool(prompts, task, dimensions=asked.dimensions)
    usage = _usage(prompts)
    return _json(cohere.embeddings(body, call.request_id, rows, usage.prompt_tokens), usage)


async def _classes(call: PoolingCall, body: ClassifyRequest) -> Pooled:
    prompts, task = await input_prompts(call, body), call.task("classify", "model")
    rows = await call.pool(prompts, task, use_activation=body.use_activation, cache_salt=body.cache_salt)
    data = [
        ClassifiedInput(index, call.model.text.label(int(each[0].argmax())), each[0].tolist(), each[0].size)
        for index, each in enumerate(rows)
    ]
    usage = _usage(prompts)
    return _json(ClassifiedList(call.request_id, _now(call), call.model.name, data, usage), usage)


async def _pooling(call: PoolingCall, body: PoolingRequestBody) -> Pooled:
    task = call.task(body.task)
    prompts, rows = await _vectors(call, body, task)
    is_flat = not task.startswith("token_")
    if packed := _in_bytes(call, body, prompts, rows, is_flat=is_flat):
        return packed

    def shown(each: Vectors) -> list[float | list[float]] | str:
        if body.encoding_format == "base64":
            return in_base64(each, body.embed_dtype, body.endianness)
        plain: list[float | list[float]] = (each[0] if is_flat else each).tolist()
        return plain

    data = [PoolingData(index, shown(each)) for index, each in enumerate(rows)]
    usage = _usage(prompts)
    return _json(PoolingList(call.request_id, _now(call), call.model.name, data, usage), usage)


async def _score(call: PoolingCall, body: ScoreRequest) -> Pooled:
    names = sides(body)
    found = await scores(call, body, getattr(body, names[0]), getattr(body, names[1]), names)
    data = [ScoreData(index, score) for index, score in enumerate(found.scores)]
    usage = PoolingUsage(found.prompt_tokens, found.prompt_tokens)
    return _json(ScoreList(call.request_id, _now(call), call.model.name, data, usage), usage)


async def _rerank(call: PoolingCall, body: RerankRequest) -> Pooled:
    documents = body.documents if isinstance(body.documents, list) else [body.documents]
    found = await scores(call, body, body.query, documents, ("query", "documents"))
    order = sorted(range(len(documents)), key=lambda index: (-found.scores[index], index))
    results = [
        RankedDocument(
            index,
            found.scores[index],
            msgspec.UNSET if body.return_documents is False else _ranked_text(documents[index]),
        )
        for index in order[: body.top_n or None]
    ]
    usage = RankingUsage(found.prompt_tokens, found.prompt_tokens)
    return _json(RankedList(call.request_id, call.model.name, results, usage), usage)


async def _vectors(call: PoolingCall, body: VectorFields, wanted: PoolingTask) -> tuple[list[list[int]], list[Vectors]]:
    """The prompts of all inputs, and what the model makes of them."""
    prompts, task = await input_prompts(call, body), call.task(wanted)
    rows = await call.pool(
        prompts, task, dimensions=body.dimensions, use_activation=body.use_activation, cache_salt=body.cache_salt
    )
    return prompts, rows


def _in_bytes(
    call: PoolingCall, body: VectorFields, prompts: Sequence[Sequence[int]], rows: Sequence[Vectors], *, is_flat: bool
) -> Pooled | None:
    """The answer as bytes, if it is asked for; the rest of it is in a header then."""
    if body.encoding_format not in ("bytes", "bytes_only"):
        return None
    content, places = in_bytes(rows, body.embed_dtype, body.endianness, is_flat=is_flat)
    tokens = sum(map(len, prompts))
    if body.encoding_format == "bytes_only":
        return Pooled(content, tokens, _BYTES)
    facts = {"id": call.request_id, "created": _now(call), "model": call.model.name, "data": places}
    usage = msgspec.to_builtins(RankingUsage(tokens, tokens))
    # msgspec writes characters as they are, and a header has room for those of Latin-1 alone.
    return Pooled(content, tokens, _BYTES, {"metadata": json.dumps({**facts, "usage": usage})})


async def _answer(
    frontend: FrontendService,
    http: Request,
    content: bytes | None,
    kind: type[Body],
    id_prefix: str,
    work: Callable[[PoolingCall, Body], Awaitable[Pooled]],
) -> Response:
    """One answer, whole; a client that leaves cancels the work for it. Raises ApiError."""
    arrived_s = frontend.clock()
    ends_s = arrived_s + frontend.settings.request_deadline_s
    given = http.headers.get(REQUEST_ID_HEADER)
    request_id = ""
    try:
        request_id = new_request_id(id_prefix, given, frontend.entropy)
        key = await frontend.authenticate(http.headers.get("authorization"))
        body, unknown = decode_leniently(await timely_body(frontend, http) if content is None else content, kind)
        if given is None and isinstance(body, PromptFields) and body.request_id is not None:
            request_id = new_request_id(id_prefix, body.request_id, frontend.entropy, "request_id")
            given = body.request_id
        model = await frontend.model(body.model, key)
        priority = allowed_priority(key, body.priority) or 0
        call = PoolingCall(frontend, model, request_id, ends_s, priority, tenant_of(key))
        with frontend.counted(key):
            left_s = ends_s - frontend.clock()
            async with frontend.gate.admitted(call.request_id, priority, left_s, tenant_of(key)):
                answer = await _unless_gone(http, work(call, body))
        if answer is not None:
            frontend.spent(key, answer.prompt_tokens)
    except ApiError as error:
        request_id = request_id or new_request_id(id_prefix, None, frontend.entropy)
        error.headers = {**error.headers, **id_headers(given, request_id)}
        raise
    status = CLIENT_CLOSED_REQUEST if answer is None else 200
    asked = Asked(request_id, model.name, http.url.path, "" if key is None else key.name, arrived_s)
    tokens = NO_TOKENS if answer is None else Tokens(answer.prompt_tokens)
    frontend.used(asked, Progress(tokens=tokens), status)
    frontend.requests_total += 1
    frontend.metrics.requests.labels(model.name, http.url.path, str(status)).inc()
    frontend.metrics.of(model.name).e2e.observe(frontend.clock() - arrived_s)
    if answer is None:
        frontend.metrics.disconnects.inc()
        return Response(status_code=status)
    ignored = [*unknown, *_without_effect(body)]
    headers = {**answer.headers, **id_headers(given, request_id), **without_effect_header(ignored)}
    return Response(answer.content, media_type=answer.media_type, headers=headers)


async def _unless_gone(http: Request, work: Awaitable[Result]) -> Result | None:
    """None if the client leaves first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()


async def _gone(http: Request) -> None:
    """Return once the client has left; its body has been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _without_effect(body: PoolingFields) -> list[str]:
    """Parameters that the client has given and that change nothing here."""
    names = ["user"] if isinstance(body, PromptFields) else []
    if isinstance(body, ScoringFields):
        names += ["instruction", "chat_template_kwargs"]
    return [name for name in names if getattr(body, name) is not None]


def _ranked_text(document: Text) -> RankedText:
    if not isinstance(document, Parts):
        return RankedText(text=document)
    return RankedText(text=document.text, multi_modal=document.content)


def _json(answer: msgspec.Struct, usage: RankingUsage) -> Pooled:
    return Pooled(encode(answer), usage.prompt_tokens)


def _usage(prompts: Sequence[Sequence[int]]) -> PoolingUsage:
    tokens = sum(map(len, prompts))
    return PoolingUsage(tokens, tokens)


def _now(call: PoolingCall) -> int:
    return int(call.service.unix_time())
