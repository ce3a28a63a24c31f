"""Requests move inside a real mesh while their clients read on."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.in_time import eventually, still
from tests.mesh.reader import JOIN_S, Reader
from tests.mesh.running_mesh import RunningMesh

pytest.importorskip("ucxx", reason="KV transfers need UCX")


@pytest.fixture
def mesh_to_drain(tmp_path: Path) -> Iterator[RunningMesh]:
    """A mesh of its own: what is drained does not come back."""
    running = RunningMesh(tmp_path, "--engine", "simulated")
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def test_a_stream_is_moved_by_command_and_its_client_reads_on(mesh: RunningMesh) -> None:
    undisturbed = Reader(mesh, "once upon a time").whole_text()
    with mesh.held():
        reader = Reader(mesh, "once upon a time")
        eventually(lambda: reader.text, 60, "the stream has begun")
        target = next(name for name in sorted(mesh.instances()) if name != reader.instance)
        answer = mesh.cli("migrate", reader.request_id, "--to", target, "--json")
    still(answer.returncode == 0 or reader.reads, "the request runs until it has been moved")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (move,) = json.loads(answer.stdout)
    assert (move["moved"], move["from"], move["to"]) == (True, reader.instance, target)
    assert reader.whole_text() == undisturbed


def test_a_request_that_does_not_run_cannot_be_moved(mesh: RunningMesh) -> None:
    answer = mesh.cli("migrate", "nobody", "--to", "demo-large-0")
    assert answer.returncode == 1
    assert "runs on no instance" in answer.stderr


def test_a_drained_instance_leaves_and_no_stream_is_cut(mesh_to_drain: RunningMesh) -> None:
    mesh = mesh_to_drain
    prompts = [f"story number {number}" for number in range(16)]
    with mesh.held():
        readers = [Reader(mesh, prompt) for prompt in prompts]
        eventually(lambda: all(reader.text for reader in readers), 60, "all streams have begun")
        victim = readers[0].instance
        answer = mesh.cli("drain", victim, "--json")
        assert answer.returncode == 0, answer.stdout + answer.stderr
        eventually(lambda: victim not in mesh.instances(), 60, "the drained instance has left")
    still(json.loads(answer.stdout)["running_requests"] > 0, "requests run there")
    texts = [reader.whole_text() for reader in readers]
    eventually(lambda: f"{victim} was drained" in mesh.output_path.read_text(), 60, "the supervisor says so")
    undisturbed = [Reader(mesh, prompt) for prompt in prompts]
    assert texts == [reader.whole_text() for reader in undisturbed]


def test_a_target_killed_in_the_midst_of_migrations_costs_no_stream(mesh: RunningMesh) -> None:
    prompts = [f"chapter {number} " + "and so it went on " * 60 for number in range(8)]
    undisturbed = [Reader(mesh, prompt) for prompt in prompts]
    texts = [reader.whole_text() for reader in undisturbed]
    with mesh.held():
        readers = [Reader(mesh, prompt) for prompt in prompts]
        eventually(lambda: all(reader.text for reader in readers), 60, "all streams have begun")
        target = sorted(mesh.instances())[0]
        orders = [
            mesh.start("migrate", reader.request_id, "--to", target) for reader in readers if reader.instance != target
        ]
        orders[0].wait(JOIN_S)
        mesh.kill(target)
    assert [reader.whole_text() for reader in readers] == texts
    for order in orders:
        order.wait(JOIN_S)
    eventually(lambda: list(mesh.instances().values()) == ["ready"] * 3, 60, "the killed instance is back")
