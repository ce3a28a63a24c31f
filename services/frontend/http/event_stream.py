"""Server-sent events of any source, as a raw ASGI response."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class EventStream(Response):
    """Sends events as they come, to the last or until the client leaves. Unlike Starlette's own it needs a plain event
    loop only, so that it can be simulated."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """`events`: one or more whole ones at a time; closed at the end."""
        # Not Response.__init__, which encodes a body: there is none yet.
        self.background = None
        self._events = events
        fields = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        self._fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            either: set[asyncio.Future[Any]] = {sending, leaving}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._fields})
        async for events in self._events:
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
