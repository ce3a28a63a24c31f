"""One HTTP/1.1 connection that carries one exchange after another, cheaply.

asyncio + httptools instead of httpx, because the client shares its cores with what it measures: see
benchmarks/load_generator_cost.py for the CPU of both per request and per streamed chunk.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol, cast

import httptools

from mesh.errors import PeerUnavailable

MAX_HEADER_BYTES = 64 << 10


class ResponseSink(Protocol):
    """Takes a response as it arrives; called on the event loop, so it must not block."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers, names in lower case."""

    def on_body(self, chunk: bytes) -> None:
        """The next piece of the body."""


class HttpConnection(asyncio.Protocol):
    """A connection; `exchange` may be called again once the one before has returned and `reusable` holds."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: ResponseSink | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._head_complete = False
        self._keep_alive = False
        self.answered = False
        """Whether anything of the current exchange's response has come."""

    @property
    def reusable(self) -> bool:
        """Open, idle, and the server will take another request."""
        return self._keep_alive and self._done is None and not self._is_closing()

    async def exchange(self, request: bytes, sink: ResponseSink) -> None:
        """Send `request` (head and body) and return when the whole response has gone to `sink`.

        Raises PeerUnavailable where the connection ends first or what comes is no HTTP. Cancellation closes
        the connection, which tells the server that nobody listens any more.
        """
        if self._transport is None or self._is_closing():
            raise PeerUnavailable("the endpoint closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self._sink = sink
        self._headers, self._header_bytes = {}, 0
        self._head_complete = self._keep_alive = self.answered = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self._transport.abort()
            raise
        finally:
            self._done = self._sink = self._parser = None

    def close(self) -> None:
        """Close the connection; a running exchange ends with PeerUnavailable."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came: through the parser into the sink."""
        if self._parser is None:
            # Nothing was asked for: whatever this is, the connection is not what we take it for.
            self.close()
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self._fail(PeerUnavailable(f"the endpoint does not answer in HTTP/1.1: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone; a body without a length ends that way, everything else is cut off."""
        delimited = "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "")
        if self._head_complete and exc is None and not delimited:
            self._finish()
        else:
            self._fail(PeerUnavailable(f"the endpoint closed the connection{f' ({exc})' if exc else ''}"))

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer behind the body."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"headers of more than {MAX_HEADER_BYTES} bytes")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._sink is not None
        self._head_complete = True
        self._sink.on_head(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._keep_alive = self._parser.should_keep_alive()
        self._finish()

    def _is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: PeerUnavailable) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()
