"""Two stock `vllm serve` behind an Envoy: requests that share prefixes, placed by a gateway and dealt out in turn."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.mesh.running_envoy import envoy_binary, running_envoy
from tests.mesh.running_mesh import RunningMesh, free_port
from tests.vllm.test_attach import MODEL, vllm_serve

pytestmark = pytest.mark.vllm

PREFIXES = 14
"""Conversations of some 1,650 tokens: 23,100, of which each server holds 12,800."""
WORDS = 420
REQUESTS = 84
RATE_PER_S = 3.0
OPTIONS = {"max_model_len": "2048", "block_size": "32", "num_gpu_blocks_override": "400", "max_num_seqs": "16"}


@dataclass(frozen=True)
class Figures:
    """Of one replay."""

    hit_rate: float
    """Of prompt tokens, as the servers count them."""
    ttft_p50_ms: float
    ttft_p95_ms: float

    def __str__(self) -> str:
        return f"hit rate {self.hit_rate:.2f}, TTFT P50 {self.ttft_p50_ms:.0f} ms, P95 {self.ttft_p95_ms:.0f} ms"


@dataclass
class Servers:
    """Both, and an Envoy of each kind."""

    urls: list[str]
    picked: str
    in_turn: str


@asynccontextmanager
async def two_servers(folder: Path) -> AsyncIterator[Servers]:
    envoy_binary()
    async with AsyncExitStack() as stack:
        attached, urls, ports = [], [], []
        for _ in range(2):
            port, events, replay = free_port(), free_port(), free_port()
            stack.enter_context(vllm_serve(folder, port, events, replay, OPTIONS))
            url = f"http://127.0.0.1:{port}"
            about = f"kv_events=tcp://127.0.0.1:{events},kv_replay=tcp://127.0.0.1:{replay},max_num_seqs=16,start_s=400"
            attached += ["--attach", f"{url},{about}"]
            urls.append(url)
            ports.append(port)
        gateway_port = free_port()
        mesh = RunningMesh(folder, *attached, "--gateway-port", str(gateway_port), "--ready-timeout-s", "500")
        stack.callback(mesh.cut)
        await asyncio.to_thread(mesh.wait_until_serving, 500)
        envoys = []
        for picks in (True, False):
            starting = running_envoy(folder, ports, gateway_port, picks=picks)
            envoys.append((await asyncio.to_thread(starting.__enter__)).url)
            stack.callback(starting.__exit__, None, None, None)
        yield Servers(urls, *envoys)
        assert await asyncio.to_thread(mesh.stop) == 0


async def test_requests_find_their_prefixes(tmp_path: Path) -> None:
    async with two_servers(tmp_path) as servers, httpx.AsyncClient(timeout=120, trust_env=False) as client:
        for url in servers.urls:  # what compiles does so before anything is measured
            await _ask(client, url, _prompt(random.Random("warm"), random.Random("up")))
        dealt = await _replay(client, servers, servers.in_turn, "dealt out")
        placed = await _replay(client, servers, servers.picked, "placed")
        print(f"Envoy's round robin: {dealt}\nplaced by the gateway: {placed}")
        assert placed.hit_rate > dealt.hit_rate + 0.1
        answer = await client.post(f"{servers.picked}/v1/chat/completions", json=_body("Count from 7 up to 12.", 8))
        assert answer.headers["x-penstock-instance"] in ("attached-0", "attached-1")
        assert answer.headers["x-penstock-policy"] != "frontend_round_robin"


async def _replay(client: httpx.AsyncClient, servers: Servers, url: str, name: str) -> Figures:
    """Requests that arrive at random, each of a conversation drawn at random, none of which another replay has."""
    before = await _cache_counts(client, servers)
    rng = random.Random(7)
    sources = [f"{name}/{number}" for number in range(PREFIXES)]
    running: list[asyncio.Task[float]] = []
    async with asyncio.TaskGroup() as tasks:
        for number in range(REQUESTS):
            prompt = _prompt(random.Random(rng.choice(sources)), random.Random(f"{name}/turn {number}"))
            running.append(tasks.create_task(_ask(client, url, prompt)))
            await asyncio.sleep(rng.expovariate(RATE_PER_S))
    ttfts_ms = sorted(task.result() for task in running)
    hits, queries = (now - then for now, then in zip(await _cache_counts(client, servers), before, strict=True))
    return Figures(hits / queries, statistics.median(ttfts_ms), ttfts_ms[int(0.95 * len(ttfts_ms))])


def _prompt(of_prefix: random.Random, of_turn: random.Random) -> str:
    words = [str(of_prefix.randrange(1000)) for _ in range(WORDS)]
    return " ".join((*words, *(str(of_turn.randrange(1000)) for _ in range(10))))


def _body(prompt: str, tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def _ask(client: httpx.AsyncClient, url: str, prompt: str) -> float:
    """Milliseconds to the first token."""
    began_s, first_s = time.monotonic(), 0.0
    body = {**_body(prompt, 16), "stream": True}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not first_s and '"content":"' in line and '"content":""' not in line:
                first_s = time.monotonic()
    return 1000 * (first_s - began_s)


async def _cache_counts(client: httpx.AsyncClient, servers: Servers) -> tuple[float, float]:
    """Prompt tokens that both servers have found in their caches, and looked for."""
    hits = queries = 0.0
    for url in servers.urls:
        for line in (await client.get(f"{url}/metrics")).text.splitlines():
            value = float(line.rpartition(" ")[2]) if line.startswith("vllm:prefix_cache_") else 0.0
            if line.startswith("vllm:prefix_cache_hits_total"):
                hits += value
            elif line.startswith("vllm:prefix_cache_queries_total"):
                queries += value
    return hits, queries
