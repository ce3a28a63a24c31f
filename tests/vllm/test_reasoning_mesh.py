"""Reasoning apart from an answer under a schema, through a whole mesh of vLLM instances, one of which is killed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.in_time import eventually, still
from tests.mesh.running_mesh import RunningMesh
from tests.vllm.thinking_model import make_thinker

pytestmark = [pytest.mark.vllm, pytest.mark.process]

START_S = 600.0
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["tags"],
    "properties": {
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 30, "maxItems": 40}
    },
}
BODY: dict[str, Any] = {
    "model": "thinker",
    "messages": [{"role": "user", "content": "Count from 1 up to 30."}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "tags", "schema": SCHEMA}},
    "max_tokens": 300,
    "temperature": 0,
    "stream": True,
}


def read(mesh: RunningMesh, kills: dict[str, int] | None = None, *, after: str = "") -> tuple[str, str]:
    """Reasoning and content of a stream; with `kills` (pids by instance) its worker is killed at the first delta of
    `after`: a busy machine has put all of the reasoning into two."""
    told = {"reasoning": "", "content": ""}
    with httpx.stream("POST", f"{mesh.url}/v1/chat/completions", json=BODY, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            for name in told:
                told[name] += choice["delta"].get(name) or ""
            if kills is not None and choice["delta"].get(after):
                os.kill(kills[answer.headers["x-penstock-instance"]], signal.SIGKILL)
                kills = None
    still(kills is None or not after, "the answer streams when its worker is killed")
    return told["reasoning"], told["content"]


def test_reasoning_survives_its_worker(tmp_path: Path) -> None:
    path = make_thinker(tmp_path / "thinker")
    arguments = (
        "dtype=float32",
        "structured_outputs_config.backend=xgrammar",
        "structured_outputs_config.disable_any_whitespace=true",
    )
    mesh = RunningMesh(
        tmp_path,
        *("--model", f"thinker={path}:2", "--reasoning-parser", "deepseek_r1", "--ready-timeout-s", str(START_S)),
        *(each for argument in arguments for each in ("--engine-arg", argument)),
    )
    try:
        mesh.wait_until_serving(START_S)
        expected = read(mesh)
        assert expected[0] == "1 2 3 4 5 6 7 8 "
        jsonschema.validate(json.loads(expected[1]), SCHEMA)
        for after in ("reasoning", "content"):
            eventually(lambda: list(mesh.instances().values()) == ["ready"] * 2, START_S, "both instances serve")
            pids = {name: mesh.pid(name) for name in mesh.instances()}
            assert read(mesh, pids, after=after) == expected, f"killed in its {after}"
    finally:
        mesh.cut()
