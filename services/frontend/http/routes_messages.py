"""POST /v1/messages: chat completions in the words of Anthropic's Messages."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.answers.messages import MessagesTranslator
from services.frontend.answers.sse import encode
from services.frontend.cascade.service import CascadeService
from services.frontend.errors import ApiError
from services.frontend.http.body import decode_body, decode_leniently, timely_body
from services.frontend.http.exchange import without_effect_header
from services.frontend.http.openapi import body_docs, translated_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.http.translated_exchange import TranslatedExchange, accept_chat, authorization_of
from services.frontend.requests import messages_schema
from services.frontend.requests.api_keys import tenant_of
from services.frontend.requests.messages_schema import (
    CountTokensRequest,
    MessagesRequest,
    TemplateFacts,
    TokenCount,
)
from services.frontend.requests.plan import plan_chat
from services.frontend.requests.schema import ChatCompletionRequest
from services.frontend.requests.service import FrontendService


def messages_routes(service: CascadeService) -> APIRouter:
    """The endpoints of Anthropic's API."""
    frontend = service.frontend
    router = APIRouter(tags=["generation"], route_class=RawRoute)

    @router.post("/v1/messages", **translated_docs("MessagesRequest", "The message"))
    async def create_message(request: Request) -> Response:
        """Answer a conversation as Anthropic's API does."""

        async def answer() -> Response:
            body, unknown = decode_leniently(await timely_body(frontend, request), MessagesRequest)
            translator = MessagesTranslator(f"msg_{frontend.entropy.token_hex(16)}")
            chat = messages_schema.chat_body(body, await _template_facts(service, request, body))
            ignored = [*unknown, *messages_schema.without_effect(body)]
            exchange = await accept_chat(service, request, chat, "msg", ignored)
            return TranslatedExchange(exchange, translator)

        return await _as_anthropic(frontend, request, answer)

    @router.post("/v1/messages/count_tokens", **body_docs(("CountTokensRequest",), "TokenCount", "The count"))
    async def count_tokens(request: Request) -> Response:
        """Tokens of the prompt that such a message would be."""

        async def answer() -> Response:
            body, unknown = decode_leniently(await timely_body(frontend, request), CountTokensRequest)
            facts = await _template_facts(service, request, body)
            chat = decode_body(encode(messages_schema.chat_body(body, facts)), ChatCompletionRequest)
            key = await frontend.authenticate(authorization_of(request))
            model = await frontend.model(chat.model, key)
            ends_s = frontend.clock() + frontend.settings.request_deadline_s
            with frontend.media.held(ends_s, tenant_of(key).name) as media:
                plan = await plan_chat(chat, "count", model, frontend.threads, media)
            count = encode(TokenCount.of(plan.prompt_tokens))
            return Response(count, headers=without_effect_header(unknown), media_type="application/json")

        return await _as_anthropic(frontend, request, answer)

    return router


async def _template_facts(service: CascadeService, request: Request, body: CountTokensRequest) -> TemplateFacts:
    """The model's, as far as somebody needs them. Of a cascade, whose models differ, what all of them take."""
    frontend = service.frontend
    if not messages_schema.asks_for_template(body):
        return TemplateFacts()
    if service.cascades.records.get(body.model) is not None:
        return TemplateFacts(wants_system_first=True)
    model = await frontend.model(body.model, await frontend.authenticate(authorization_of(request)))
    text, outside = model.text, model.prompts
    if outside is not None and outside.is_only_way:
        needs_effort = messages_schema.disables_thinking(body)
        effort = await outside.effort_without_thinking() if needs_effort else "none"
        return TemplateFacts(effort, wants_system_first=True)
    if text.template is None:
        return TemplateFacts(wants_system_first=True)
    templates = [each for each in (text.template, text.tool_template) if each is not None]
    return TemplateFacts(
        text.template.effort_without_thinking, wants_system_first=any(each.wants_system_first for each in templates)
    )


async def _as_anthropic(
    frontend: FrontendService, request: Request, answer: Callable[[], Awaitable[Response]]
) -> Response:
    """With errors in Anthropic's form."""
    try:
        await frontend.authenticate(authorization_of(request))
        return await answer()
    except ApiError as error:
        frontend.metrics.requests.labels("", request.url.path, str(error.status)).inc()
        told = {"type": error.type, "message": error.message, "code": error.code}
        body = MessagesTranslator("").failed(told, streamed=False)
        return Response(body, error.status, dict(error.headers), media_type="application/json")
