"""Connections to one endpoint, kept open between requests."""

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from mesh.errors import ConfigurationError, PeerUnavailable
from services.cli.replay.connection import HttpConnection, ResponseSink


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host, port and path of an OpenAI-compatible API."""

    host: str
    port: int
    tls: bool
    path: str
    """Path in front of `/v1/...`; usually empty."""

    @property
    def authority(self) -> str:
        """host:port as the Host header wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(url: str) -> Endpoint:
    """The endpoint at `url`, with or without its /v1. Raises ConfigurationError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"{url!r} is no URL: {error}") from error
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or not plain:
        raise ConfigurationError(f"{url!r} is no endpoint; expected something like http://127.0.0.1:8000")
    tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(parts.hostname, port or (443 if tls else 80), tls, path)


class ConnectionPool:
    """As many connections as exchanges run at once; whoever calls bounds that number."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._tls = ssl.create_default_context() if endpoint.tls else None
        # The last one returned goes first: it is the least likely to have been closed for idleness.
        self._idle: deque[HttpConnection] = deque()

    async def exchange(self, request: bytes, sink: ResponseSink) -> None:
        """See `HttpConnection.exchange`. Raises PeerUnavailable.

        A server may close a kept connection just as a request is written to it; such a request is sent once
        more, over a new connection.
        """
        kept = self._take()
        if kept is not None:
            try:
                await self._exchange_over(kept, request, sink)
            except PeerUnavailable:
                if kept.answered:
                    raise
            else:
                return
        await self._exchange_over(await self._connect(), request, sink)

    def close(self) -> None:
        """Close the idle connections; those in use close when their exchange ends."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange_over(self, connection: HttpConnection, request: bytes, sink: ResponseSink) -> None:
        await connection.exchange(request, sink)
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def _take(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        endpoint = self.endpoint
        try:
            _, connection = await loop.create_connection(HttpConnection, endpoint.host, endpoint.port, ssl=self._tls)
        except OSError as error:
            raise PeerUnavailable(f"cannot connect to {endpoint.authority}: {error}") from error
        return connection
