"""Contents of URLs: fetched with bounds on time, size and reach (`rules`)."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, ParamSpec, TypeVar
from urllib.parse import unquote

import httpx

from mesh.runtime import Threads
from services.frontend.errors import ApiError, bad_request
from services.frontend.media.rules import MediaRules, data_of, too_large

MAX_REDIRECTS: Final = 5
LARGE_BYTES: Final = 256 * 1024
_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""IP addresses of a host; raises OSError."""


class MediaFetcher:
    """Of one frontend; `stop` it."""

    def __init__(
        self,
        rules: MediaRules,
        timeout_s: float,
        threads: Threads,
        http: httpx.AsyncBaseTransport | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        """`timeout_s`: for one URL, redirects included. `http` and `resolve`: how hosts are asked and found; by
        default over this machine's network."""
        self._rules = rules
        self._timeout_s = timeout_s
        self._threads = threads
        self._http = http
        self._resolve = resolve or _resolve
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, url: str, max_bytes: int, param: str) -> bytes:
        """What is there. Raises ApiError (400), with the parameter: whoever names a URL answers for it."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await in_thread_if_large(self._threads, len(url), data_of, url, max_bytes, param)
        if scheme == "file":
            return await self._threads.run(self._read, url, max_bytes, param)
        if scheme not in ("http", "https"):
            raise bad_request("The URL must be an http, https, data or file URL.", param, "invalid_value")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._get(url, max_bytes, param)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _not_fetched(url, f"it took longer than {self._timeout_s:g} s", param) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise _not_fetched(url, str(error) or type(error).__name__, param) from error

    async def stop(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _get(self, url: str, max_bytes: int, param: str) -> bytes:
        current = httpx.URL(url)
        for _ in range(MAX_REDIRECTS + 1):
            request = await self._request(current, param)
            response = await self._sender().send(request, stream=True)
            try:
                if response.status_code in _REDIRECTS and "location" in response.headers:
                    current = current.join(response.headers["location"])
                    continue
                if response.status_code != httpx.codes.OK:
                    raise _not_fetched(url, f"its server answered {response.status_code}", param)
                return await _body(response, max_bytes, url, param)
            finally:
                await response.aclose()
        raise _not_fetched(url, f"more than {MAX_REDIRECTS} redirects", param)

    async def _request(self, url: httpx.URL, param: str) -> httpx.Request:
        """To the very address that was checked: the name might have another one a moment later (DNS rebinding)."""
        if url.scheme not in ("http", "https") or not url.host:
            raise bad_request("The URL must be an http, https, data or file URL.", param, "invalid_value")
        self._rules.check_host(url.host, param)
        addresses = await self._resolve(url.host, url.port or (443 if url.scheme == "https" else 80))
        self._rules.check_addresses(url.host, addresses, param)
        headers = {"host": url.netloc.decode("ascii"), "accept-encoding": "identity", "user-agent": "penstock"}
        return self._sender().build_request(
            "GET", url.copy_with(host=addresses[0]), headers=headers, extensions={"sni_hostname": url.host}
        )

    def _sender(self) -> httpx.AsyncClient:
        if self._client is None:
            # No connection is kept: kept ones are found by address, and this one's certificate was another name's.
            limits = httpx.Limits(max_keepalive_connections=0)
            self._client = httpx.AsyncClient(
                transport=self._http or httpx.AsyncHTTPTransport(limits=limits, trust_env=False),
                trust_env=False,
                timeout=self._timeout_s,
            )
        return self._client

    def _read(self, url: str, max_bytes: int, param: str) -> bytes:
        if not self._rules.local_path:
            message = "Local files cannot be named: this server runs without --allowed-local-media-path."
            raise bad_request(message, param)
        path = Path(unquote(url[len("file:") :].removeprefix("//")))
        root = Path(self._rules.local_path).resolve()
        if root not in path.resolve().parents:
            raise bad_request("The file is not in the directory of --allowed-local-media-path.", param)
        try:
            with path.resolve().open("rb") as file:
                content = file.read(max_bytes + 1)
        except OSError as error:
            raise bad_request(f"The file cannot be read: {error.strerror}.", param) from error
        if len(content) > max_bytes:
            raise too_large(max_bytes, param)
        return content


async def _body(response: httpx.Response, max_bytes: int, url: str, param: str) -> bytes:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _not_fetched(url, "its server compresses what is not to be compressed", param)
    pieces: list[bytes] = []
    received_bytes = 0
    async for piece in response.aiter_raw():
        received_bytes += len(piece)
        if received_bytes > max_bytes:
            raise too_large(max_bytes, param)
        pieces.append(piece)
    if not received_bytes:
        raise _not_fetched(url, "its server answered with nothing", param)
    return b"".join(pieces)


async def in_thread_if_large(
    threads: Threads,
    size_bytes: int,
    function: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """The event loop streams other answers: what takes it longer than about a millisecond is done elsewhere."""
    if size_bytes <= LARGE_BYTES:
        return function(*args, **kwargs)
    return await threads.run(function, *args, **kwargs)


def _not_fetched(url: str, reason: str, param: str) -> ApiError:
    return bad_request(f"`{url[:200]}` cannot be fetched: {reason}.", param, "media_not_fetched")


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]
