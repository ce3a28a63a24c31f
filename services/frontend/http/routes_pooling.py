"""POST /v1/embeddings, /classify, /pooling, /score and /rerank: what pooling models serve."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.answers.sse import encode
from services.frontend.errors import ApiError
from services.frontend.http.body import decode_body, timely_body
from services.frontend.http.exchange import CLIENT_CLOSED_REQUEST
from services.frontend.http.openapi import body_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.http.request_ids import MESH_ID_HEADER, REQUEST_ID_HEADER, new_request_id
from services.frontend.placement.pooler import Vectors
from services.frontend.requests.api_keys import tenant_of
from services.frontend.requests.ended import NO_TOKENS, Asked, Progress, Tokens
from services.frontend.requests.pooling import PoolingCall, input_prompts, text_pairs
from services.frontend.requests.pooling_schema import (
    ClassifiedInput,
    ClassifiedList,
    ClassifyRequest,
    DocumentText,
    EmbeddingData,
    EmbeddingList,
    EmbeddingRequest,
    PoolingData,
    PoolingFields,
    PoolingList,
    PoolingRequestBody,
    PoolingUsage,
    RankedDocument,
    RankedList,
    RerankRequest,
    ScoreData,
    ScoreList,
    ScoreRequest,
)
from services.frontend.requests.service import FrontendService, allowed_priority

Body = TypeVar("Body", bound=PoolingFields)
Result = TypeVar("Result")
PoolingAnswer = EmbeddingList | ClassifiedList | PoolingList | ScoreList | RankedList


def pooling_routes(frontend: FrontendService) -> APIRouter:
    """The endpoints of pooling models."""
    router = APIRouter(tags=["pooling"], route_class=RawRoute)

    @router.post("/v1/embeddings", **body_docs(("EmbeddingRequest",), "EmbeddingList", "The vectors"))
    async def create_embeddings(request: Request) -> Response:
        """A vector of each input."""
        return await _answer(frontend, request, EmbeddingRequest, "embd", _embeddings)

    @router.post("/classify", **body_docs(("ClassifyRequest",), "ClassifiedList", "The classes"))
    async def classify(request: Request) -> Response:
        """The likeliest class of each input, and the probability of every class."""
        return await _answer(frontend, request, ClassifyRequest, "classify", _classes)

    @router.post("/pooling", **body_docs(("PoolingRequestBody",), "PoolingList", "Vectors or scores"))
    async def pool(request: Request) -> Response:
        """Whatever the model makes of each input."""
        return await _answer(frontend, request, PoolingRequestBody, "pool", _pooling)

    @router.post("/score", **body_docs(("ScoreRequest",), "ScoreList", "The scores"))
    @router.post("/v1/score", **body_docs(("ScoreRequest",), "ScoreList", "The scores"))
    async def score(request: Request) -> Response:
        """How well two texts fit."""
        return await _answer(frontend, request, ScoreRequest, "score", _score)

    @router.post("/rerank", **body_docs(("RerankRequest",), "RankedList", "The documents, best first"))
    @router.post("/v1/rerank", **body_docs(("RerankRequest",), "RankedList", "The documents, best first"))
    @router.post("/v2/rerank", **body_docs(("RerankRequest",), "RankedList", "The documents, best first"))
    async def rerank(request: Request) -> Response:
        """Documents in the order in which they fit a query."""
        return await _answer(frontend, request, RerankRequest, "rerank", _rerank)

    return router


async def _embeddings(call: PoolingCall, body: EmbeddingRequest) -> PoolingAnswer:
    prompts = await input_prompts(call, body)
    pooled = await call.pool(prompts, call.task("embed"), "input", body.dimensions)
    data = [
        EmbeddingData(index, _base64(rows) if body.encoding_format == "base64" else rows[0].tolist())
        for index, rows in enumerate(pooled.rows)
    ]
    return EmbeddingList(call.model.name, data, _usage(pooled.prompt_tokens))


async def _classes(call: PoolingCall, body: ClassifyRequest) -> PoolingAnswer:
    prompts, task = await input_prompts(call, body), call.task("classify", "model")
    pooled = await call.pool(prompts, task, "input")
    labels = call.model.text.labels
    data = [
        ClassifiedInput(index, labels.get(int(rows[0].argmax())), rows[0].tolist(), rows[0].size)
        for index, rows in enumerate(pooled.rows)
    ]
    created = int(call.service.unix_time())
    return ClassifiedList(call.request_id, created, call.model.name, data, _usage(pooled.prompt_tokens))


async def _pooling(call: PoolingCall, body: PoolingRequestBody) -> PoolingAnswer:
    prompts, task = await input_prompts(call, body), call.task(body.task)
    pooled = await call.pool(prompts, task, "input", body.dimensions)

    def shown(rows: Vectors) -> list[float | list[float]] | str:
        if body.encoding_format == "base64":
            return _base64(rows)
        plain: list[float | list[float]] = (rows if task.startswith("token_") else rows[0]).tolist()
        return plain

    data = [PoolingData(index, shown(rows)) for index, rows in enumerate(pooled.rows)]
    created = int(call.service.unix_time())
    return PoolingList(call.request_id, created, call.model.name, data, _usage(pooled.prompt_tokens))


async def _score(call: PoolingCall, body: ScoreRequest) -> PoolingAnswer:
    first = body.text_1 if body.text_1 is not None else body.queries
    second = body.text_2 if body.text_2 is not None else body.documents
    scores, tokens = await call.scores(text_pairs(first, second))
    data = [ScoreData(index, score) for index, score in enumerate(scores)]
    return ScoreList(call.request_id, int(call.service.unix_time()), call.model.name, data, _usage(tokens))


async def _rerank(call: PoolingCall, body: RerankRequest) -> PoolingAnswer:
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    scores, tokens = await call.scores([(body.query, document) for document in documents])
    order = sorted(range(len(documents)), key=lambda index: (-scores[index], index))
    results = [
        RankedDocument(
            index,
            scores[index],
            msgspec.UNSET if body.return_documents is False else DocumentText(text=documents[index]),
        )
        for index in order[: body.top_n or None]
    ]
    return RankedList(call.request_id, call.model.name, results, _usage(tokens))


async def _answer(
    frontend: FrontendService,
    http: Request,
    kind: type[Body],
    id_prefix: str,
    work: Callable[[PoolingCall, Body], Awaitable[PoolingAnswer]],
) -> Response:
    """One answer, whole; a client that leaves cancels the work for it. Raises ApiError."""
    arrived_s = frontend.clock()
    ends_s = arrived_s + frontend.settings.request_deadline_s
    given = http.headers.get(REQUEST_ID_HEADER)
    request_id = ""
    try:
        request_id = new_request_id(id_prefix, given, frontend.entropy)
        key = await frontend.authenticate(http.headers.get("authorization"))
        body = decode_body(await timely_body(frontend, http), kind)
        model = await frontend.model(body.model, key)
        body.priority = allowed_priority(key, body.priority)
        call = PoolingCall(frontend, model, body, request_id, ends_s)
        with frontend.counted(key):
            left_s = ends_s - frontend.clock()
            async with frontend.gate.admitted(call.request_id, body.priority or 0, left_s, tenant_of(key)):
                answer = await _unless_gone(http, work(call, body))
        if answer is not None:
            frontend.spent(key, answer.usage.prompt_tokens)
    except ApiError as error:
        request_id = request_id or new_request_id(id_prefix, None, frontend.entropy)
        told_id = request_id if error.param == REQUEST_ID_HEADER else given or request_id
        error.headers = {**error.headers, REQUEST_ID_HEADER: told_id, MESH_ID_HEADER: request_id}
        raise
    status = CLIENT_CLOSED_REQUEST if answer is None else 200
    asked = Asked(request_id, model.name, http.url.path, "" if key is None else key.name, arrived_s)
    tokens = NO_TOKENS if answer is None else Tokens(answer.usage.prompt_tokens)
    frontend.used(asked, Progress(tokens=tokens), status)
    frontend.requests_total += 1
    frontend.metrics.requests.labels(model.name, http.url.path, str(status)).inc()
    frontend.metrics.of(model.name).e2e.observe(frontend.clock() - arrived_s)
    if answer is None:
        frontend.metrics.disconnects.inc()
        return Response(status_code=status)
    headers = {REQUEST_ID_HEADER: given or request_id, MESH_ID_HEADER: request_id}
    return Response(encode(answer), media_type="application/json", headers=headers)


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


def _base64(rows: Vectors) -> str:
    return base64.b64encode(rows.astype("<f4").tobytes()).decode()


def _usage(prompt_tokens: int) -> PoolingUsage:
    return PoolingUsage(prompt_tokens, prompt_tokens)
