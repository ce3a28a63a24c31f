"""POST /v1/responses and /v1/messages: chat completions in the words of OpenAI's Responses and Anthropic's Messages."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.answers.messages import MessagesTranslator
from services.frontend.answers.responses import ResponsesTranslator
from services.frontend.answers.sse import encode
from services.frontend.cascade.service import CascadeService
from services.frontend.errors import ApiError, bad_request
from services.frontend.http.body import decode_body, decode_leniently, timely_body
from services.frontend.http.exchange import Exchange, without_effect_header
from services.frontend.http.openapi import body_docs, object_docs, translated_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.http.routes_generate import accept_body
from services.frontend.http.translated_exchange import TranslatedExchange, Translator
from services.frontend.requests import messages_schema, responses_schema
from services.frontend.requests.messages_schema import CountTokensRequest, MessagesRequest, TokenCount
from services.frontend.requests.plan import plan_chat
from services.frontend.requests.response_store import StoredResponse
from services.frontend.requests.responses_schema import LOGPROBS, ResponsesRequest
from services.frontend.requests.schema import ChatCompletionRequest
from services.frontend.requests.service import FrontendService
from services.frontend.requests.shared_responses import SharedResponses

RESPONSES_PATH: Final = "/v1/responses"
STORED_PATH: Final = "/v1/responses/{response_id}"


def other_api_routes(service: CascadeService) -> APIRouter:
    """The endpoints of both."""
    router = APIRouter(tags=["generation"], route_class=RawRoute)
    frontend = service.frontend
    responses = frontend.responses

    @router.post(RESPONSES_PATH, **translated_docs("ResponsesRequest", "The response"))
    async def create_response(request: Request) -> Response:
        """Answer an input, or go on with an earlier response."""
        owner = await _owner(frontend, request)
        body, unknown = decode_leniently(await timely_body(frontend, request), ResponsesRequest)
        response_id = f"resp_{frontend.entropy.token_hex(16)}"
        earlier = await _earlier(responses, body.previous_response_id, owner)
        messages = (*earlier, *responses_schema.new_messages(body))

        def keep(whole: bytes, turn: dict[str, Any]) -> None:
            if body.store is not False:
                responses.keep(response_id, StoredResponse.of(whole, (*messages, turn), owner))

        def translator(exchange: Exchange) -> Translator:
            facts = _facts(body, int(frontend.unix_time()), exchange.sampling_defaults)
            return ResponsesTranslator(response_id, facts, keep, lambda: body.max_output_tokens or exchange.max_tokens)

        chat = responses_schema.chat_body(body, list(messages))
        ignored = [*unknown, *responses_schema.without_effect(body)]
        return await _translated(service, request, chat, "resp", translator, ignored)

    @router.get(STORED_PATH, **object_docs("The response", 401, 404))
    async def retrieve_response(request: Request) -> Response:
        """A response that a frontend of this mesh keeps."""
        owner = await _owner(frontend, request)
        found = await responses.find(request.path_params["response_id"], owner)
        if found is None:
            raise _response_not_found(request.path_params["response_id"])
        return Response(found.response, media_type="application/json")

    @router.delete(STORED_PATH, **object_docs("It is gone", 401, 404))
    async def delete_response(request: Request) -> Response:
        """Forget a response."""
        response_id = request.path_params["response_id"]
        if not await responses.drop(response_id, await _owner(frontend, request)):
            raise _response_not_found(response_id)
        return Response(
            encode({"id": response_id, "object": "response", "deleted": True}), media_type="application/json"
        )

    @router.post(f"{STORED_PATH}/cancel", **object_docs("It goes on no more", 400, 401, 404))
    async def cancel_response(request: Request) -> Response:
        """End a response that is made in the background, of which there are none here."""
        response_id = request.path_params["response_id"]
        if await responses.find(response_id, await _owner(frontend, request)) is None:
            raise _response_not_found(response_id)
        raise bad_request("Cannot cancel a synchronous response.", "response_id")

    @router.post("/v1/messages", **translated_docs("MessagesRequest", "The message"))
    async def create_message(request: Request) -> Response:
        """Answer a conversation as Anthropic's API does."""

        async def answer() -> Response:
            body, unknown = decode_leniently(await timely_body(frontend, request), MessagesRequest)
            translator = MessagesTranslator(f"msg_{frontend.entropy.token_hex(16)}")
            chat = messages_schema.chat_body(body)
            return await _translated(service, request, chat, "msg", lambda _: translator, unknown)

        return await _as_anthropic(frontend, request, answer)

    @router.post("/v1/messages/count_tokens", **body_docs(("CountTokensRequest",), "TokenCount", "The count"))
    async def count_tokens(request: Request) -> Response:
        """Tokens of the prompt that such a message would be."""

        async def answer() -> Response:
            body, unknown = decode_leniently(await timely_body(frontend, request), CountTokensRequest)
            chat = decode_body(encode(messages_schema.chat_body(body)), ChatCompletionRequest)
            model = await frontend.model(chat.model, await frontend.authenticate(_authorization(request)))
            with frontend.media.held(frontend.clock() + frontend.settings.request_deadline_s) as media:
                plan = await plan_chat(chat, "count", model, frontend.threads, media)
            count = encode(TokenCount.of(plan.prompt_tokens))
            return Response(count, headers=without_effect_header(unknown), media_type="application/json")

        return await _as_anthropic(frontend, request, answer)

    return router


