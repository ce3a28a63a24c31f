"""What a newcomer does first."""

import json
import re
import subprocess
from pathlib import Path

import grpc
import psutil
import pytest
from openai import OpenAI

from tests.in_time import eventually
from tests.mesh.running_mesh import RunningMesh, free_port
from tests.reflection import ReflectionClient

KV_TRANSFER = "penstock.v1.KvTransfer"


def test_the_printed_curl_line_works(mesh: RunningMesh) -> None:
    (line,) = re.findall(r"^try:\s+(curl .*)$", mesh.output_path.read_text(), re.MULTILINE)
    result = subprocess.run(f"{line} -sS -m 30", shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout)["object"] == "chat.completion"


def test_the_official_client_streams(mesh: RunningMesh) -> None:
    client = OpenAI(base_url=f"{mesh.url}/v1", api_key="none")
    chunks = client.chat.completions.create(
        model="demo-large", messages=[{"role": "user", "content": "hello"}], max_tokens=12, stream=True
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] in {"length", "stop"}


def test_status_tells_all(mesh: RunningMesh) -> None:
    every_role = {"frontend", "cascade", "predictor", "scheduler", "monitor", "planner", "worker"}
    # Serving needs neither planner nor predictor, so they may still be on their way.
    eventually(lambda: {role["role"] for role in mesh.status()["roles"]} == every_role, 60, "every role is announced")
    status = mesh.status()
    assert {role["health"] for role in status["roles"]} == {"serving"}
    assert all(role["lease"] for role in status["roles"])
    assert [instance["state"] for instance in status["instances"]] == ["ready"] * 3
    assert {instance["engine"] for instance in status["instances"]} == {"simulated"}
    assert "running_requests" in status["instances"][0]["load"]
    assert status["policy"]["policy"] == "penstock"
    assert status["synced"]


def test_status_for_people(mesh: RunningMesh) -> None:
    result = mesh.shell("status")
    assert result.returncode == 0, result.stderr
    assert "demo-large-0" in result.stdout
    assert "policy: penstock" in result.stdout


def test_explain_shows_scores(mesh: RunningMesh) -> None:
    client = OpenAI(base_url=f"{mesh.url}/v1", api_key="none")
    raw = client.completions.with_raw_response.create(model="demo-large", prompt="a b c d e f", max_tokens=3)
    result = mesh.shell("explain", raw.headers["x-request-id"], "--json")
    assert result.returncode == 0, result.stderr
    explanation = json.loads(result.stdout)
    assert explanation["policy"] == "penstock"
    assert explanation["chosen_instance_id"] == raw.headers["x-penstock-instance"]
    assert len(explanation["scores"]) == 3
    assert all(score["indicators"] for score in explanation["scores"])


def test_explaining_an_unknown_request_fails_clearly(mesh: RunningMesh) -> None:
    result = mesh.shell("explain", "nobody")
    assert result.returncode == 1
    assert "nobody" in result.stderr


def test_the_policy_can_be_switched_while_serving(mesh: RunningMesh) -> None:
    assert mesh.cli("policy", "round_robin").returncode == 0
    client = OpenAI(base_url=f"{mesh.url}/v1", api_key="none")
    used = set()
    for number in range(6):
        raw = client.completions.with_raw_response.create(model="demo-large", prompt=f"{number} x", max_tokens=1)
        used.add(raw.headers["x-penstock-instance"])
        assert raw.headers["x-penstock-policy"] == "round_robin"
    assert len(used) == 3
    refused = mesh.cli("policy", "nonsense")
    assert refused.returncode == 1
    assert "nonsense" in refused.stderr
    assert mesh.cli("policy", "penstock").returncode == 0


def test_every_role_answers_grpcurl(mesh: RunningMesh) -> None:
    own_service = {
        "frontend": ("penstock.v1.Frontend", "GetStatus"),
        "scheduler": ("penstock.v1.Scheduler", "GetSnapshot"),
        "monitor": ("penstock.v1.Monitor", "GetCluster"),
        "planner": ("penstock.v1.Planner", "GetPlan"),
        "predictor": ("penstock.v1.LengthPredictor", "GetArtefact"),
        "cascade": ("penstock.v1.Cascade", "GetThresholds"),
        "worker": ("penstock.v1.Worker", "Describe"),
    }
    for role in mesh.status()["roles"]:
        service, method = own_service[role["role"]]
        client = ReflectionClient(role["address"])
        assert {service, "grpc.health.v1.Health"} <= set(client.services())
        assert isinstance(client.call(service, method), dict)
        client.close()


def test_every_worker_tells_of_its_kv_transfers(mesh: RunningMesh) -> None:
    pytest.importorskip("ucxx", reason="needs UCX")
    workers = [role for role in mesh.status()["roles"] if role["role"] == "worker"]
    assert len(workers) == 3
    for worker in workers:
        client = ReflectionClient(worker["address"])
        assert {"penstock.v1.Worker", "penstock.v1.Migration", KV_TRANSFER} <= set(client.services())
        about = client.call(KV_TRANSFER, "Describe")
        assert about["host"] == worker["address"].rpartition(":")[0]
        assert about["port"] > 0
        assert int(about["region_block_bytes"][0]) > 0
        status = client.call(KV_TRANSFER, "Status")
        assert "pulls_total" not in status or int(status["pulls_total"]) >= 0
        order = {"host": "127.0.0.1", "port": 9, "transfer_id": "m1", "source_block_ids": [1], "target_block_ids": [1]}
        with pytest.raises(grpc.RpcError) as refused:
            client.call(KV_TRANSFER, "Pull", order)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "nothing is reserved under 'm1'" in refused.value.details()
        client.close()


def test_a_second_mesh_of_the_same_name_is_refused(mesh: RunningMesh) -> None:
    result = mesh.shell("up", "--engine", "simulated", "--port", str(free_port()))
    assert result.returncode == 2
    assert "already running" in result.stderr


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    running = RunningMesh(tmp_path, "--engine", "simulated", "--workers", "1")
    try:
        running.wait_until_serving()
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert len(children) == 7
        assert running.stop() == 0
        assert not [child for child in children if child.is_running()]
        assert not (tmp_path / "penstock" / "default.json").exists()
    finally:
        running.cut()


def test_a_killed_supervisor_takes_everything_with_it(tmp_path: Path) -> None:
    running = RunningMesh(tmp_path, "--engine", "simulated", "--workers", "1")
    try:
        running.wait_until_serving()
        children = psutil.Process(running.process.pid).children(recursive=True)
        running.process.kill()
        _, alive = psutil.wait_procs(children, timeout=40)
        assert not alive
    finally:
        running.cut()
