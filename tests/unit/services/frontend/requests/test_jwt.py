"""Tokens of an issuer of the tests' own: what opens the endpoint, and what does not."""

import base64
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import httpx
import jwt
import openai
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import RSAAlgorithm

from mesh.errors import ConfigurationError
from services.frontend.errors import ApiError
from services.frontend.requests import jwks
from services.frontend.requests.api_keys import ApiKey
from services.frontend.requests.jwks import JwksKeys, jwks_url_of, usable_keys
from services.frontend.requests.jwt_tokens import TokenRules, TokenVerifier, scopes_of
from services.frontend.settings import FrontendSettings
from tests.jwt_issuer import public, published
from tests.unit.services.frontend.cascade_of_fakes import saying
from tests.unit.services.frontend.mesh_of_fakes import mesh_of_fakes

pytestmark = pytest.mark.live

ISSUER, AUDIENCE, URL = "https://issuer.test/", "penstock", "https://issuer.test/jwks"
NOW_S = 1_800_000_000.0
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
RULES = TokenRules(ISSUER, AUDIENCE)


PUBLISHED = [
    public(RSA_KEY, "r"),
    public(EC_KEY, "e", use="sig"),
    public(ED_KEY, "d"),
    public(RSA_KEY, "ps", alg="PS256"),
]


def token(key: Any = RSA_KEY, algorithm: str = "RS256", kid: str | None = "r", **claims: Any) -> str:
    """Good unless told otherwise; a claim None is missing."""
    given = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": NOW_S + 60, **claims}
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode({name: value for name, value in given.items() if value is not None}, key, algorithm, headers)


class Issuer:
    """Publishes keys, counts how often it is asked, and fails on demand."""

    def __init__(self, *keys: dict[str, Any]) -> None:
        self.keys = list(keys or PUBLISHED)
        self.asked = 0
        self.status = 200
        self.now_s = 1000.0
        self.unix_s = NOW_S
        self.configuration: dict[str, Any] = {"issuer": ISSUER, "jwks_uri": URL}
        transport = httpx.MockTransport(self._answer)
        self.jwks = JwksKeys(ISSUER, lambda: self.now_s, jwks_url=URL, transport=transport)
        self.discovering = JwksKeys(ISSUER, lambda: self.now_s, transport=transport)
        self.verifier = self.verifying(RULES)

    def verifying(self, rules: TokenRules) -> TokenVerifier:
        """By other rules."""
        return TokenVerifier(rules, self.jwks.find, lambda: self.unix_s)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if request.url == ISSUER + ".well-known/openid-configuration":
            return httpx.Response(self.status, json=self.configuration)
        assert request.url in (URL, URL + "/moved")
        return httpx.Response(self.status, json={"keys": self.keys})


async def refused(issuer: Issuer, presented: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await issuer.verifier.verify(presented)
    return caught.value


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"),
    [
        (RSA_KEY, "RS256", "r"),
        (RSA_KEY, "PS512", "r"),
        (RSA_KEY, "PS256", "ps"),
        (EC_KEY, "ES256", "e"),
        (ED_KEY, "EdDSA", "d"),
    ],
)
async def test_good_tokens_open(key: Any, algorithm: str, kid: str) -> None:
    issuer = Issuer()
    assert await issuer.verifier.verify(token(key, algorithm, kid)) == ApiKey("jwt:alice", b"")


async def test_a_token_without_a_key_id_is_of_the_only_key() -> None:
    assert (await Issuer(public(RSA_KEY, "r")).verifier.verify(token(kid=None))).name == "jwt:alice"
    assert "no key of this id" in (await refused(Issuer(), token(kid=None))).message