async def _translated(
    service: CascadeService,
    request: Request,
    chat: dict[str, Any],
    id_prefix: str,
    translator: Callable[[Exchange], Translator],
    ignored: list[str],
) -> Response:
    """`ignored`: parameters that have no effect. Raises ApiError, which names the parameters of the chat completion
    where those have no other name."""
    authorization = _authorization(request)
    exchange = await accept_body(
        service, request, encode(chat), ChatCompletionRequest, id_prefix, authorization, ignored
    )
    return TranslatedExchange(exchange, translator(exchange))


async def _as_anthropic(
    frontend: FrontendService, request: Request, answer: Callable[[], Awaitable[Response]]
) -> Response:
    """With errors in Anthropic's form."""
    try:
        await frontend.authenticate(_authorization(request))
        return await answer()
    except ApiError as error:
        frontend.metrics.requests.labels("", request.url.path, str(error.status)).inc()
        told = {"type": error.type, "message": error.message, "code": error.code}
        body = MessagesTranslator("").failed(told, streamed=False)
        return Response(body, error.status, dict(error.headers), media_type="application/json")


def _authorization(request: Request) -> str | None:
    """Anthropic's clients have a header of their own."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization") or (f"Bearer {key}" if key else None)


async def _owner(frontend: FrontendService, request: Request) -> str:
    key = await frontend.authenticate(_authorization(request))
    return "" if key is None else key.name


async def _earlier(responses: SharedResponses, response_id: str | None, owner: str) -> tuple[dict[str, Any], ...]:
    if response_id is None:
        return ()
    found = await responses.find(response_id, owner)
    if found is None:
        raise ApiError(
            404,
            f"Previous response `{response_id}` not found: it was not stored, or is too old.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.messages


def _response_not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response `{response_id}` not found.", param="response_id", code="response_not_found")


_WEB_SEARCH_FACTS: Final = ("external_web_access", "filters", "search_context_size", "user_location")
_TOOL_FACTS: Final[Mapping[str, Sequence[str]]] = {
    "function": ("description", "strict", "allowed_callers", "async", "defer_loading", "output_schema"),
    "custom": ("allowed_callers", "async", "defer_loading", "description", "format"),
    "web_search": _WEB_SEARCH_FACTS,
    "web_search_2025_08_26": _WEB_SEARCH_FACTS,
    "web_search_preview": ("search_content_types", "search_context_size", "user_location"),
    "file_search": ("filters", "max_num_results", "ranking_options"),
    "code_interpreter": ("allowed_callers",),
    "mcp": (
        *("allowed_callers", "allowed_tools", "authorization", "connector_id", "defer_loading", "headers"),
        *("require_approval", "server_description", "server_url", "tunnel_id"),
    ),
}
"""What a tool of each type may hold, which a response says as null where it does not."""
_FORMAT_FACTS: Final = ("description", "strict")
_REASONING_FACTS: Final = ("context", "effort", "generate_summary", "mode", "summary")


def _facts(body: ResponsesRequest, created_at: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a response says of its request. `defaults`: sampling parameters of requests that leave them out."""
    tools = body.tools or []
    return {
        "created_at": created_at,
        "background": False,
        "instructions": body.instructions,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt": None,
        "reasoning": None if body.reasoning is None else _with_nulls(body.reasoning, _REASONING_FACTS),
        "service_tier": body.service_tier or "auto",
        "store": body.store is not False,
        "temperature": _or_default(body.temperature, defaults, "temperature", 1.0),
        "text": _text_facts(body),
        "tool_choice": body.tool_choice or "auto" if tools else "none",
        "tools": [_with_nulls(tool, _TOOL_FACTS.get(tool.get("type", ""), ())) for tool in tools],
        "top_p": 1.0 if body.temperature == 0 else _or_default(body.top_p, defaults, "top_p", 1.0),
        "presence_penalty": _or_default(body.presence_penalty, defaults, "presence_penalty", 0.0),
        "frequency_penalty": _or_default(body.frequency_penalty, defaults, "frequency_penalty", 0.0),
        "top_logprobs": body.top_logprobs or 0 if LOGPROBS in (body.include or ()) else None,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _text_facts(body: ResponsesRequest) -> dict[str, Any] | None:
    if body.text is None:
        return None
    form = body.text.format
    if form is not None and form.get("type") == "json_schema":
        form = _with_nulls(form, _FORMAT_FACTS)
    return {"format": form, "verbosity": body.text.verbosity}


def _with_nulls(fields: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {**dict.fromkeys(names), **fields}


def _or_default(value: float | None, defaults: Mapping[str, Any], name: str, otherwise: float) -> float:
    return float(value if value is not None else defaults.get(name, otherwise))
