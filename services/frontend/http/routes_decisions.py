"""POST /v1/systemone: by a completion of one token behind each question."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.answers.decisions import DecisionTranslator
from services.frontend.answers.sse import encode
from services.frontend.cascade.service import CascadeService
from services.frontend.errors import ApiError, bad_request
from services.frontend.http.body import decode_leniently, timely_body
from services.frontend.http.openapi import body_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.http.routes_generate import accept_body
from services.frontend.http.translated_exchange import TranslatedExchange
from services.frontend.requests.decision_schema import (
    DecisionPrompts,
    DecisionRequest,
    as_asked,
    decision_completion,
    questions_of,
)
from services.frontend.requests.schema import CompletionRequest


def decision_routes(service: CascadeService) -> APIRouter:
    """The route of decisions."""
    frontend = service.frontend
    router = APIRouter(route_class=RawRoute)

    @router.post(
        "/v1/systemone",
        tags=["generation"],
        **body_docs(("DecisionRequest",), "Decisions", "An answer to each question"),
    )
    async def decide(request: Request) -> Response:
        """What a model says to questions about a state, and how sure it is."""
        asked_by = partial(frontend.authenticate, request.headers.get("authorization"))
        key = await asked_by()
        body, unknown = decode_leniently(await timely_body(frontend, request), DecisionRequest)
        name = body.model or frontend.catalogue.only()
        if service.cascades.records.get(name) is not None:
            raise bad_request("Questions are answered by a model, not by a cascade.", "model")
        questions = questions_of(body)
        try:
            made = DecisionPrompts(body, await frontend.model(name, key), frontend.threads)
            prompts, labels = await made.made(questions)
            completion = encode(decision_completion(body, name, prompts, labels))
            exchange = await accept_body(service, request, completion, CompletionRequest, "decision", asked_by, unknown)
        except ApiError as error:
            raise as_asked(error) from error
        return TranslatedExchange(exchange, DecisionTranslator(questions, labels))

    return router
