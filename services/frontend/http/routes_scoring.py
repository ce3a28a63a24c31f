"""POST /generative_scoring: by a completion of one token behind each item."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.answers.scoring import ScoringTranslator
from services.frontend.answers.sse import encode
from services.frontend.cascade.service import CascadeService
from services.frontend.errors import bad_request
from services.frontend.http.body import decode_leniently, timely_body
from services.frontend.http.openapi import body_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.http.routes_generate import accept_body
from services.frontend.http.translated_exchange import TranslatedExchange
from services.frontend.requests.schema import CompletionRequest
from services.frontend.requests.scoring_schema import ScoringRequest, completion_body, scoring_prompts


def scoring_routes(service: CascadeService) -> APIRouter:
    """The route of generative scoring."""
    frontend = service.frontend
    router = APIRouter(route_class=RawRoute)

    @router.post(
        "/generative_scoring",
        tags=["generation"],
        **body_docs(("ScoringRequest",), "GenerativeScores", "A score of each item"),
    )
    async def score(request: Request) -> Response:
        """How likely a model goes on with a certain token behind a query and each item."""
        asked_by = partial(frontend.authenticate, request.headers.get("authorization"))
        key = await asked_by()
        body, unknown = decode_leniently(await timely_body(frontend, request), ScoringRequest)
        name = body.model or frontend.catalogue.only()
        if service.cascades.records.get(name) is not None:
            raise bad_request("Items are scored by a model, not by a cascade.", "model")
        prompts = await scoring_prompts(body, await frontend.model(name, key), frontend.threads)
        completion = encode(completion_body(body, name, prompts))
        exchange = await accept_body(
            service, request, completion, CompletionRequest, "generative-scoring", asked_by, unknown
        )
        return TranslatedExchange(exchange, ScoringTranslator(body.label_token_ids, is_among_labels=body.apply_softmax))

    return router
