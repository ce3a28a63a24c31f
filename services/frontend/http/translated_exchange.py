"""A chat completion that its client asks for, and gets, in another API's words.

The exchange within does all there is to do: admission, placement, recovery, tools, grammars, cascades. What it sends is
read here, event by event, and written anew. That costs a JSON decoding per chunk, and no second way for a request to go
through the mesh.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.frontend.answers.sse import encode
from services.frontend.cascade.service import CascadeService
from services.frontend.http.exchange import Exchange
from services.frontend.http.routes_generate import accept_body
from services.frontend.requests.schema import ChatCompletionRequest

_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


class Translator(Protocol):
    """Writes one answer in another API's form (pure). `whole`, or `event` and then `end`; `failed` instead of what is
    left."""

    def whole(self, completion: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed, from that of the chat completion."""

    def event(self, chunk: dict[str, Any]) -> bytes:
        """The events that a chunk becomes; may be none."""

    def end(self) -> bytes:
        """The last events, of a stream that came to its end."""

    def failed(self, error: dict[str, Any], *, streamed: bool) -> bytes:
        """The body, or the last event, that says so. `error`: what stands under OpenAI's `error`."""


class TranslatedExchange(Response):
    """An exchange whose answer is translated on its way."""

    def __init__(self, inner: Exchange, translator: Translator) -> None:
        # Not Response.__init__, which encodes a body: there is none yet.
        self.background = None
        self._inner = inner
        self._translator = translator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the exchange within."""
        start: Message | None = None
        held: list[bytes] = []

        async def translate(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                if _is_event_stream(message):
                    await send(message)
                return
            assert start is not None, "a response starts before its body"
            if _is_event_stream(start):
                more = message.get("more_body", False)
                body = b"".join(self._events(message.get("body", b"")))
                if body or not more:
                    await send({"type": "http.response.body", "body": body, "more_body": more})
                return
            held.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = self._whole(start["status"], b"".join(held))
                await send({**start, "headers": _with_length(start["headers"], len(body))})
                await send({"type": "http.response.body", "body": body, "more_body": False})

        await self._inner(scope, receive, translate)

    def _whole(self, status: int, body: bytes) -> bytes:
        content = msgspec.json.decode(body)
        if status >= 400:
            return self._translator.failed(content["error"], streamed=False)
        return self._translator.whole(content)

    def _events(self, body: bytes) -> Iterator[bytes]:
        for event in body.split(_EVENT_END):
            if not event:
                continue
            data = next((line[len(_DATA) :] for line in event.split(b"\n") if line.startswith(_DATA)), None)
            if data is None:
                if event.startswith(b":"):  # a comment keeps the connection alive
                    yield event + _EVENT_END
            elif data == _DONE:
                yield self._translator.end()
            else:
                content = msgspec.json.decode(data)
                if "error" in content:
                    yield self._translator.failed(content["error"], streamed=True)
                else:
                    yield self._translator.event(content)


async def accept_chat(
    service: CascadeService, request: Request, chat: dict[str, Any], id_prefix: str, ignored: list[str]
) -> Exchange:
    """The exchange of a chat completion that came in other words. `ignored`: parameters that have no effect. Raises
    ApiError, which names the parameters of the chat completion where those have no other name."""
    asked_by = partial(service.frontend.authenticate, authorization_of(request))
    return await accept_body(service, request, encode(chat), ChatCompletionRequest, id_prefix, asked_by, ignored)


def authorization_of(request: Request) -> str | None:
    """Anthropic's clients have a header of their own."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization") or (f"Bearer {key}" if key else None)


def _is_event_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])


def _with_length(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]
