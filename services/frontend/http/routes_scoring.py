"""POST /generative_scoring and /v1/systemone: by a completion of one token behind each prompt."""

from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.answers.decisions import DecisionTranslator
from services.frontend.answers.scoring import ScoringTranslator
from services.frontend.answers.sse import encode
from services.frontend.cascade.service import CascadeService
from services.frontend.errors import ApiError, bad_request
from services.frontend.http.body import decode_leniently, timely_body
from services.frontend.http.openapi import body_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.http.routes_generate import accept_body
from services.frontend.http.translated_exchange import TranslatedExchange, Translator
from services.frontend.requests.decision_schema import (
    DecisionPrompts,
    DecisionRequest,
    as_asked,
    decision_completion,
    questions_of,
)
from services.frontend.requests.models import ServedModel
from services.frontend.requests.schema import CompletionRequest
from services.frontend.requests.scoring_schema import ScoringRequest, completion_body, scoring_prompts

Body = TypeVar("Body", ScoringRequest, DecisionRequest)
Asked = tuple[dict[str, Any], Translator]
"""The body of a completion, and what makes the answer of it."""
_TAGS: Final[list[str | Enum]] = ["generation"]


def scoring_routes(service: CascadeService) -> APIRouter:
    """The routes of generative scoring and of decisions."""
    frontend = service.frontend
    router = APIRouter(route_class=RawRoute)

    async def answered(
        request: Request, kind: type[Body], id_prefix: str, asked: Callable[[Body, ServedModel], Awaitable[Asked]]
    ) -> Response:
        asked_by = partial(frontend.authenticate, request.headers.get("authorization"))
        key = await asked_by()
        body, unknown = decode_leniently(await timely_body(frontend, request), kind)
        name = body.model or frontend.catalogue.only()
        if service.cascades.records.get(name) is not None:
            raise bad_request("Tokens are scored by a model, not by a cascade.", "model")
        completion, translator = await asked(body, await frontend.model(name, key))
        content = encode({**completion, "model": name})
        exchange = await accept_body(service, request, content, CompletionRequest, id_prefix, asked_by, unknown)
        return TranslatedExchange(exchange, translator)

    @router.post(
        "/generative_scoring", tags=_TAGS, **body_docs(("ScoringRequest",), "GenerativeScores", "A score of each item")
    )
    async def score(request: Request) -> Response:
        """How likely a model goes on with a certain token behind a query and each item."""

        async def asked(body: ScoringRequest, model: ServedModel) -> Asked:
            prompts = await scoring_prompts(body, model, frontend.threads)
            translator = ScoringTranslator(body.label_token_ids, is_among_labels=body.apply_softmax)
            return completion_body(body, prompts), translator

        return await answered(request, ScoringRequest, "generative-scoring", asked)

    @router.post(
        "/v1/systemone", tags=_TAGS, **body_docs(("DecisionRequest",), "Decisions", "An answer to each question")
    )
    async def decide(request: Request) -> Response:
        """What a model says to questions about a state, and how sure it is."""

        async def asked(body: DecisionRequest, model: ServedModel) -> Asked:
            questions = questions_of(body)
            prompts, labels = await DecisionPrompts(body, model, frontend.threads).made(questions)
            return decision_completion(body, prompts, labels), DecisionTranslator(questions, labels)

        try:
            return await answered(request, DecisionRequest, "decision", asked)
        except ApiError as error:
            raise as_asked(error) from error

    return router
