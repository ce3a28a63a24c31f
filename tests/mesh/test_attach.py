"""A server that runs already in a real mesh, beside an own instance: placed on, killed, back as another model."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from tests.in_time import eventually, still
from tests.mesh.running_mesh import RunningMesh
from tests.unit.engine_worker.attached.fake_server import MODEL_PATH, FakeServer

pytestmark = [pytest.mark.process, pytest.mark.slow]

STREAMS = 16
ROUNDS = 3
"""A server whose worker is held up is left aside for a moment; how often streams are sent anew then, at most."""
TOKENS = 150
BODY = {"model": "demo-small", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
PROMPTS = [f"Count from {number} up to {number + 5}." for number in range(STREAMS)]


class Stream:
    """One streamed answer."""

    def __init__(self, prompt: str, body: Mapping[str, Any] = MappingProxyType(BODY)) -> None:
        self.prompt = prompt
        self.body = body
        self.text = ""
        self.chunks = 0
        self.instance = self.request_id = self.finish_reason = ""

    async def run(self, client: httpx.AsyncClient) -> None:
        body = {**self.body, "prompt": self.prompt, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            self.instance = answer.headers["x-penstock-instance"]
            self.request_id = answer.headers["x-penstock-request-id"]
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        self.text += choice["text"]
                        self.finish_reason = choice["finish_reason"] or self.finish_reason
                    self.chunks += 1


async def until_under_way(streams: Mapping[Stream, "asyncio.Task[None]"], chunks: int, within_s: float) -> None:
    """Return once each stream has had so many chunks, or has ended: a slow machine brings many tokens in one chunk.
    Raises what a stream has raised."""
    async with asyncio.timeout(within_s):
        while any(stream.chunks < chunks and not task.done() for stream, task in streams.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for task in streams.values():
        if task.done():
            task.result()


async def any_placed_last(mesh: RunningMesh, streams: list[Stream], instance_id: str) -> bool:
    """Whether the last placement of one of them was there, by `penstock explain`."""
    for stream in streams:
        explained = await asyncio.to_thread(mesh.cli, "explain", stream.request_id, "--json")
        assert explained.returncode == 0, explained.stderr
        if json.loads(explained.stdout)["chosen_instance_id"] == instance_id:
            return True
    return False


async def test_killed_under_16_streams_nothing_is_lost_doubled_or_wrong(tmp_path: Path) -> None:
    slow = ("cost.fixed_ms=15", "instance.max_model_len_tokens=1024")
    server = FakeServer(name="demo-small", options=slow)
    async with server:
        engine_args = [part for option in slow for part in ("--engine-arg", option)]
        mesh = RunningMesh(
            tmp_path, "--engine", "simulated", "--model", "demo-small:1", *engine_args, "--attach", server.url
        )
        try:
            await asyncio.to_thread(mesh.wait_until_serving)
            kinds = {
                each["instance_id"]: each["engine"] for each in (await asyncio.to_thread(mesh.status))["instances"]
            }
            assert kinds == {"attached-0": "attached-vllm", "demo-small-0": "simulated"}
            async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
                for _ in range(ROUNDS):
                    whole = [Stream(prompt) for prompt in PROMPTS]
                    await asyncio.gather(*(stream.run(client) for stream in whole))
                    answered = [stream for stream in whole if stream.instance == "attached-0"]
                    is_used = len(answered) < STREAMS and await any_placed_last(mesh, answered, "attached-0")
                    if is_used:
                        break
                still(is_used, "the server and the instance answered some each")

                for _ in range(ROUNDS):
                    broken = [Stream(prompt) for prompt in PROMPTS]
                    running = {stream: asyncio.create_task(stream.run(client)) for stream in broken}
                    await until_under_way(running, 10, within_s=60)
                    if is_struck := any(each.instance == "attached-0" and not running[each].done() for each in broken):
                        break
                    await asyncio.gather(*running.values())
                still(is_struck, "some are at the server")
                await server.kill()
                await asyncio.gather(*running.values())
            assert [stream.text for stream in broken] == [stream.text for stream in whole]
            assert {stream.finish_reason for stream in broken} == {"length"}
            async with FakeServer(name="other", root=MODEL_PATH, port=server.port):
                await asyncio.to_thread(eventually, lambda: _serves(mesh, "other"), 60, "the other model is announced")
                answer = await asyncio.to_thread(
                    httpx.post, f"{mesh.url}/v1/completions", json={**BODY, "model": "other", "prompt": "x"}, timeout=30
                )
                assert answer.headers["x-penstock-instance"] == "attached-0"
                await asyncio.to_thread(_is_the_first_tier_of_a_cascade, mesh)
                assert await asyncio.to_thread(mesh.stop) == 0
        finally:
            mesh.cut()


async def test_a_running_mesh_is_joined_and_left_by_a_command(tmp_path: Path) -> None:
    async with FakeServer(name="demo-small") as server:
        mesh = RunningMesh(tmp_path, "--engine", "simulated", "--model", "demo-small:1")
        joining: subprocess.Popen[bytes] | None = None
        try:
            await asyncio.to_thread(mesh.wait_until_serving)
            joining = mesh.start("attach", server.url, "--member-id", "late")
            joined = {"late": "ready", "demo-small-0": "ready"}
            await asyncio.to_thread(eventually, lambda: mesh.instances() == joined, 60, "it is an instance")
            joining.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(joining.wait, 40) == 0
            left = {"demo-small-0": "ready"}
            await asyncio.to_thread(eventually, lambda: mesh.instances() == left, 30, "it is none any more")
            assert await asyncio.to_thread(mesh.stop) == 0
        finally:
            if joining is not None:
                joining.kill()
            mesh.cut()


def _is_the_first_tier_of_a_cascade(mesh: RunningMesh) -> None:
    tiers = ("--tier", "other", "--tier", "demo-small", "--threshold", "50", "--judge", "exact")
    said = mesh.cli("cascade", "set", "both", *tiers)
    assert said.returncode == 0, said.stderr
    eventually(lambda: _serves(mesh, "both"), 60, "the frontend follows")
    body = {"model": "both", "messages": [{"role": "user", "content": "Count from 7 up to 12."}]}
    answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert [tier["model"] for tier in answer.json()["penstock"]["tiers"]] == ["other", "demo-small"]


def _serves(mesh: RunningMesh, model: str) -> bool:
    models = httpx.get(f"{mesh.url}/v1/models", timeout=10).json()["data"]
    return any(each["id"] == model for each in models)