def by_hand(header: dict[str, Any], secret: bytes = b"") -> str:
    """With whatever header, which a library would refuse to write."""

    def encoded(content: Any) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=")

    body = b".".join((encoded(header), encoded({"iss": ISSUER, "aud": AUDIENCE, "sub": "eve", "exp": NOW_S + 60})))
    signature = hmac.new(secret, body, hashlib.sha256).digest() if secret else b""
    return (body + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


PEM = RSA_KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
FORGED = [
    (by_hand({"alg": "none", "kid": "r"}), "algorithm"),
    (by_hand({"alg": "None", "kid": "r"}), "algorithm"),
    (by_hand({"kid": "r"}), "algorithm"),
    (by_hand({"alg": ["RS256"], "kid": "r"}), "algorithm"),
    (by_hand({"alg": "HS256", "kid": "r"}, PEM), "algorithm"),
    (by_hand({"alg": "RS256", "kid": "r"}, PEM), "signature"),
    (by_hand({"alg": "ES256", "kid": "r"}), "not that of the issuer's key"),
    (by_hand({"alg": "RS256", "kid": 5}), "no JWT"),
    (by_hand({"alg": "RS256", "kid": "r", "jwk": public(OTHER_RSA_KEY, "r")}), "signature"),
    (token(OTHER_RSA_KEY), "signature"),
    (token(OTHER_RSA_KEY, kid="unknown"), "no key of this id"),
    (token(algorithm="RS256", kid="ps"), "not that of the issuer's key"),
    (token(aud="another"), "another audience"),
    (token(aud=["another", "third"]), "another audience"),
    (token(iss="https://evil.test/"), "another issuer"),
    (token(iss="https://issuer.test"), "another issuer"),
    (token(exp=NOW_S - 31), "has expired"),
    (token(nbf=NOW_S + 31), "not valid yet"),
    (token(exp=None), "no `exp`"),
    (token(aud=None), "no `aud`"),
    (token(iss=None), "no `iss`"),
    (token(sub=None), "no `sub`"),
    (token(sub=""), "`sub` is no text"),
    (token(sub="a\nb"), "`sub` is no text"),
    (token(penstock={"share": -1}), "`penstock` cannot be read"),
    (token(penstock={"operator": True}), "`penstock` cannot be read"),
    (token()[:-4] + "AAAA", "signature"),
    (token(pad="x" * 20_000), "longer than"),
    ("a.b.c", "no JWT"),
]  # fmt: skip


@pytest.mark.parametrize(("presented", "reason"), FORGED)
async def test_bad_tokens_are_refused_with_the_reason(presented: str, reason: str) -> None:
    error = await refused(Issuer(), presented)
    assert (error.status, error.code) == (401, "invalid_api_key")
    assert reason in error.message
    assert error.headers["www-authenticate"] == 'Bearer error="invalid_token"'


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
async def test_whatever_is_presented_is_answered_401(first: str, second: str, third: str) -> None:
    assert (await refused(Issuer(), f"{first}.{second}.{third}")).status == 401


async def test_a_token_that_was_good_expires_by_our_clock_with_some_leeway() -> None:
    issuer, presented = Issuer(), token()
    for later_s in (0, 60, 90):
        issuer.unix_s = NOW_S + later_s
        await issuer.verifier.verify(presented)
    issuer.unix_s = NOW_S + 91
    assert "expired" in (await refused(issuer, presented)).message


async def test_claims_bound_the_token_as_a_key_is_bounded() -> None:
    issuer = Issuer()
    bounds = {
        "models": ["chat"],
        "share": 2,
        "requests_per_min": 60,
        "concurrency": 3,
        "tokens_per_min": 9,
        "lowest_priority": 1,
    }
    key = await issuer.verifier.verify(token(penstock=bounds, scope="openid penstock:operator"))
    expected = ApiKey("jwt:alice", b"", 60.0, 3, False, 9.0, models=frozenset(["chat"]), lowest_priority=1, share=2.0)
    assert key == expected, "nobody has said that a scope makes operators"
    rules = TokenRules(ISSUER, AUDIENCE, tenant_claim="org", scope="llm", operator_scope="admin")
    verifier = issuer.verifying(rules)
    assert (await verifier.verify(token(org="acme", scp=["llm", "admin"]))) == ApiKey("jwt:acme", b"", is_operator=True)
    with pytest.raises(ApiError) as caught:
        await verifier.verify(token(org="acme", scope="llms admin"))
    assert (caught.value.status, caught.value.code) == (403, "insufficient_scope")


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [({"scope": "a b"}, {"a", "b"}), ({"scp": ["a", 5]}, {"a"}), ({"scope": 5}, set()), ({}, set())],
)
def test_scopes_are_read_in_both_forms(claims: dict[str, Any], scopes: set[str]) -> None:
    assert scopes_of(claims) == scopes


async def test_keys_are_rotated_without_a_restart_and_withdrawn_ones_open_nothing() -> None:
    issuer = Issuer(public(RSA_KEY, "old"))
    old, new = token(kid="old"), token(OTHER_RSA_KEY, kid="new")
    await issuer.verifier.verify(old)
    issuer.keys.append(public(OTHER_RSA_KEY, "new"))
    issuer.now_s += jwks.SOONEST_S
    await issuer.verifier.verify(new)
    assert issuer.asked == 2, "an unknown key has them read at once"
    del issuer.keys[0]
    issuer.now_s += jwks.RELOAD_S + 1
    await issuer.verifier.verify(new)
    await issuer.jwks._read_again()
    assert "no key of this id" in (await refused(issuer, old)).message, "though its signature was right before"


async def test_made_up_key_ids_cost_the_issuer_little() -> None:
    issuer = Issuer()
    for number in range(50):
        await refused(issuer, token(kid=f"made up {number}"))
        issuer.now_s += 1
    assert issuer.asked == 5


async def test_an_issuer_that_is_away_is_believed_for_a_day() -> None:
    issuer, presented = Issuer(), token(exp=NOW_S + 1e6)
    issuer.status = 503
    assert (await refused(issuer, presented)).status == 503, "nobody knows its keys yet"
    issuer.status = 200
    issuer.now_s += jwks.SOONEST_S
    await issuer.verifier.verify(presented)
    issuer.status = 500
    issuer.now_s += jwks.STALE_S - 1
    await issuer.verifier.verify(presented)
    issuer.now_s += 2
    error = await refused(issuer, presented)
    assert (error.status, error.code) == (503, "issuer_unavailable")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"keys": 5}', b"<html>", json.dumps({"keys": [{}] * (jwks.MAX_KEYS + 1)}).encode()]
)
def test_what_is_no_set_of_keys_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="keys"):
        usable_keys(body)


