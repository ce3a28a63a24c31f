"""Replicas follow a load that rises and falls, to none and back; every request is answered."""

import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.in_time import eventually
from tests.mesh.running_mesh import RunningMesh

MODEL = "demo-small"
POLICY = "--slo-ttft-ms 2000 --capacity 2 --maximum 2 --minimum 0 --cold-start-s 2".split()
TIMES = "--interval-s 1 --settle-s 3 --idle-s 3".split()
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One instance of one model."""
    running = RunningMesh(tmp_path_factory.mktemp("scaled"), "--engine", "simulated", "--model", f"{MODEL}:1")
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


class Load:
    """Requests from a few clients, one after the other in each, until it is over."""

    def __init__(self, url: str, clients: int) -> None:
        self.statuses: list[int] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not self._over.is_set():
                self.statuses.append(ask(self._url, client))
                time.sleep(0.2)


def ask(url: str, client: httpx.Client) -> int:
    body = {"model": MODEL, "prompt": "Count from 7 up to 12.", "max_tokens": 8}
    return client.post(f"{url}/v1/completions", json=body).status_code


def joined(mesh: RunningMesh) -> int:
    """Replicas that the supervisor has started and not ended, by its own lines."""
    lines = mesh.output_path.read_text()
    started = lines.count("is started as planned")
    return 1 + started - lines.count("is drained and ended")


def test_replicas_follow_the_load_to_none_and_back(scaled: RunningMesh) -> None:
    with Load(scaled.url, clients=4) as load:
        said = scaled.cli("autoscale", "set", MODEL, *POLICY, *TIMES, "--json")
        assert said.returncode == 0, said.stderr
        eventually(lambda: joined(scaled) == 2, PATIENCE_S, lambda: f"a second replica\n{scaled.story()}")
    eventually(lambda: joined(scaled) == 0, PATIENCE_S, lambda: f"no replica without requests\n{scaled.story()}")
    with httpx.Client(timeout=PATIENCE_S) as client:
        load.statuses.append(ask(scaled.url, client))
    assert set(load.statuses) == {200}, "0 requests lost"
    assert joined(scaled) in (1, 2), "the one that waited at the door had one started, and more may come now"
    (shown,) = json.loads(scaled.cli("autoscale", "show", "--json").stdout)
    assert shown["policy"]["minimum"] == 0
    assert shown["status"]["wanted"] in (0, 1, 2)
    assert f"autoscale of {MODEL}: " in scaled.cli("status").stdout


def test_kinds_are_switched_under_load_and_none_goes_before_the_other_serves(scaled: RunningMesh) -> None:
    kinds = ("tp=1,price-per-hour=1,capacity=1", "tp=2,price-per-hour=0.6,capacity=50,maximum=1")
    policy = "--slo-ttft-ms 2000 --maximum 30 --cold-start-s 2".split()
    with Load(scaled.url, clients=2) as load:
        chosen = [word for kind in kinds for word in ("--kind", kind)]
        said = scaled.cli("autoscale", "set", MODEL, *policy, *TIMES, *chosen, "--json")
        assert said.returncode == 0, said.stderr
        eventually(lambda: switched(scaled), PATIENCE_S, lambda: f"one replica of TP=2\n{scaled.story()}")
    assert set(load.statuses) == {200}, "0 requests lost"


def switched(mesh: RunningMesh) -> bool:
    """Whether the one replica that is wanted is of TP=2, and is all that serves."""
    (shown,) = json.loads(mesh.cli("autoscale", "show", "--json").stdout)
    status = shown["status"]
    return status["serving"] == 1 and status.get("kinds") == [{"replicas": 1, "tp": 2}]
