"""LoRA adapters in a real mesh, by the commands that operators type."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.in_time import eventually, still
from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh

LORA = ("--engine", "simulated", "--engine-arg", "enable_lora=true", "--engine-arg", "max_loras=2")


@pytest.fixture
def lora_mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    running = RunningMesh(tmp_path, *LORA, environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true"})
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def adapter(directory: Path, weights: bytes) -> str:
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory)


def lora(mesh: RunningMesh, *arguments: str) -> Any:
    answer = mesh.cli("lora", *arguments, "--json")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return json.loads(answer.stdout)


def test_an_adapter_is_loaded_used_moved_and_unloaded(lora_mesh: RunningMesh, tmp_path: Path) -> None:
    mesh = lora_mesh
    path = adapter(tmp_path / "poet", b"1")
    names = sorted(mesh.instances())
    refused = mesh.cli("lora", "load", "poet", str(tmp_path / "nowhere"))
    assert refused.returncode == 1
    assert all(f"{name} says: there is no LoRA adapter" in refused.stderr for name in names)
    loaded = lora(mesh, "load", "poet", path)
    assert sorted(loaded["workers"]) == names

    def listed() -> dict[str, Any]:
        return {each["id"]: each for each in httpx.get(f"{mesh.url}/v1/models").json()["data"]}

    eventually(lambda: "poet" in listed(), 60, "the frontend has heard")
    assert listed()["poet"]["parent"] == loaded["base_model"]
    undisturbed = Reader(mesh, "once upon a time", model="poet").whole_text()
    assert undisturbed != Reader(mesh, "once upon a time").whole_text()
    with mesh.held():
        reader = Reader(mesh, "once upon a time", model="poet")
        eventually(lambda: reader.text, 60, "the stream has begun")
        target = next(name for name in names if name != reader.instance)
        moved = mesh.cli("migrate", reader.request_id, "--to", target, "--json")
    still(moved.returncode == 0 or reader.reads, "the request runs until it has been moved")
    assert moved.returncode == 0, moved.stdout + moved.stderr
    assert reader.whole_text() == undisturbed
    (shown,) = mesh.status()["adapters"]
    assert (shown["name"], sorted([*shown["in_use"], *shown["idle"]])) == ("poet", names)
    assert "adapter poet of demo-large" in mesh.cli("status").stdout
    body = {"lora_name": "critic", "lora_path": adapter(tmp_path / "critic", b"2")}
    assert httpx.post(f"{mesh.url}/v1/load_lora_adapter", json=body).status_code == 200
    assert [each["name"] for each in lora(mesh, "list")] == ["critic", "poet"]
    lora(mesh, "unload", "poet")
    again = mesh.cli("lora", "unload", "poet")
    assert (again.returncode, "cannot be found" in again.stderr) == (1, True)
    asked = {"model": "poet", "prompt": "once"}
    eventually(
        lambda: httpx.post(f"{mesh.url}/v1/completions", json=asked).status_code == 404, 5, "the frontend has heard"
    )