def test_secrets_and_keys_for_encryption_are_no_keys() -> None:
    private = json.loads(RSAAlgorithm.to_jwk(RSA_KEY))
    keys = [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}, public(RSA_KEY, "b", use="enc"), {**private, "kid": "c"}]
    assert usable_keys(json.dumps({"keys": keys}).encode()) == {}


async def test_keys_come_over_tls_or_from_this_machine_and_are_bounded() -> None:
    for url in ("http://issuer.test/jwks", "file:///jwks", "issuer.test", "https://", "https://[x/"):
        with pytest.raises(ConfigurationError, match=r"--jwt-jwks-url .* https"):
            JwksKeys(ISSUER, lambda: 0.0, jwks_url=url)
        with pytest.raises(ConfigurationError, match=r"--jwt-issuer .* https"):
            JwksKeys(url, lambda: 0.0)
    large = httpx.MockTransport(lambda _: httpx.Response(200, content=b" " * (jwks.MAX_BYTES + 1)))
    for url in ("http://localhost/jwks", ""):
        with pytest.raises(ApiError, match="cannot be read now"):
            await JwksKeys(ISSUER, lambda: 1000.0, jwks_url=url, transport=large).find("r")


async def test_an_issuer_says_itself_where_its_keys_are() -> None:
    issuer = Issuer()
    assert await issuer.discovering.find("r") == PUBLISHED[0]
    assert issuer.asked == 2
    issuer.configuration["jwks_uri"] = URL + "/moved"
    issuer.keys[:] = [public(OTHER_RSA_KEY, "new")]
    issuer.now_s += jwks.SOONEST_S
    assert await issuer.discovering.find("new") == issuer.keys[0], "its keys may move, too"
    assert await issuer.discovering.find("r") is None
    assert issuer.asked == 4, "not again within ten seconds"


@pytest.mark.parametrize(
    "wrong",
    [
        {"issuer": "https://issuer.test"},
        {"issuer": "https://evil.test/"},
        {"issuer": None},
        {"jwks_uri": "http://issuer.test/jwks"},
        {"jwks_uri": "file:///jwks"},
        {"jwks_uri": 5},
        {"jwks_uri": ""},
    ],
)
async def test_keys_of_a_configuration_that_is_not_the_issuers_open_nothing(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    issuer = Issuer()
    issuer.configuration.update(wrong)
    with pytest.raises(ApiError, match="cannot be read now"):
        await issuer.discovering.find("r")
    assert issuer.asked == 1, "no keys are fetched"
    assert caplog.records[-1].url == ISSUER + ".well-known/openid-configuration"  # type: ignore[attr-defined]


@given(st.binary(max_size=200) | st.dictionaries(st.text(max_size=8), st.text(max_size=30)).map(json.dumps))
def test_whatever_an_issuer_says_is_its_configuration_or_an_error(body: bytes | str) -> None:
    with pytest.raises(ValueError, match=r"configuration|keys"):
        jwks_url_of(body.encode() if isinstance(body, str) else body, ISSUER)


def test_options_that_belong_together_are_asked_for() -> None:
    for options in ({"jwt_issuer": ISSUER}, {"jwt_audience": AUDIENCE}, {"jwt_jwks_url": URL}):
        with pytest.raises(ConfigurationError, match="belong together"):
            FrontendSettings(**options)  # type: ignore[arg-type]


async def test_openais_client_asks_with_tokens_besides_keys(model_path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("")
    with published(PUBLISHED) as url:
        options: Any = {"jwt_issuer": url, "jwt_audience": AUDIENCE, "jwt_scope": "llm"}
        async with mesh_of_fakes(model_path, api_keys_file=keys, **options) as mesh:
            await mesh.add_worker(saying(mesh, "one"), model="tiny")
            good = token(iss=url, exp=4e9, scope="llm", penstock={"share": 3, "models": ["tiny"]})
            asked: Any = {"model": "tiny", "prompt": "x"}
            async with mesh.client(good) as client:
                assert (await client.completions.create(**asked)).usage
                with pytest.raises(openai.NotFoundError):
                    await client.completions.create(model="another", prompt="x")
            tenant = mesh.worker.received[0].tenant
            assert (tenant.name, tenant.share) == ("jwt:alice", 3.0)
            for presented, expected in (
                (token(iss=url, exp=1.0, scope="llm"), openai.AuthenticationError),
                (token(iss=url, exp=4e9), openai.PermissionDeniedError),
                ("sk-penstock-unknown", openai.AuthenticationError),
            ):
                async with mesh.client(presented) as client:
                    with pytest.raises(expected):
                        await client.completions.create(**asked)
            async with mesh.http() as http:
                answers = [
                    await http.get("/v1/models"),
                    await http.post("/v1/messages", json={}, headers={"x-api-key": "a.b.c"}),
                ]
            assert [answer.status_code for answer in answers] == [401, 401]
