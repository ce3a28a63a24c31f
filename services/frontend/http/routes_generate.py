"""POST /v1/chat/completions, /v1/completions, and the route by which a lost stream is resumed."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane.model.pooling import GENERATE
from mesh.tracing import TRACEPARENT_HEADER, SpanContext
from services.frontend.cascade.service import CascadeService
from services.frontend.errors import ApiError, bad_request
from services.frontend.http.beam_exchange import BeamExchange
from services.frontend.http.body import decode_leniently, timely_body
from services.frontend.http.cascade_exchange import CascadeExchange
from services.frontend.http.exchange import Exchange, ModelExchange
from services.frontend.http.load_header import FORMAT_HEADER
from services.frontend.http.openapi import generation_docs, resume_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.http.request_ids import REQUEST_ID_HEADER, id_headers, new_request_id
from services.frontend.http.resume_exchange import EVENTS_PATH, resume
from services.frontend.requests.api_keys import ApiKey
from services.frontend.requests.schema import ChatCompletionRequest, CompletionRequest
from services.frontend.requests.service import allowed_priority, check_model
from services.frontend.requests.unsupported import refuse_unsupported, without_effect

EVENT_IDS_HEADER: Final = "x-penstock-event-ids"
"""`true`: events are to have ids. Without it they have none, because some clients read nothing but `data:` lines: that
of `vllm bench serve` fails at an `id:` line, and OpenAI's takes a comment behind one for an event."""
RESUMABLE_HEADER: Final = "x-penstock-resumable"
"""`true`: a client that loses its connection comes back for the rest of its stream."""

Kind = TypeVar("Kind", ChatCompletionRequest, CompletionRequest)


def generation_routes(service: CascadeService) -> APIRouter:
    """The two endpoints that generate, and the one that resumes a stream."""
    frontend = service.frontend
    router = APIRouter(tags=["generation"], route_class=RawRoute)

    @router.post("/v1/chat/completions", **generation_docs("ChatCompletionRequest", "ChatCompletion"))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, by a model or a cascade of models."""
        return await _accept(service, request, ChatCompletionRequest, "chatcmpl")

    @router.post("/v1/completions", **generation_docs("CompletionRequest", "Completion"))
    async def create_completion(request: Request) -> Response:
        """Continue one or more prompts."""
        return await _accept(service, request, CompletionRequest, "cmpl")

    @router.get(EVENTS_PATH, **resume_docs())
    async def resume_stream(request: Request) -> Response:
        """The rest of a streamed answer, behind the event that `Last-Event-ID` names."""
        arrived_s = frontend.clock()
        key = await frontend.authenticate(request.headers.get("authorization"))
        last_event_id = request.headers.get("last-event-id")
        return await resume(frontend, request.path_params["request_id"], last_event_id, key, arrived_s)

    return router


async def _accept(service: CascadeService, http: Request, kind: type[Kind], id_prefix: str) -> Response:
    asked_by = partial(service.frontend.authenticate, http.headers.get("authorization"))
    return await accept_body(service, http, None, kind, id_prefix, asked_by)


async def accept_body(
    service: CascadeService,
    http: Request,
    body: bytes | None,
    kind: type[Kind],
    id_prefix: str,
    asked_by: Callable[[], Awaitable[ApiKey | None]],
    ignored: Sequence[str] = (),
) -> Exchange:
    """Everything that can be refused without waiting. `body`: None if it has not been read yet. `asked_by`: finds the
    caller's key. `ignored`: parameters without effect that are none of its. Raises ApiError."""
    frontend = service.frontend
    arrived_s = frontend.clock()
    given = http.headers.get(REQUEST_ID_HEADER)
    request_id = ""
    request: Kind
    unknown: list[str]
    try:
        request_id = new_request_id(id_prefix, given, frontend.entropy)
        key = await asked_by()
        request, unknown = decode_leniently(await timely_body(frontend, http) if body is None else body, kind)
        if given is None and request.request_id is not None:
            request_id = new_request_id(id_prefix, request.request_id, frontend.entropy, "request_id")
            given = request.request_id
        refuse_unsupported(request)
        request.priority = allowed_priority(key, request.priority)
        exchange = await _exchange(service, request, request_id, key, arrived_s)
        exchange.told_id = given or request_id
        without: list[str] = without_effect(
            request,
            reads_parts=exchange.reads_parts,
            knows_tools=exchange.knows_tools,
            tool_parser=exchange.tool_parser,
        )
        exchange.without_effect = [*ignored, *unknown, *without]
        exchange.traceparent = _traceparent(http)
        exchange.load_format = http.headers.get(FORMAT_HEADER, "")
        exchange.may_return = http.headers.get(RESUMABLE_HEADER, "").lower() == "true"
        exchange.wants_ids = exchange.may_return or http.headers.get(EVENT_IDS_HEADER, "").lower() == "true"
        return exchange
    except ApiError as error:
        request_id = request_id or new_request_id(id_prefix, None, frontend.entropy)
        error.headers = {**error.headers, **id_headers(given, request_id)}
        raise


def _traceparent(http: Request) -> str:
    """The client's, if it is one: whatever else is in the header goes no further."""
    given = http.headers.get(TRACEPARENT_HEADER, "")
    return given if given and SpanContext.parse(given) is not None else ""


async def _exchange(
    service: CascadeService, request: Kind, request_id: str, key: ApiKey | None, arrived_s: float
) -> Exchange:
    """By a cascade, if one has the name asked for, else by the model itself."""
    if not request.model:
        request.model = service.frontend.catalogue.only()
    record = service.cascades.records.get(request.model)
    if record is not None:
        check_model(key, request.model)
        return CascadeExchange(service, request, request_id, record, key, arrived_s)
    frontend = service.frontend
    model = await frontend.model(request.model, key)
    if GENERATE not in model.tasks:
        raise bad_request(
            f"`{request.model}` is a pooling model: it does {', '.join(model.tasks)}. Ask /v1/embeddings or /pooling.",
            "model",
        )
    if request.penstock is not None:
        raise bad_request(f"`{request.model}` is a model, not a cascade: it takes no hints.", "penstock")
    if isinstance(request, ChatCompletionRequest) and request.echo and not request.stream:
        _want_prompt_logprobs(request)
    kind = BeamExchange if request.use_beam_search else ModelExchange
    return kind(frontend, request, request_id, model, key, arrived_s)


def _want_prompt_logprobs(request: Any) -> None:
    """vLLM tells them of a chat that is echoed, as many as of the answer's tokens."""
    if request.prompt_logprobs is None:
        request.prompt_logprobs = request.top_logprobs or 0
