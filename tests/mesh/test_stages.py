"""Stages in a real mesh: planned from live lengths, requests cross them in mid-stream, a lost stage is covered."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.in_time import eventually
from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh

pytest.importorskip("ucxx", reason="KV transfers need UCX")

INSTANCES = 4
SHORT, LONG = "tell me of number {}", "tell me, at length, of number {} " + "and of what came after it " * 60


@pytest.fixture(scope="module")
def staged_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """Enough requests of mixed lengths have ended that it has a plan."""
    run_dir: Path = tmp_path_factory.mktemp("stages")
    running = RunningMesh(run_dir, "--engine", "simulated", "--workers", str(INSTANCES), "--stages")
    try:
        running.wait_until_serving()
        assert "none yet" in running.cli("stages").stdout
        # Load this light is worth no cut; a chain has as many stages as instances whatever the load.
        assert running.cli("stages", "on", "--method", "chain", "--refinement", "frozen").returncode == 0
        prompts = [(LONG if number % 4 == 0 else SHORT).format(number) for number in range(64)]
        with running.paced(0.2):
            for begin in range(0, len(prompts), 16):
                for reader in [Reader(running, prompt) for prompt in prompts[begin : begin + 16]]:
                    reader.whole_text()
        eventually(lambda: plan(running)["revision"], 60, "stages are planned")
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def plan(mesh: RunningMesh) -> dict[str, Any]:
    (model,) = json.loads(mesh.cli("stages", "--json").stdout)["models"]
    found: dict[str, Any] = model
    return found


def moved_requests(mesh: RunningMesh) -> int:
    """Deals that ended with a move, as the workers count them."""
    return sum(int(float(line.rpartition(" ")[2])) for line in _metric_lines(mesh))


def _metric_lines(mesh: RunningMesh) -> list[str]:
    from urllib.request import urlopen

    lines: list[str] = []
    for role in mesh.status()["roles"]:
        if role["role"] == "worker":
            with urlopen(f"http://{role['metrics_address']}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            lines += [
                line
                for line in text.splitlines()
                if line.startswith("penstock_worker_stage_deals_total{") and "moved" in line
            ]
    return lines


def test_requests_cross_stages_and_their_clients_read_on(staged_mesh: RunningMesh) -> None:
    assert len(plan(staged_mesh)["stages"]) > 1
    prompts = [SHORT.format(f"{number} of the second round") for number in range(24)]
    before = moved_requests(staged_mesh)
    with staged_mesh.held():
        readers = [Reader(staged_mesh, prompt) for prompt in prompts]
        eventually(lambda: moved_requests(staged_mesh) > before, 60, lambda: staged_mesh.cli("stages").stdout)
    texts = [reader.whole_text() for reader in readers]
    assert staged_mesh.cli("stages", "off").returncode == 0
    eventually(lambda: not plan(staged_mesh)["revision"], 60, "the plan is taken away")
    undisturbed = [reader.whole_text() for reader in [Reader(staged_mesh, prompt) for prompt in prompts]]
    assert texts == undisturbed
    assert staged_mesh.cli("stages", "on", "--method", "prefill").returncode == 0
    eventually(lambda: plan(staged_mesh)["revision"], 60, "stages are planned by their prompts")
    assert [reader.whole_text() for reader in [Reader(staged_mesh, prompt) for prompt in prompts]] == texts
    assert staged_mesh.cli("stages", "on", "--method", "chain").returncode == 0
    eventually(lambda: len(plan(staged_mesh)["stages"]) > 1, 60, "stages are planned as before")


def test_status_shows_stages_and_ranges(staged_mesh: RunningMesh) -> None:
    stages = plan(staged_mesh)["stages"]
    assert sum(len(stage["instances"]) for stage in stages) == INSTANCES
    assert stages[0]["first_tokens"] == 1
    assert stages[-1]["last_tokens"] == 0
    shown = staged_mesh.cli("status").stdout
    assert "stage 1: 1 to " in shown
    assert "derived from datasheets" in shown


def test_a_killed_stage_is_covered_and_no_stream_is_cut(staged_mesh: RunningMesh) -> None:
    prompts = [SHORT.format(f"{number} of the last round") for number in range(16)]
    undisturbed = [reader.whole_text() for reader in [Reader(staged_mesh, prompt) for prompt in prompts]]
    readers = [Reader(staged_mesh, prompt) for prompt in prompts]
    eventually(lambda: all(reader.text for reader in readers), 60, "all streams have begun")
    smallest = min(plan(staged_mesh)["stages"], key=lambda stage: len(stage["instances"]))
    for each in smallest["instances"]:
        staged_mesh.kill(each["instance_id"])
    assert [reader.whole_text() for reader in readers] == undisturbed
    eventually(
        lambda: list(staged_mesh.instances().values()) == ["ready"] * INSTANCES, 60, "the killed instances are back"
    )
