"""The rescheduler in a real mesh: crowded requests are spread, and nobody notices but the operator."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.in_time import eventually
from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh

pytest.importorskip("ucxx", reason="KV transfers need UCX")

INSTANCES = 3
LONG_TOKENS, SHORT_TOKENS = 500, 20


@pytest.fixture
def rescheduling_mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    """Round robin, so that every third request goes to the same instance."""
    running = RunningMesh(tmp_path, "--engine", "simulated", "--policy", "round_robin", "--rescheduler", "current")
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def rescheduler(mesh: RunningMesh, *arguments: str) -> dict:  # type: ignore[type-arg]
    answer = mesh.cli("rescheduler", *arguments, "--json")
    assert answer.returncode == 0, answer.stderr
    status: dict = json.loads(answer.stdout)  # type: ignore[type-arg]
    return status


def start_all(mesh: RunningMesh) -> list[Reader]:
    """Nine requests, the long ones on one instance."""
    return [
        Reader(mesh, f"tale number {number}", SHORT_TOKENS if number % INSTANCES else LONG_TOKENS)
        for number in range(3 * INSTANCES)
    ]


def test_crowded_requests_are_moved_and_their_clients_read_on(rescheduling_mesh: RunningMesh) -> None:
    mesh = rescheduling_mesh
    with mesh.held():
        readers = start_all(mesh)
        status = eventually(
            lambda: (now := rescheduler(mesh)) and now["moved_total"] and now,
            60,
            lambda: f"a request was moved\n{mesh.story()}",
        )
    texts = [reader.whole_text() for reader in readers]
    moved = next(order for order in status["orders"] if order["outcome"] == "moved")
    assert "lowers the variance" in moved["reason"]
    ids = {reader.request_id for reader in readers}
    (request_id,) = ids & {moved["request_id"], moved["request_id"].rpartition("-")[0]}
    explained = mesh.cli("explain", request_id)
    assert explained.returncode == 0, explained.stderr
    assert f"from {moved['source_instance_id']} to {moved['target_instance_id']}: moved in" in explained.stdout
    assert "rescheduler: current" in mesh.cli("status").stdout
    off = rescheduler(mesh, "off")
    assert off["mode"] == "off"
    assert [reader.whole_text() for reader in start_all(mesh)] == texts, "where a request runs changes no token"
    assert rescheduler(mesh)["moved_total"] == off["moved_total"]
    assert rescheduler(mesh, "trajectories", "--set", "floor_ms=1")["mode"] == "trajectories"
    with mesh.held():
        readers = start_all(mesh)
        by_worth = eventually(
            lambda: [each for each in rescheduler(mesh)["orders"] if "trajectories: moves to" in each["reason"]],
            60,
            lambda: f"a move that saves everybody time\n{mesh.story()}",
        )
    assert all("saves" in each["reason"] and "costs" in each["reason"] for each in by_worth)
    assert [reader.whole_text() for reader in readers] == texts


def test_modes_that_are_not_there_are_refused(mesh: RunningMesh) -> None:
    answer = mesh.cli("rescheduler", "best")
    assert answer.returncode == 1
    assert "off, current, predicted, trajectories" in answer.stderr
    assert mesh.cli("rescheduler", "--set", "theta=1").returncode == 2
