"""POST /v1/responses: chat completions in the words of OpenAI's Responses, some of them in the background."""

from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.answers.response_facts import response_facts
from services.frontend.answers.responses import ResponsesTranslator
from services.frontend.answers.sse import encode
from services.frontend.cascade.service import CascadeService
from services.frontend.errors import ApiError, bad_request
from services.frontend.http.background_exchange import ID_PREFIX, RESPONSES_PATH, go_on, in_background
from services.frontend.http.body import decode_leniently, timely_body
from services.frontend.http.event_stream import EventStream
from services.frontend.http.openapi import object_docs, translated_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.http.translated_exchange import TranslatedExchange, accept_chat, authorization_of
from services.frontend.requests import responses_schema
from services.frontend.requests.background import BackgroundResponses
from services.frontend.requests.response_store import StoredResponse
from services.frontend.requests.responses_schema import ResponsesRequest
from services.frontend.requests.running_response import UNFINISHED
from services.frontend.requests.service import FrontendService

STORED_PATH: Final = "/v1/responses/{response_id}"
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}


def responses_routes(service: CascadeService) -> APIRouter:
    """The endpoints of OpenAI's Responses."""
    frontend = service.frontend
    router = APIRouter(tags=["generation"], route_class=RawRoute)
    responses = frontend.background
    responses.go_on = lambda running: go_on(service, running)

    @router.post(RESPONSES_PATH, **translated_docs("ResponsesRequest", "The response"))
    async def create_response(request: Request) -> Response:
        """Answer an input, or go on with an earlier response."""
        owner = await _owner(frontend, request)
        body, unknown = decode_leniently(await timely_body(frontend, request), ResponsesRequest)
        response_id = f"resp_{frontend.entropy.token_hex(16)}"
        earlier = await _earlier(responses, body.previous_response_id, owner)
        messages = (*earlier, *responses_schema.new_messages(body))
        if body.background and body.store is False:
            raise bad_request("background can only be used when `store` is true.", "background")
        chat = responses_schema.chat_body(body, list(messages))
        ignored = [*unknown, *responses_schema.without_effect(body)]

        def keep(whole: bytes, turn: dict[str, Any]) -> None:
            if body.store is not False:
                frontend.responses.keep(response_id, StoredResponse.of(whole, (*messages, turn), owner))

        exchange = await accept_chat(service, request, chat, ID_PREFIX, ignored)
        facts = response_facts(body, int(frontend.unix_time()), exchange.sampling_defaults)
        if body.background:
            return await in_background(
                frontend, exchange, facts, response_id, owner, messages, chat, is_streamed=body.stream is True
            )
        return TranslatedExchange(exchange, ResponsesTranslator(response_id, facts, keep, lambda: exchange.max_tokens))

    @router.get(STORED_PATH, **object_docs("The response", 400, 401, 404))
    async def retrieve_response(request: Request) -> Response:
        """A response that a frontend of this mesh makes or keeps; with `stream=true` its events, those behind the one
        that has the number `starting_after`."""
        owner = await _owner(frontend, request)
        response_id = request.path_params["response_id"]
        if _wants_events(request):
            events = await responses.events(response_id, owner, _starting_after(request))
            if events is None:
                raise _response_not_found(response_id)
            return EventStream(events)
        return _shown(await responses.find(response_id, owner), response_id)

    @router.delete(STORED_PATH, **object_docs("It is gone", 401, 404))
    async def delete_response(request: Request) -> Response:
        """Forget a response, and end it if it is still being made."""
        response_id = request.path_params["response_id"]
        if not await responses.drop(response_id, await _owner(frontend, request)):
            raise _response_not_found(response_id)
        return Response(
            encode({"id": response_id, "object": "response", "deleted": True}), media_type="application/json"
        )

    @router.post(f"{STORED_PATH}/cancel", **object_docs("It goes on no more", 400, 401, 404))
    async def cancel_response(request: Request) -> Response:
        """End a response that is made in the background; one that has ended is returned as it is."""
        response_id = request.path_params["response_id"]
        ended = await responses.cancel(response_id, await _owner(frontend, request))
        if ended is not None and not msgspec.json.decode(ended.response)["background"]:
            raise bad_request("Cannot cancel a synchronous response.", "response_id")
        return _shown(ended, response_id)

    return router


async def _owner(frontend: FrontendService, request: Request) -> str:
    key = await frontend.authenticate(authorization_of(request))
    return "" if key is None else key.name


async def _earlier(responses: BackgroundResponses, response_id: str | None, owner: str) -> tuple[dict[str, Any], ...]:
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
    status = msgspec.json.decode(found.response)["status"]
    if status in UNFINISHED:
        raise bad_request(
            f"Previous response `{response_id}` is {status}: go on with it once it has ended.", "previous_response_id"
        )
    return tuple(message for message in found.messages if not _says_nothing(message))


def _says_nothing(message: dict[str, Any]) -> bool:
    """An answer of which nothing came, or only reasoning: no turn to the next one, as in vLLM."""
    return message["role"] == "assistant" and not message.get("content") and not message.get("tool_calls")


def _wants_events(request: Request) -> bool:
    """Raises ApiError (400)."""
    given = request.query_params.get("stream", "false")
    wanted = _BOOLEANS.get(given.lower())
    if wanted is None:
        raise bad_request(f"`stream` is {given!r}: it must be true or false.", "stream")
    return wanted


def _starting_after(request: Request) -> int | None:
    """Raises ApiError (400)."""
    given = request.query_params.get("starting_after")
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise bad_request(f"`starting_after` is {given!r}: give the `sequence_number` of an event.", "starting_after")
    return int(given)


def _shown(found: StoredResponse | None, response_id: str) -> Response:
    if found is None:
        raise _response_not_found(response_id)
    return Response(found.response, media_type="application/json")


def _response_not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id}' not found.", param="response_id", code="response_not_found")
