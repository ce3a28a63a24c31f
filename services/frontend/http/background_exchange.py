"""A response that is made in the background: its exchange, with nobody at the other end of the line."""

import asyncio
import logging
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from services.frontend.answers.responses import ResponsesTranslator
from services.frontend.answers.sse import encode
from services.frontend.cascade.service import CascadeService
from services.frontend.errors import ADOPTED, STOPPED, ApiError
from services.frontend.http.event_stream import EventStream
from services.frontend.http.exchange import Exchange, without_effect_header
from services.frontend.http.request_ids import MESH_ID_HEADER, REQUEST_ID_HEADER
from services.frontend.http.resume_exchange import ResumeExchange, resume
from services.frontend.http.routes_generate import accept_body
from services.frontend.http.server import TRANSPORT
from services.frontend.http.translated_exchange import TranslatedExchange
from services.frontend.requests.api_keys import ApiKey
from services.frontend.requests.response_store import StoredResponse
from services.frontend.requests.running_response import BackgroundWork, Ended, ResponseStatus, RunningResponse
from services.frontend.requests.schema import ChatCompletionRequest
from services.frontend.requests.service import FrontendService

log = logging.getLogger(__name__)

RESPONSES_PATH: Final = "/v1/responses"
ID_PREFIX: Final = "resp"
PLANNED_WITHIN_S: Final = 1.0
"""A request that cannot be served is refused if that shows so soon; later its response fails."""


async def in_background(
    frontend: FrontendService,
    exchange: Exchange,
    facts: dict[str, Any],
    response_id: str,
    owner: str,
    messages: tuple[dict[str, Any], ...],
    chat: dict[str, Any],
    *,
    is_streamed: bool,
) -> Response:
    """Have a response made, and answer with what it is so far, or with its events as they come. `messages`: the
    conversation up to it; `chat`: body of the `exchange`."""
    responses = frontend.background
    made = BackgroundExchange(exchange, facts, response_id)

    def queued() -> StoredResponse:
        return StoredResponse.of(made.translator.queued(), messages, owner)

    running = responses.begin(BackgroundWork(response_id, queued(), exchange.request_id, encode(chat), is_streamed))
    making = responses.make(running, made.make(running))
    await made.planned(making)
    if made.refusal is not None:
        responses.forget(running)
        return made.refusal
    running.work = replace(running.work, queued=queued())  # which knows the bound of its tokens now
    made.promise(running)
    if not making.done():
        await responses.entrust(running)
    headers = {REQUEST_ID_HEADER: exchange.told_id, MESH_ID_HEADER: exchange.request_id}
    headers |= without_effect_header(exchange.without_effect)
    if is_streamed:
        return EventStream(running.follow(None), headers)
    return Response(running.work.queued.response, media_type="application/json", headers=headers)


class _NoConnection:
    def abort(self) -> None:
        """Nobody reads, and so nobody reads too slowly."""


class BackgroundExchange:
    """Makes one response, and keeps it as it comes in a `RunningResponse`."""

    def __init__(self, exchange: Exchange, facts: dict[str, Any], response_id: str) -> None:
        """`facts`: see `ResponsesTranslator`."""
        self._exchange = exchange
        self._running: RunningResponse | None = None
        self.translator = ResponsesTranslator(
            response_id, facts, self._keep, lambda: exchange.max_tokens, exchange.model
        )
        self._is_promised = False
        self.refusal: Response | None = None
        """What the client gets in place of a promise."""
        self._ended: Ended | None = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self._planned = asyncio.Event()
        exchange.on_planned = self._on_planned
        exchange.token_by_token = True

    def promise(self, running: RunningResponse) -> None:
        """The client knows of it from now on, and of its id, if it reads a stream."""
        self._is_promised = True
        running.add(self.translator.begin())

    async def planned(self, making: asyncio.Future[Ended | None]) -> None:
        """Return once it is known whether the request can be served, or that takes too long."""
        planned = asyncio.ensure_future(self._planned.wait())
        try:
            either: set[asyncio.Future[Any]] = {planned, making}
            await asyncio.wait(either, timeout=PLANNED_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            planned.cancel()

    async def make(self, running: RunningResponse) -> Ended | None:
        """How it has ended; None where it was refused, or another frontend has it now."""
        self._running = running
        scope: Scope = {"type": "http", "method": "POST", "path": RESPONSES_PATH, TRANSPORT: _NoConnection()}
        await TranslatedExchange(self._exchange, self.translator)(scope, _never, self._take)
        error = self.translator.error
        if error is None:
            return self._ended
        if not self._is_promised:
            body = msgspec.json.encode({"error": error})
            self.refusal = Response(body, self._status, self._headers, media_type="application/json")
            return None
        if self._is_left:
            log.info("a response is left to another frontend", extra={"response_id": running.work.response_id})
            return None
        if self._status != 200:  # no event has said so
            running.add(self.translator.failed(error, streamed=True))
        return Ended(self.translator.given_up())

    def _on_planned(self) -> None:
        if self._running is not None:
            self._running.status = ResponseStatus.IN_PROGRESS
        self._planned.set()

    def _keep(self, response: bytes, turn: dict[str, Any]) -> None:
        self._ended = Ended(response, turn)

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            self._headers = {name: value for name, value in headers.items() if not name.startswith("content-")}
        elif self._status == 200 and self._running is not None and not self._is_left:
            self._running.add(message["body"])

    @property
    def _is_left(self) -> bool:
        """Whether another frontend has it now, or will have it."""
        error = self.translator.error
        return error is not None and error["code"] in (STOPPED, ADOPTED)


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("nobody leaves who is not there")


async def go_on(service: CascadeService, running: RunningResponse) -> Ended | None:
    """Make a response that another frontend had begun: with what its workers still have of it, or anew."""
    frontend, work = service.frontend, running.work
    facts = msgspec.json.decode(work.queued.response)
    adopted = await _adopted(frontend, work)
    try:
        if adopted is None:
            running.leave_events()  # it may say something else this time
            exchange = await _begun_anew(service, work)
            running.work = replace(running.work, request_id=exchange.request_id)
            running.holder = None  # who has it under the former id; it is entrusted anew
        else:
            exchange = adopted
        made = BackgroundExchange(exchange, facts, work.response_id)
        running.status = ResponseStatus.IN_PROGRESS
        made.promise(running)
        return await made.make(running)
    except ApiError as error:
        error_facts = {"code": "server_error", "message": error.message}
        return Ended(encode({**facts, "status": ResponseStatus.FAILED, "error": error_facts}))
    finally:
        if adopted is not None:
            adopted.close()


async def _adopted(frontend: FrontendService, work: BackgroundWork) -> ResumeExchange | None:
    """What the workers have of it, from its first token on; None: not all of it, if anything."""
    if not msgspec.json.decode(work.chat).get("stream"):
        return None  # only streams are kept
    key = frontend.key_named(work.queued.owner)
    try:
        exchange = await resume(frontend, work.request_id, None, key, frontend.clock())
    except ApiError:
        return None
    exchange.wants_ids = exchange.may_return = False
    return exchange


async def _begun_anew(service: CascadeService, work: BackgroundWork) -> Exchange:
    """Raises ApiError."""

    async def key() -> ApiKey | None:
        return service.frontend.key_named(work.queued.owner)

    nobody = Request({"type": "http", "method": "POST", "path": RESPONSES_PATH, "headers": []})
    return await accept_body(service, nobody, work.chat, ChatCompletionRequest, ID_PREFIX, key)
