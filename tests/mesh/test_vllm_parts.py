"""A mesh whose model's prompts only vLLM writes, in the process beside the frontend."""

import json
from pathlib import Path

import httpx
import pytest

from tests.mesh.running_mesh import RunningMesh

pytestmark = pytest.mark.vllm


def test_a_prompt_that_only_vllm_writes(tmp_path: Path) -> None:
    mesh = RunningMesh(tmp_path, "--engine", "simulated", "--engine-arg", "tokenizer_mode=deepseek_v32")
    try:
        mesh.wait_until_serving(300)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "return_prompt_text": True}
        answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["prompt_text"] == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
        request_id = answer.headers["x-penstock-request-id"]
        explained = mesh.cli("explain", request_id, "--json")
        assert json.loads(explained.stdout)["vllm_parts"] == "prompt"
        assert "of vLLM's own parts beside the frontend: prompt" in mesh.cli("explain", request_id).stdout
        completed = httpx.post(f"{mesh.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 5}, timeout=120)
        explained = mesh.cli("explain", completed.headers["x-penstock-request-id"], "--json")
        assert not json.loads(explained.stdout).get("vllm_parts")
        assert mesh.stop() == 0
    finally:
        mesh.cut()
