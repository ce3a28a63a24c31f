"""KV in the memory of the host, between the processes of a real mesh."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_worker.host_tier.settings import default_directory
from tests.in_time import eventually
from tests.mesh.running_mesh import RunningMesh

PROMPT = " ".join(f"Chapter {number} of the story that everybody knows." for number in range(60))
NAME = f"host-tier-{os.getpid()}"
WORKERS = ("demo-large-0", "demo-large-1")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    """Two instances whose prefix caches hold the prompt and little more."""
    running = RunningMesh(
        tmp_path,
        *("--engine", "simulated", "--workers", "2", "--policy", "round_robin", "--host-kv", "32MiB"),
        *("--engine-arg", "instance.kv_blocks=256", "--engine-arg", "instance.max_model_len_tokens=4096"),
    )
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def answer(mesh: RunningMesh, prompt: str = PROMPT) -> tuple[str, int, int, str]:
    """Text, tokens of the prompt, how many of them were cached, and the request's id."""
    body = {"model": "demo-large", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{mesh.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        told = json.load(response)
        usage = told["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        request_id = response.headers["x-penstock-request-id"]
        return told["choices"][0]["text"], usage["prompt_tokens"], cached, request_id


def instances(mesh: RunningMesh) -> list[dict[str, Any]]:
    return [each for each in mesh.status()["instances"] if "load" in each]


def are_told_of(mesh: RunningMesh, blocks: int) -> bool:
    told = instances(mesh)
    return len(told) == len(WORKERS) and all(int(each["host_blocks"]) >= blocks for each in told)


def host_hits(mesh: RunningMesh) -> int:
    return sum(int(each["load"]["host_hit_tokens_total"]) for each in instances(mesh))


def test_what_one_instance_computed_another_one_and_the_next_life_load(mesh: RunningMesh) -> None:
    text, prompt_tokens, cached, _ = answer(mesh)
    blocks = prompt_tokens // 16
    assert cached == 0
    eventually(lambda: are_told_of(mesh, blocks), 60, "both instances see what one has saved")

    again, _, cached, request_id = answer(mesh)
    assert again == text
    assert cached >= (blocks - 1) * 16
    eventually(lambda: host_hits(mesh) == cached, 60, "the hits are counted as the host's")
    explained = mesh.cli("explain", request_id)
    assert f"loads {blocks * 16:,} tokens from the memory of its host" in explained.stdout, explained.stdout

    for worker in WORKERS:
        mesh.kill(worker, signal.SIGKILL)
    # Requests wait until a worker is back, whose cache is empty.
    for _ in WORKERS:
        again, _, cached, _ = answer(mesh)
        assert again == text
        assert cached >= (blocks - 1) * 16
    eventually(lambda: host_hits(mesh) >= cached, 60, "the hits of the next lives are counted")


def test_the_store_goes_with_its_mesh(tmp_path: Path) -> None:
    directory = default_directory()
    directory = directory.with_name(f"{directory.name}-{NAME}")
    mesh = RunningMesh(tmp_path, "--engine", "simulated", "--workers", "1", "--host-kv", "32MiB", "--mesh", NAME)
    try:
        mesh.wait_until_serving()
        assert list(directory.glob("*.kv"))
        assert mesh.stop() == 0
        assert not directory.exists()
    finally:
        mesh.cut()
