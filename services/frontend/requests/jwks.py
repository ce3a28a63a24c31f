"""The keys that an issuer of tokens publishes (JWKS), found by its name alone and read again as they are rotated.

PyJWT's own client of such keys blocks while it reads, and takes however much comes.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import msgspec

from mesh.errors import ConfigurationError
from mesh.tasks import TaskSet
from services.frontend.errors import unavailable
from services.frontend.requests.jwt_tokens import ALGORITHMS, JwksKey

log = logging.getLogger(__name__)

RELOAD_S: Final = 300.0
"""How often they are read again, if nothing asks for it before."""
SOONEST_S: Final = 10.0
"""Between two readings: a token with a made-up key id costs the issuer no more than this."""
STALE_S: Final = 24 * 3600.0
"""How long keys are believed of an issuer that does not answer."""
DEADLINE_S: Final = 5.0
MAX_BYTES: Final = 256 * 1024
MAX_KEYS: Final = 64
DISCOVERY_PATH: Final = "/.well-known/openid-configuration"


class _KeySet(msgspec.Struct, frozen=True):
    keys: list[dict[str, Any]]


class _Configuration(msgspec.Struct, frozen=True):
    issuer: str
    jwks_uri: str


class JwksKeys:
    """Of one issuer. Read when first asked for, and after `RELOAD_S`; one that is not known has them read at once."""

    def __init__(
        self,
        issuer: str,
        clock: Callable[[], float],
        *,
        jwks_url: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`jwks_url`: where the keys are; empty to ask the issuer at each reading (OpenID Connect Discovery 1.0,
        section 4). `transport`: how all is fetched, by default over the network. Raises ConfigurationError for a URL
        that is neither https nor on this machine."""
        option, url = ("--jwt-jwks-url", jwks_url) if jwks_url else ("--jwt-issuer", issuer)
        if not _is_trusted(url):
            raise ConfigurationError(
                f"{option} {url}: give an https:// URL; whoever changes keys on their way decides who may ask"
            )
        self._issuer = issuer
        self._jwks_url = jwks_url
        self._clock = clock
        self._http = httpx.AsyncClient(transport=transport, timeout=DEADLINE_S, follow_redirects=False)
        self._keys: Mapping[str, JwksKey] | None = None
        self._read_s = 0.0
        """When they were read last."""
        self._tried_s = -SOONEST_S
        self._reading = asyncio.Lock()
        self._tasks = TaskSet("jwks")

    async def find(self, kid: str) -> JwksKey | None:
        """The key of an id; of an empty one the only key there is. Raises ApiError (503) while there are none."""
        if self._of(kid) is None:
            await self._read_again()
        elif self._clock() - self._read_s > RELOAD_S and not len(self._tasks):
            self._tasks.spawn(self._read_again(), name="read the keys of the tokens' issuer")
        if self._keys is None or self._clock() - self._read_s > STALE_S:
            raise unavailable("The keys of the tokens' issuer cannot be read now; try again.", "issuer_unavailable")
        return self._of(kid)

    async def stop(self) -> None:
        """Close the connections."""
        await self._tasks.cancel()
        await self._http.aclose()

    def _of(self, kid: str) -> JwksKey | None:
        keys = self._keys or {}
        if kid:
            return keys.get(kid)
        return next(iter(keys.values())) if len(keys) == 1 else None

    async def _read_again(self) -> None:
        """Unless somebody has just tried. Keys that cannot be read leave the former ones."""
        async with self._reading:
            if self._clock() - self._tried_s < SOONEST_S:
                return
            self._tried_s = self._clock()
            url = configuration_url = self._issuer.rstrip("/") + DISCOVERY_PATH
            try:
                async with asyncio.timeout(DEADLINE_S):
                    url = self._jwks_url or jwks_url_of(await self._fetched(configuration_url), self._issuer)
                    keys = usable_keys(await self._fetched(url))
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                log.error(
                    "the keys of the tokens' issuer cannot be read; the former ones stay",
                    extra={"url": url, "error": f"{type(error).__name__}: {error}"},
                )
                return
            if keys != self._keys:
                log.info("new keys of the tokens' issuer are in use", extra={"key_ids": list(keys)})
                former = self._keys or {}
                # The very same objects where nothing has changed: tokens checked by them need no second look.
                self._keys = {kid: former[kid] if former.get(kid) == key else key for kid, key in keys.items()}
            self._read_s = self._clock()

    async def _fetched(self, url: str) -> bytes:
        """Raises httpx.HTTPError, ValueError."""
        async with self._http.stream("GET", url, headers={"accept": "application/json"}) as response:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}")
            body = b""
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise ValueError(f"more than {MAX_BYTES} bytes")
            return body


def jwks_url_of(body: bytes, issuer: str) -> str:
    """Where an issuer has its keys, from its configuration. Raises ValueError for that of another issuer (which section
    4.3 wants refused), and for keys that may be changed on their way."""
    try:
        found = msgspec.json.decode(body, type=_Configuration)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no configuration of an issuer: {error}") from error
    if found.issuer != issuer:
        raise ValueError(f"it is the configuration of {found.issuer!r}: give --jwt-issuer exactly so, if that is meant")
    if not _is_trusted(found.jwks_uri):
        raise ValueError(f"its keys are at {found.jwks_uri!r}, which is no https:// URL")
    return found.jwks_uri


def _is_trusted(url: str) -> bool:
    """Whether what is read there is what its server sent."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    is_here = parts.hostname in ("127.0.0.1", "localhost", "::1")
    return bool(parts.hostname) and (parts.scheme == "https" or (parts.scheme == "http" and is_here))


def usable_keys(body: bytes) -> dict[str, JwksKey]:
    """By their ids, those that signatures can be checked with: public ones alone. Raises ValueError."""
    try:
        found = msgspec.json.decode(body, type=_KeySet).keys
    except msgspec.MsgspecError as error:
        raise ValueError(f"no set of keys: {error}") from error
    if len(found) > MAX_KEYS:
        raise ValueError(f"{len(found)} keys, at most {MAX_KEYS} are taken")
    public = (key for key in found if key.get("kty") in ALGORITHMS and "d" not in key)
    return {str(key.get("kid", "")): key for key in public if key.get("use", "sig") == "sig"}
