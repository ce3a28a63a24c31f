"""A real mesh with all that concerns tenants: keys and tokens, caches apart, shares, records of usage, closed doors."""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ec

from controlplane.policies.fair_share import BURST_TOKENS
from services.cli.usage import command as usage_command
from services.frontend.requests.api_keys import SECRET_BYTES, new_key_line
from tests.in_time import eventually
from tests.jwt_issuer import public, published
from tests.mesh.running_mesh import RunningMesh

AUDIENCE = "penstock"
CLAIMS = {"aud": AUDIENCE, "sub": "carol", "exp": 4e9}
PROMPT_TOKENS = 2_000
BATCH_REQUESTS = 4
OFFERED = 4
"""Requests of the tenant that asks for its share; the other one asks for 20 times as many."""


@dataclass
class Tenants:
    """The mesh, who may ask it, and what they were told to have used."""

    mesh: RunningMesh
    usage_folder: Path
    bearers: dict[str, str]
    told: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    async def ask(self, http: httpx.AsyncClient, tenant: str, prompt: list[int]) -> dict[str, Any]:
        """The usage that the answer tells."""
        body = {"model": "demo-large", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        bearer = {"authorization": f"Bearer {self.bearers[tenant]}"}
        answer = await http.post("/v1/completions", json=body, headers=bearer)
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        self.told.setdefault(tenant, []).append(usage)
        return usage

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.mesh.url, timeout=60, limits=httpx.Limits(max_connections=None))


def prompt(seed: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    return random.Random(seed).choices(range(10, 600), k=PROMPT_TOKENS)


def cached(usage: dict[str, Any]) -> int:
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """One simulated instance, two keys, and one tenant of tokens."""
    folder = tmp_path_factory.mktemp("tenants")
    lines = {name: new_key_line(name, random.Random(name).randbytes(SECRET_BYTES)) for name in ("alice", "bob")}
    (folder / "keys.txt").write_text("".join(f"{line}\n" for _, line in lines.values()))
    issuer_key = ec.generate_private_key(ec.SECP256R1())
    with published([public(issuer_key, "one")]) as issuer_url:
        token = jwt.encode(CLAIMS | {"iss": issuer_url}, issuer_key, "ES256", {"kid": "one"})
        options = {
            "API_KEYS_FILE": str(folder / "keys.txt"),
            "SEPARATE_TENANT_CACHES": "true",
            "JWT_ISSUER": issuer_url,
            "JWT_AUDIENCE": AUDIENCE,
            "USAGE_FOLDER": str(folder / "usage"),
            "PRICE": "demo-large=10,1,100",
            "DOCS": "false",
            "HTTP_METRICS": "false",
        }
        mesh = RunningMesh(
            folder,
            *("--engine", "simulated", "--workers", "1"),
            *("--engine-arg", f"instance.max_batch_requests={BATCH_REQUESTS}"),
            environment={f"PENSTOCK_SERVE_FRONTEND_{name}": value for name, value in options.items()},
        )
        try:
            mesh.wait_until_serving()
            bearers = {name: key for name, (key, _) in lines.items()} | {"jwt:carol": token}
            yield Tenants(mesh, folder / "usage", bearers)
            assert mesh.stop() == 0
        finally:
            mesh.cut()


async def test_nobody_finds_what_another_tenant_has_asked(tenants: Tenants) -> None:
    async with tenants.client() as http:
        for tenant in tenants.bearers:
            first = await tenants.ask(http, tenant, prompt(0))
            again = await tenants.ask(http, tenant, prompt(0))
            assert cached(first) == 0, tenant
            assert cached(again) > PROMPT_TOKENS // 2, tenant


async def test_without_a_key_or_a_token_nothing_opens(tenants: Tenants) -> None:
    async with tenants.client() as http:
        closed = [await http.get(path) for path in ("/docs", "/redoc", "/openapi.json", "/metrics")]
        assert [answer.status_code for answer in closed] == [404] * 4
        assert (await http.get("/health")).status_code == 200
        forged = jwt.encode(CLAIMS, ec.generate_private_key(ec.SECP256R1()), "ES256", {"kid": "one"})
        for headers in ({}, {"authorization": f"Bearer {forged}"}):
            assert (await http.get("/v1/models", headers=headers)).status_code == 401


async def test_who_offers_twenty_times_its_share_leaves_the_other_its_own(tenants: Tenants) -> None:
    """By tokens: what bob has got when alice, who came last, has all."""
    before = len(tenants.told["bob"])
    async with tenants.client() as http:
        greedy = [asyncio.create_task(tenants.ask(http, "bob", prompt(100 + each))) for each in range(20 * OFFERED)]
        await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED)  # the queue is full of his
        await asyncio.gather(*(tenants.ask(http, "alice", prompt(1_000 + each)) for each in range(OFFERED)))
        served = sum(usage["total_tokens"] for usage in tenants.told["bob"][before:])
        for each in greedy:
            each.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
    offered = 20 * OFFERED * PROMPT_TOKENS
    print(f"\nbob was served {served} of {offered} tokens")
    fair = BURST_TOKENS + (OFFERED + BATCH_REQUESTS) * PROMPT_TOKENS
    assert fair < offered / 4
    assert served < offered / 2, "first come, first served would have given him nearly all"


async def test_each_request_is_recorded_with_what_its_client_was_told_and_priced(tenants: Tenants) -> None:
    """After the others: it sums up what they have used."""

    def summed() -> dict[str, Any]:
        printed = CliRunner().invoke(usage_command, [str(tenants.usage_folder), "--by", "tenant", "--json"])
        assert printed.exit_code == 0, printed.output
        sums: dict[str, Any] = json.loads(printed.stdout)["sums"]
        return sums

    wholly = ("alice", "jwt:carol")
    asked = {tenant: len(tenants.told[tenant]) for tenant in wholly}
    eventually(lambda: all(summed()[each]["requests"] == asked[each] for each in wholly), 20, "records are written")
    for tenant in wholly:
        used = summed()[tenant]
        told = tenants.told[tenant]
        assert used["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in told)
        assert used["cached_tokens"] == sum(cached(usage) for usage in told) > 0
        assert used["output_tokens"] == sum(usage["completion_tokens"] for usage in told)
        computed = used["prompt_tokens"] - used["cached_tokens"]
        price = 10 * computed + used["cached_tokens"] + 100 * used["output_tokens"]
        assert used["cost"] == pytest.approx(price / 1_000_000)
        assert used["without_price"] == 0
    assert "jwt:carol" in CliRunner().invoke(usage_command, [str(tenants.usage_folder)]).output
