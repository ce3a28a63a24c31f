"""Bearer tokens of an issuer (OIDC): who may ask with which, and on whose account. RFC 7519, RFC 8725, OpenID Connect.

A token stands for what an API key stands for, `ApiKey`, so all that bounds keys bounds tokens. Its tenant is
`jwt:SUBJECT`: no key can have that name.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import jwt
import msgspec
from msgspec import Meta

from services.frontend.errors import invalid_token, lacks_scope
from services.frontend.requests.api_keys import ApiKey

MAX_TOKEN_CHARACTERS: Final = 16 * 1024
MAX_REMEMBERED: Final = 4096
"""Tokens whose signatures need not be computed again; some 1 KiB each."""
TENANT_PREFIX: Final = "jwt:"
ALGORITHMS: Final[Mapping[str, tuple[str, ...]]] = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}
"""By the type of a key: with a private half each, so that who can check a token can make none. `none` and HS256, where
the public key would be the secret, are among the oldest attacks on tokens (RFC 8725, section 2.1)."""

JwksKey = Mapping[str, Any]
"""A key as the issuer publishes it (RFC 7517)."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token must say."""

    issuer: str
    audience: str
    leeway_s: float = 30.0
    """By which the clocks of the issuer and of this machine may differ."""
    tenant_claim: str = "sub"
    scope: str = ""
    """That every token must have; empty: none."""
    operator_scope: str = ""
    """With which a token is an operator's; empty: none is."""


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The claim `penstock`: what bounds a token, by the names that bound a key."""

    models: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=256)] = []
    share: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    requests_per_min: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    concurrency: Annotated[int, Meta(gt=0, le=10**9)] | None = None
    tokens_per_min: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    tokens_per_day: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    tokens_per_month: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    lowest_priority: Annotated[int, Meta(ge=-(10**9), le=10**9)] | None = None


@dataclass(frozen=True, slots=True)
class _Accepted:
    key: ApiKey
    kid: str
    jwks_key: JwksKey
    not_before_s: float
    expires_s: float


class TokenVerifier:
    """Checks tokens. `find` gives the issuer's key of an id, or the only one for an empty id; None if there is none."""

    def __init__(
        self, rules: TokenRules, find: Callable[[str], Awaitable[JwksKey | None]], unix_s: Callable[[], float]
    ) -> None:
        self._rules = rules
        self._find = find
        self._unix_s = unix_s
        self._accepted: OrderedDict[bytes, _Accepted] = OrderedDict()

    async def verify(self, token: str) -> ApiKey:
        """What the token allows. Raises ApiError: 401; 403 without the scope; 503 where the issuer's keys are not to
        be had."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise invalid_token(f"it is longer than {MAX_TOKEN_CHARACTERS} characters")
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = self._accepted.get(digest)
        if found is None or await self._find(found.kid) is not found.jwks_key:  # it may have been withdrawn since
            self._accepted.pop(digest, None)
            found = await self._checked(token)
        self._check_time(found)
        self._accepted[digest] = found
        self._accepted.move_to_end(digest)
        if len(self._accepted) > MAX_REMEMBERED:
            self._accepted.popitem(last=False)
        return found.key

    def _check_time(self, accepted: _Accepted) -> None:
        """By this frontend's clock, which tests turn. Raises ApiError (401)."""
        now_s, leeway_s = self._unix_s(), self._rules.leeway_s
        if now_s > accepted.expires_s + leeway_s:
            raise invalid_token("it has expired")
        if now_s < accepted.not_before_s - leeway_s:
            raise invalid_token("it is not valid yet")

    async def _checked(self, token: str) -> _Accepted:
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError) as error:
            raise invalid_token("it is no JWT") from error
        algorithm, kid = header.get("alg"), header.get("kid") or ""
        assert isinstance(kid, str), "the library has refused others"
        if not isinstance(algorithm, str) or algorithm not in {each for names in ALGORITHMS.values() for each in names}:
            raise invalid_token("its algorithm is not one of " + ", ".join(sum(ALGORITHMS.values(), ())))
        jwks_key = await self._find(kid)
        if jwks_key is None:
            raise invalid_token("its issuer has no key of this id (`kid`)")
        if algorithm not in ALGORITHMS.get(str(jwks_key.get("kty")), ()) or jwks_key.get("alg", algorithm) != algorithm:
            raise invalid_token("its algorithm is not that of the issuer's key")
        claims = self._claims(token, jwks_key, algorithm)
        moments = [claims.get(name, 0) for name in ("exp", "nbf")]
        if not all(type(each) in (int, float) and math.isfinite(each) for each in moments):
            raise invalid_token("`exp` or `nbf` is no number")
        expires_s, not_before_s = moments
        return _Accepted(self._key_of(claims), kid, jwks_key, not_before_s, expires_s)

    def _claims(self, token: str, jwks_key: JwksKey, algorithm: str) -> Mapping[str, Any]:
        rules = self._rules
        options: Any = {
            "require": ["exp", "iss", "aud", rules.tenant_claim],
            **dict.fromkeys(("verify_exp", "verify_nbf", "verify_iat"), False),  # see _check_time
        }
        try:
            return jwt.decode(
                token,
                jwt.PyJWK(dict(jwks_key), algorithm).key,
                algorithms=[algorithm],
                issuer=rules.issuer,
                audience=rules.audience,
                options=options,
            )
        except jwt.InvalidAudienceError as error:
            raise invalid_token("it is for another audience") from error
        except jwt.InvalidIssuerError as error:
            raise invalid_token("it is of another issuer") from error
        except jwt.MissingRequiredClaimError as error:
            raise invalid_token(f"it has no `{error.claim}`") from error
        except jwt.InvalidSignatureError as error:
            raise invalid_token("its signature is wrong") from error
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise invalid_token("it cannot be read") from error

    def _key_of(self, claims: Mapping[str, Any]) -> ApiKey:
        """Raises ApiError: 401; 403 without the scope."""
        rules, tenant = self._rules, claims[self._rules.tenant_claim]
        if not isinstance(tenant, str) or not 0 < len(tenant) <= 256 or not tenant.isprintable():
            raise invalid_token(f"`{rules.tenant_claim}` is no text of 1 to 256 characters")
        scopes = scopes_of(claims)
        if rules.scope and rules.scope not in scopes:
            raise lacks_scope(rules.scope)
        try:
            bounds = msgspec.convert(claims.get("penstock", {}), Bounds)
        except msgspec.ValidationError as error:
            raise invalid_token(f"its claim `penstock` cannot be read: {error}") from error
        return ApiKey(
            f"{TENANT_PREFIX}{tenant}",
            b"",
            bounds.requests_per_min,
            bounds.concurrency,
            bool(rules.operator_scope) and rules.operator_scope in scopes,
            bounds.tokens_per_min,
            models=frozenset(bounds.models),
            lowest_priority=bounds.lowest_priority,
            tokens_per_day=bounds.tokens_per_day,
            tokens_per_month=bounds.tokens_per_month,
            share=bounds.share,
        )


def scopes_of(claims: Mapping[str, Any]) -> frozenset[str]:
    """Of `scope` (RFC 8693) or `scp`: a text with blanks between them, or a list."""
    given = claims.get("scope", claims.get("scp", ""))
    words = given.split() if isinstance(given, str) else given if isinstance(given, list) else []
    return frozenset(word for word in words if isinstance(word, str))


def looks_like_a_token(presented: str) -> bool:
    """Whether it is a JWT by its form, and no API key."""
    return presented.count(".") == 2
