"""What happens to a real mesh when its processes die. Each test restores what it broke."""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from tests.in_time import eventually, still, within
from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh


@pytest.fixture
def whole_mesh(mesh: RunningMesh) -> Iterator[RunningMesh]:
    """The shared mesh with all three instances ready, before and after."""

    def all_ready() -> bool:
        return list(mesh.instances().values()) == ["ready"] * 3

    eventually(all_ready, 60, "all instances are ready")
    yield mesh
    eventually(all_ready, 60, "all instances are ready again")


def complete(mesh: RunningMesh) -> str:
    """One short request; returns the instance that served it."""
    client = OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=20)
    raw = client.completions.with_raw_response.create(model="demo-large", prompt="x", max_tokens=2)
    return raw.headers["x-penstock-instance"]


def test_a_killed_worker_is_avoided_at_once_costs_no_stream_and_rejoins(whole_mesh: RunningMesh) -> None:
    with whole_mesh.held():
        streams = [Reader(whole_mesh, f"stream {number}") for number in range(6)]
        victim = streams[0].instance
        eventually(lambda: all(stream.text for stream in streams), 60, "all streams have begun")
        whole_mesh.kill(victim)
        killed_s = time.monotonic()
        # Until its end is seen a request may begin at the victim, whose name the answer then has, and go on elsewhere.
        eventually(lambda: whole_mesh.instances().get(victim) != "ready", 60, "the victim's end is seen")
    with ThreadPoolExecutor(6) as pool:  # all at once: within seconds the victim has another life
        served = set(pool.map(lambda _: complete(whole_mesh), range(6)))
    still(victim not in served or whole_mesh.instances().get(victim) != "ready", "the victim has no other life yet")
    assert victim not in served
    within(time.monotonic() - killed_s, 2 * 6, "six new requests, one after the other")
    for stream in streams:
        assert stream.whole_text()
    eventually(lambda: whole_mesh.instances().get(victim) == "ready", 60, "the worker rejoins")


@pytest.mark.parametrize("role", ["scheduler", "monitor"])
def test_streams_outlive_the_control_plane_and_its_state_is_rebuilt(whole_mesh: RunningMesh, role: str) -> None:
    def rebuilt() -> bool:
        status = whole_mesh.status()
        ready = [instance["state"] for instance in status["instances"]] == ["ready"] * 3
        return bool(ready and status["synced"] and not status["policy"].get("fallback"))

    with whole_mesh.held():
        stream = Reader(whole_mesh, "outlives")
        eventually(lambda: stream.text, 60, "the stream has begun")
        whole_mesh.kill(role)
        complete(whole_mesh)
        eventually(rebuilt, 60, f"the {role}'s state is rebuilt")
    assert stream.whole_text()


def test_a_hung_worker_gets_nothing_new(whole_mesh: RunningMesh) -> None:
    victim = complete(whole_mesh)
    pid = whole_mesh.pid(victim)
    whole_mesh.kill(victim, signal.SIGSTOP)
    try:
        eventually(lambda: whole_mesh.instances().get(victim) != "ready", 60, "the hung instance is seen")
        assert victim not in {complete(whole_mesh) for _ in range(6)}
    finally:
        import os

        os.kill(pid, signal.SIGCONT)


def test_a_worker_that_somebody_else_ends_comes_back(whole_mesh: RunningMesh) -> None:
    former = whole_mesh.pid("demo-large-1")
    whole_mesh.kill("demo-large-1", signal.SIGTERM)

    def is_back() -> bool:
        roles = [role for role in whole_mesh.status()["roles"] if role["member_id"] == "demo-large-1"]
        return bool(roles) and int(roles[0]["attributes"]["pid"]) != former

    eventually(is_back, 60, "it was started again")


def test_restarted_workers_cost_no_stream(whole_mesh: RunningMesh) -> None:
    pids = {name: whole_mesh.pid(name) for name in whole_mesh.instances()}
    with whole_mesh.held():
        streams = [Reader(whole_mesh, f"stream {number}") for number in range(6)]
        done = whole_mesh.cli("restart", "--rolling", "--role", "worker", "--json")
    assert done.returncode == 0, done.stderr
    for stream in streams:
        assert stream.whole_text()
    assert [each["member_id"] for each in json.loads(done.stdout)["restarted"]] == sorted(pids)
    assert all(whole_mesh.pid(name) != pid for name, pid in pids.items())
