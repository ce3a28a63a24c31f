"""A real Envoy whose endpoints a real gateway picks, in front of two servers that answer as vLLM does."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.in_time import eventually
from tests.mesh.running_envoy import RunningEnvoy, envoy_binary, running_envoy
from tests.mesh.running_mesh import RunningMesh, free_port
from tests.unit.engine_worker.attached.fake_server import FakeServer

pytestmark = [pytest.mark.process, pytest.mark.slow]

PREFIXES = 6
BLOCKS = 300 // 16
"""Whole ones that prompts of the same prefix share."""
OPTIONS = ("cost.fixed_ms=2", "cost.prefill_token_ms=0", "instance.max_model_len_tokens=4096")


@dataclass
class Behind:
    """What stands behind the Envoy."""

    envoy: RunningEnvoy
    mesh: RunningMesh
    servers: list[FakeServer]
    client: httpx.AsyncClient

    async def gateway(self) -> dict[str, Any]:
        """As `penstock status` tells of it."""
        (gateway,) = (await asyncio.to_thread(self.mesh.status))["gateways"]
        return dict(gateway)


@asynccontextmanager
async def behind_envoy(
    folder: Path, options: tuple[str, ...] = OPTIONS, *, policy: str = "penstock", asks_who: bool = False
) -> AsyncIterator[Behind]:
    envoy_binary()
    gateway_port = free_port()
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                FakeServer(name="demo-small", options=options, publishes="tcp://127.0.0.1:*")
            )
            for _ in range(2)
        ]
        attached = [part for each in servers for part in ("--attach", f"{each.url},kv_events={each.published_at}")]
        attached += ["--policy", policy]
        mesh = RunningMesh(folder, *attached, "--gateway-port", str(gateway_port), asks_who=asks_who)
        stack.callback(mesh.cut)
        await asyncio.to_thread(mesh.wait_until_serving)
        identities = folder / "penstock" / "default" / "identity" if asks_who else None
        starting = running_envoy(folder, [each.port for each in servers], gateway_port, identities=identities)
        envoy = await asyncio.to_thread(starting.__enter__)
        stack.callback(starting.__exit__, None, None, None)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=envoy.url, timeout=30, trust_env=False))
        yield Behind(envoy, mesh, servers, client)
        assert await asyncio.to_thread(mesh.stop) == 0


def body(prefix: int, turn: int, **fields: Any) -> dict[str, Any]:
    """A prompt of 320 tokens, of which it shares 300 with others of the same prefix."""
    prompt = [10 + prefix] * 300 + [40 + turn] * 20
    return {"model": "demo-small", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}


async def test_requests_go_where_their_prefix_is_and_are_heard_to_end(tmp_path: Path) -> None:
    # `penstock` expects as many prompts as of late: after six, the chance of where they came outweighs a prefix. Under
    # `lmetric` an idle server beats any prefix, and a report that comes late still tells of the last request.
    async with behind_envoy(tmp_path, policy="lmetric_plus") as behind:
        (scheduler,) = await _roles(behind.mesh, "scheduler")
        by_prefix: dict[int, Counter[str]] = {prefix: Counter() for prefix in range(PREFIXES)}
        for turn in range(4):
            for prefix in range(PREFIXES):
                is_streamed = turn % 2 == 0  # the servers tell of blocks of streams only
                answer = await behind.client.post("/v1/completions", json=body(prefix, turn, stream=is_streamed))
                assert answer.status_code == 200, (answer.text, behind.envoy.story())
                by_prefix[prefix][answer.headers["x-penstock-instance"]] += 1
                await _until_known(scheduler["address"], blocks=0 if turn == 0 else PREFIXES * BLOCKS)
            if turn == 0:
                await _until_known(scheduler["address"], blocks=PREFIXES * BLOCKS)
                assert answer.text.rstrip().endswith("data: [DONE]")
                assert answer.text.count("data: {") == 4
        # Its first request goes where there is room, and the others follow it.
        assert all(len(counts) == 1 for counts in by_prefix.values()), by_prefix
        assert len({instance for counts in by_prefix.values() for instance in counts}) == 2
        request_id = answer.headers["x-penstock-request-id"]
        explained = await asyncio.to_thread(behind.mesh.cli, "explain", request_id)
        assert explained.returncode == 0, explained.stderr
        await _pass_without_answers(behind, tmp_path)
        await _until_none_under_way(behind)
        assert (await behind.gateway())["requests_total"] == 4 * PREFIXES + 2


async def _pass_without_answers(behind: Behind, folder: Path) -> None:
    """By another Envoy, whose gateway sees no body of an answer."""
    gateway_port, metrics_address = await _addresses(behind.mesh)
    ports = [each.port for each in behind.servers]
    starting = running_envoy(folder, ports, gateway_port, shows_answers=False)
    envoy = await asyncio.to_thread(starting.__enter__)
    try:
        async with httpx.AsyncClient(base_url=envoy.url, timeout=30, trust_env=False) as client:
            for is_streamed in (False, True):
                answer = await client.post("/v1/completions", json=body(0, 9, stream=is_streamed))
                assert answer.status_code == 200
                assert answer.headers["x-penstock-instance"]
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)
    metrics = (await asyncio.to_thread(httpx.get, f"http://{metrics_address}/metrics")).text
    ended = [line for line in metrics.splitlines() if line.startswith("penstock_gateway_requests_total{")]
    assert [line.partition("{")[2].partition("}")[0] for line in ended] == ['model="demo-small",reason="finished"'], (
        ended
    )


async def test_what_cannot_be_placed_is_refused_and_what_is_not_for_a_model_passes(tmp_path: Path) -> None:
    async with behind_envoy(tmp_path, asks_who=True) as behind:
        client = behind.client
        unknown = await client.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert unknown.headers["content-type"] == "application/json"
        broken = await client.post("/v1/chat/completions", content=b'{"model":')
        assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
        large = await client.post("/v1/completions", content=b'{"model": "' + b"x" * 9_000_000 + b'"}')
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
        models = await client.get("/v1/models", headers={"x-gateway-destination-endpoint": "127.0.0.1:1"})
        assert models.status_code == 200
        assert [each["id"] for each in models.json()["data"]] == ["demo-small"]
        # A prompt that cannot be read (the server refuses it) is placed all the same, and so is a long one.
        assert (await client.post("/v1/other", json={"model": "demo-small"})).status_code == 404
        long = await client.post("/v1/completions", json=body(0, 0, prompt=[7] * 3000, user="x" * 300_000))
        assert long.status_code == 200
        assert len(behind.servers[0].bodies + behind.servers[1].bodies) >= 1
        assert (await behind.gateway())["held_bytes"] == 0


async def test_a_lost_server_a_lost_client_and_a_lost_gateway(tmp_path: Path) -> None:
    async with behind_envoy(tmp_path) as behind:
        with pytest.raises(httpx.ReadTimeout):
            await behind.client.post(
                "/v1/completions", json=body(0, 0, max_tokens=3000, ignore_eos=True, stream=False), timeout=0.7
            )
        await _until_none_under_way(behind)
        answered = await behind.client.post("/v1/completions", json=body(1, 0))
        held_by = answered.headers["x-penstock-instance"]
        await behind.servers[int(held_by.rpartition("-")[2])].kill()
        # The first is told to go where its prefix is, unless the mesh has noticed by then: Envoy takes the next one.
        for turn in range(6):
            answer = await behind.client.post("/v1/completions", json=body(1, turn))
            assert answer.status_code == 200, (answer.text, behind.envoy.story())

        pid = await asyncio.to_thread(behind.mesh.pid, "gateway")
        os.kill(pid, signal.SIGSTOP)
        try:
            await _until_healthy(behind, 0)
            for turn in range(4):
                answer = await behind.client.post("/v1/completions", json=body(2, turn))
                assert answer.status_code == 200, "the fallback policy goes on with the server that lives"
                assert "x-penstock-instance" not in answer.headers
        finally:
            os.kill(pid, signal.SIGCONT)
        await _until_healthy(behind, 1)
        # Envoy opens a new connection to the gateway, and passes what cannot wait for it.
        async with asyncio.timeout(60):
            while "x-penstock-instance" not in answer.headers:
                answer = await behind.client.post("/v1/completions", json=body(2, 0))
                assert answer.status_code == 200
        assert answer.headers["x-penstock-instance"] != held_by


async def test_answers_that_do_not_pass_outlive_their_gateway(tmp_path: Path) -> None:
    slow = ("cost.fixed_ms=15", "cost.prefill_token_ms=0", "instance.max_model_len_tokens=4096")
    async with behind_envoy(tmp_path, slow) as behind:
        port, _ = await _addresses(behind.mesh)
        starting = running_envoy(tmp_path, [each.port for each in behind.servers], port, shows_answers=False)
        envoy = await asyncio.to_thread(starting.__enter__)
        try:
            async with httpx.AsyncClient(base_url=envoy.url, timeout=60, trust_env=False) as client:
                pid = await asyncio.to_thread(behind.mesh.pid, "gateway")
                fields = body(0, 0, max_tokens=400, stream=True, ignore_eos=True)
                async with client.stream("POST", "/v1/completions", json=fields) as answer:
                    assert answer.headers["x-penstock-instance"]
                    lines = answer.aiter_lines()
                    assert (await anext(lines)).startswith("data: {")
                    os.kill(pid, signal.SIGKILL)
                    rest = [line async for line in lines if line]
                assert len(rest) == 400, "399 tokens and the end"
                assert rest[-1] == "data: [DONE]"
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)


async def _addresses(mesh: RunningMesh) -> tuple[int, str]:
    """Of the gateway: the port that Envoys ask, and where its metrics are."""
    (listening,) = await _roles(mesh, "gateway")
    return int(listening["address"].rpartition(":")[2]), listening["metrics_address"]


async def _roles(mesh: RunningMesh, role: str) -> list[dict[str, Any]]:
    """As `penstock status` tells of them."""
    return [each for each in (await asyncio.to_thread(mesh.status))["roles"] if each["role"] == role]


async def _until_known(scheduler: str, blocks: int) -> None:
    """The scheduler at this address knows of so many blocks, and of no request that runs. It hears of both a moment
    later than clients do, and does not choose a server that seems busy for its prefix."""
    async with asyncio.timeout(60), grpc.aio.insecure_channel(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        while True:  # another process offers nothing to await
            seen = (await stub.GetSnapshot(scheduler_pb2.GetSnapshotRequest())).instances
            busy = sum(each.load.running_requests + each.unreported_requests for each in seen)
            if not busy and sum(each.cached_blocks for each in seen) >= blocks:
                return
            await asyncio.sleep(0.02)


async def _until_none_under_way(behind: Behind) -> None:
    """Each request was told to the gateway as ended, and the gateway told the mesh so."""

    async def none_under_way() -> bool:
        gateway = await behind.gateway()
        return not gateway["active_streams"] and not any(each["requests"] for each in gateway["endpoints"])

    async with asyncio.timeout(60):
        while not await none_under_way():  # noqa: ASYNC110 - another process offers nothing to await
            await asyncio.sleep(0.1)


async def _until_healthy(behind: Behind, gateways: int) -> None:
    gauge = "cluster.penstock-gateway.membership_healthy"
    await asyncio.to_thread(
        eventually, lambda: behind.envoy.gauge(gauge) == gateways, 20, f"Envoy knows of {gateways} healthy gateways"
    )
