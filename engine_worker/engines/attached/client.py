"""HTTP to the attached server, and what it answers as bytes."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from engine_worker.engines.attached.wire import StreamError, error_of
from mesh.errors import ConfigurationError, EngineFailed

_CONNECT_S = 2.0
_IDLE_S = 2.0
"""vLLM closes connections that are idle for 5 s, maybe while a request is on its way."""
_DONE = b"[DONE]"
_CORE_HEADER = "X-data-parallel-rank"
"""By which vLLM is told the engine core of a request, and SGLang too."""


class ServerLost(EngineFailed):
    """The server cannot be reached, or broke off in the middle."""


class ServerClient:
    """One server. Connections are kept; a stream has one of its own, whose end is how vLLM hears of an abort."""

    def __init__(self, url: str, api_key: str, answer_s: float, core: int | None = None) -> None:
        """`core`: the engine core that is to have what is asked here; None: the server decides. Raises
        `ConfigurationError` for a URL that is none."""
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigurationError(f"{url!r} is no URL of a server; give one such as http://gpu-1:8000")
        self.url = base
        self._answer_s = answer_s
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if core is not None:
            headers[_CORE_HEADER] = str(core)
        self._http = httpx.AsyncClient(
            base_url=base,
            headers=headers,
            timeout=httpx.Timeout(answer_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_IDLE_S),
            trust_env=False,
        )

    async def get(self, path: str) -> bytes:
        """The body of what answers 200. Raises `ServerLost` and `StreamError`."""
        return await self._answer("GET", path, None, self._answer_s)

    async def post(self, path: str, body: Mapping[str, Any], answer_s: float) -> bytes:
        """The body of what answers 200 within this time. Raises `ServerLost` and `StreamError`."""
        return await self._answer("POST", path, body, answer_s)

    async def stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The data of each event until [DONE]. Raises `ServerLost` where it ends without, and `StreamError`.

        Nothing bounds the time between two events here: whether the server lives is asked beside it.
        """
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        try:
            async with self._http.stream("POST", path, json=body, headers=headers, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise error_of(answer.status_code, await answer.aread())
                buffer = b""
                async for piece in answer.aiter_raw():
                    *lines, buffer = (buffer + piece).split(b"\n")
                    for line in lines:
                        if not line.startswith(b"data:"):
                            continue
                        data = line[5:].strip()
                        if data == _DONE:
                            return
                        yield data
        except httpx.HTTPError as error:
            raise ServerLost(f"{self.url} broke off: {error!r}") from error
        raise ServerLost(f"{self.url} ended a stream in the middle")

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _answer(self, method: str, path: str, body: Mapping[str, Any] | None, answer_s: float) -> bytes:
        try:
            answer = await self._http.request(method, path, json=body, timeout=httpx.Timeout(answer_s))
        except httpx.HTTPError as error:
            raise ServerLost(f"{self.url}{path} does not answer: {error!r}") from error
        if answer.status_code != httpx.codes.OK:
            raise error_of(answer.status_code, answer.content)
        return answer.content


def explained(error: StreamError, url: str) -> EngineFailed:
    """Why a server that answers an error cannot be attached."""
    if error.status in (401, 403):
        return EngineFailed(f"{url} wants an API key: set PENSTOCK_ATTACH_API_KEY ({error.reason})")
    return EngineFailed(f"{url}: {error}; is it a server of OpenAI's API?")
