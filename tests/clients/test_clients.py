"""Every client against a mesh of vLLM instances with the demo models (`make test-clients`), and with one killed."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.matrix import CLIENTS, ROOT, Endpoint, Outcome, run_client
from tests.in_time import eventually
from tests.mesh.running_mesh import PENSTOCK, RunningMesh

MODELS = ROOT / "demo" / "models"
START_S = 600.0


class VllmMesh:
    """Two instances that generate and one that embeds."""

    def __init__(self, run_dir: Path) -> None:
        self.mesh = RunningMesh(
            run_dir,
            *("--model", "demo-large:2", "--engine-arg", "dtype=float32", "--ready-timeout-s", str(START_S)),
            *("--tool-call-parser", "pythonic"),  # read by vLLM's parser, in its process
        )
        self.mesh.wait_until_serving(START_S)
        command = (*PENSTOCK, "serve", "worker", "--member-id", "vectors-0", "--model", "vectors")
        arguments = [f"--engine-arg={each}" for each in ("runner=pooling", "convert=embed", "dtype=float32")]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(run_dir)}
        self.vectors = subprocess.Popen(
            (*command, "--model-path", str(MODELS / "demo-small"), *arguments), env=environment
        )
        eventually(lambda: "vectors-0" in self.mesh.instances(), START_S, "the embedding instance serves")
        self.endpoint = Endpoint(self.mesh.url, "demo-large", "vectors", MODELS / "demo-large")

    def is_whole_without(self, pid: int) -> bool:
        """Whether all instances serve, none of them in this process: a dead one is listed until its lease ends."""
        status = self.mesh.status()
        pids = [int(role["attributes"]["pid"]) for role in status["roles"] if role["role"] == "worker"]
        ready = [instance for instance in status["instances"] if instance["state"] == "ready"]
        return len(pids) == len(ready) == 3 and pid not in pids

    def stop(self) -> None:
        self.vectors.send_signal(signal.SIGTERM)
        self.vectors.wait(60)
        self.mesh.cut()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmMesh]:
    running = VllmMesh(tmp_path_factory.mktemp("clients"))
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.clients
@pytest.mark.vllm
@pytest.mark.process
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_passes(mesh: VllmMesh, client: str) -> None:
    assert failures(run_client(client, mesh.endpoint)) == []


@pytest.mark.clients
@pytest.mark.vllm
@pytest.mark.process
@pytest.mark.parametrize("client", ["openai", "anthropic", "instructor", "langchain-openai"])
def test_a_client_passes_while_a_worker_is_killed(mesh: VllmMesh, client: str) -> None:
    killed_pid = mesh.mesh.pid("demo-large-0")
    timer = threading.Timer(2.0, os.kill, (killed_pid, signal.SIGKILL))
    timer.start()
    try:
        assert failures(run_client(client, mesh.endpoint)) == []
    finally:
        timer.join()
        eventually(lambda: mesh.is_whole_without(killed_pid), START_S, "the killed worker is back")


@pytest.mark.process
@pytest.mark.slow
def test_openais_own_client_passes_what_needs_no_weights(tmp_path: Path) -> None:
    """`make test` runs this one: the simulated engine writes no JSON of a schema, and embeds nothing here."""
    mesh = RunningMesh(tmp_path, "--engine", "simulated", "--model", "demo-large:1")
    try:
        mesh.wait_until_serving()
        endpoint = Endpoint(mesh.url, "demo-large", "vectors", MODELS / "demo-large")
        outcomes = run_client("openai", endpoint, sys.executable)
        passed = {outcome.check for outcome in outcomes if not outcome.failure}
        wanted = {"models", "chat", "chat, streamed", "completion, logprobs", "responses", "responses, streamed"}
        wanted |= {"responses, in the background", "responses, a stream in the background"}
        assert wanted <= passed, failures(outcomes)
        assert mesh.stop() == 0
    finally:
        mesh.cut()


def failures(outcomes: list[Outcome]) -> list[str]:
    return [f"{each.check}: {each.failure}" for each in outcomes if each.failure]
