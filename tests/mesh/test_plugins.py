"""A live mesh of an installed package's engine and policy."""

from pathlib import Path

import httpx

from tests.example_plugin import installed_example
from tests.mesh.running_mesh import RunningMesh


def test_a_mesh_runs_on_an_installed_engine_and_policy(tmp_path: Path) -> None:
    environment = installed_example(tmp_path)
    options = ("--engine", "paced", "--engine-arg", "step_ms=2", "--policy", "fewest_tokens", "--workers", "2")
    mesh = RunningMesh(tmp_path, *options, "--model", "demo-small", environment=environment)
    try:
        mesh.wait_until_serving()
        body = {"model": "demo-small", "prompt": "Count from 7 up to 12.", "max_tokens": 8}
        answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= 8
        status = mesh.status()
        assert {instance["engine"] for instance in status["instances"]} == {"paced"}
        assert status["policy"]["policy"] == "fewest_tokens"
        (unusable,) = status["policy"]["unusable"]
        assert unusable.startswith("rotten of broken-package 2.0: importing broken_package:POLICY raised")
        tuned = mesh.cli("policy", "fewest_tokens", "--set", "prefill_weight=1.5")
        assert tuned.returncode == 0, tuned.stderr
        assert tuned.stdout.startswith("fewest_tokens prefill_weight=1.5")
        assert mesh.cli("policy", "rotten").returncode != 0
        tiers = ("--tier", "demo-small", "--tier", "demo-large")
        judged = mesh.cli("cascade", "set", "small-first", *tiers, "--judge", "length:x", "--threshold", "50")
        assert "write length:50" in judged.stderr
        assert mesh.stop() == 0
    finally:
        mesh.cut()
