"""`penstock up --on ray` on a Ray cluster of two nodes: instances are actors, started, replaced, drained and ended; a
node is killed under load."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.containers.streams import disturbed, undisturbed
from tests.in_time import eventually
from tests.mesh.running_mesh import RunningMesh
from tests.ray.ray_nodes import CLIENT_PORT, PORT, RayNode

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

MODEL = "demo-large"
POLICY = "--slo-ttft-ms 2000 --capacity 1000 --cold-start-s 2 --interval-s 1 --settle-s 0".split()
PLACES = 4
"""CPUs of a node, of which each instance takes one."""
BACK_S = 120.0
"""Within which Ray has noticed a loss, and another actor serves."""


class Nodes:
    """The head, and another node that tests kill and start anew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.head = RayNode(1, folder, PLACES)
        self.head.wait_until_started()
        self._next = 2
        self.other = self.add()

    def add(self) -> RayNode:
        self.other = RayNode(self._next, self._folder, PLACES, self.head)
        self._next += 1
        self.other.wait_until_started()
        return self.other

    def end(self) -> None:
        for node in (self.other, self.head):
            node.kill()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("ray"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def mesh(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    options = f"--on ray --engine simulated --model {MODEL}:3".split()
    address = {"RAY_ADDRESS": f"{nodes.head.host}:{PORT}"}
    running = RunningMesh(tmp_path_factory.mktemp("up"), *options, environment=address, asks_who=True)
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
        assert not workers(nodes), "nothing is left behind"
        assert not identities()
    finally:
        running.cut()


def workers(nodes: Nodes) -> dict[str, psutil.Process]:
    """Processes of instances that run on the nodes, by name."""
    found = nodes.head.processes("serve", "worker") | nodes.other.processes("serve", "worker")
    return {line[line.index("--member-id") + 1]: each for each, line in found.items()}


def identities() -> list[Path]:
    return list(Path("/dev/shm").glob(f"penstock-{os.getuid()}-*"))


def serving(mesh: RunningMesh) -> set[str]:
    return {name for name, state in mesh.instances().items() if state == "ready"}


def hosts(mesh: RunningMesh) -> dict[str, str]:
    """Where instances say that they are, by name."""
    roles = [each for each in mesh.status()["roles"] if each["role"] == "worker"]
    return {each["member_id"]: each["address"].rpartition(":")[0] for each in roles}


def test_instances_are_on_both_nodes_and_announce_their_addresses(nodes: Nodes, mesh: RunningMesh) -> None:
    assert set(workers(nodes)) == serving(mesh) == {f"{MODEL}-{number}" for number in range(3)}
    assert set(hosts(mesh).values()) == {nodes.head.host, nodes.other.host}
    for name, host in hosts(mesh).items():
        node = nodes.head if host == nodes.head.host else nodes.other
        assert [each.pid for each in node.processes("serve", "worker", name)] == [workers(nodes)[name].pid]
    for process in workers(nodes).values():
        assert "PRIVATE KEY" not in f"{process.cmdline()} {process.environ()}"
    assert len(identities()) == 3
    assert all(each.stat().st_mode & 0o077 == 0 for each in identities())


def test_an_actor_that_is_killed_under_load_is_replaced_and_nothing_is_lost(nodes: Nodes, mesh: RunningMesh) -> None:
    expected, before = undisturbed(mesh.url), workers(nodes)
    name = f"{MODEL}-0"
    actor = before[name].parent()
    assert actor is not None
    assert disturbed(mesh.url, lambda: actor.send_signal(signal.SIGKILL)) == expected
    eventually(lambda: workers(nodes).get(name, before[name]) != before[name], BACK_S, "its successor")
    eventually(lambda: len(serving(mesh)) == 3, BACK_S, "it serves again")
    assert {each: process for each, process in workers(nodes).items() if each != name} == {
        each: process for each, process in before.items() if each != name
    }


def test_autoscaling_ends_exactly_the_chosen_one_under_load(nodes: Nodes, mesh: RunningMesh) -> None:
    expected, before = undisturbed(mesh.url), workers(nodes)

    def scale_in() -> None:
        set_to = mesh.cli("autoscale", "set", MODEL, *POLICY, "--minimum", "2", "--maximum", "2")
        assert set_to.returncode == 0, set_to.stderr

    assert disturbed(mesh.url, scale_in) == expected
    eventually(lambda: len(workers(nodes)) == 2, BACK_S, "one has ended")
    after = workers(nodes)
    assert after.items() < before.items(), "the others are the same processes"
    eventually(lambda: serving(mesh) == set(after), BACK_S, "it has left")
    grown = mesh.cli("autoscale", "set", MODEL, *POLICY, "--minimum", "4", "--maximum", "4")
    assert grown.returncode == 0, grown.stderr
    eventually(lambda: len(serving(mesh)) == 4, BACK_S, "two more have started")
    assert after.items() < workers(nodes).items()


def test_no_token_is_lost_with_a_node(nodes: Nodes, mesh: RunningMesh) -> None:
    expected = undisturbed(mesh.url)
    lost = {name for name, host in hosts(mesh).items() if host == nodes.other.host}
    assert lost
    assert len(lost) < 4, "both nodes have instances"
    assert disturbed(mesh.url, nodes.other.kill) == expected
    eventually(lambda: len(serving(mesh)) == 4, BACK_S, "they serve on the node that is left")
    assert set(hosts(mesh).values()) == {nodes.head.host}
    assert undisturbed(mesh.url) == expected


def test_who_finds_no_place_is_told_and_gets_it_with_another_node(nodes: Nodes, mesh: RunningMesh) -> None:
    asked = mesh.cli("autoscale", "set", MODEL, *POLICY, "--minimum", "5", "--maximum", "5")
    assert asked.returncode == 0, asked.stderr

    def told() -> bool:
        return any("busy" in why for each in mesh.status()["deployments"] for why in each["waiting"].values())

    eventually(told, BACK_S, "penstock status tells who waits")
    assert "waits: every node of the Ray cluster that has 1 CPU is busy" in mesh.cli("status").stdout
    nodes.add()
    eventually(lambda: len(serving(mesh)) == 5, BACK_S, "it has its place")
    assert nodes.other.host in hosts(mesh).values()


def test_streams_outlive_the_process_that_speaks_with_ray(nodes: Nodes, mesh: RunningMesh) -> None:
    expected, before = undisturbed(mesh.url), workers(nodes)

    def drivers() -> list[psutil.Process]:
        children = psutil.Process(mesh.process.pid).children()
        return [each for each in children if "services.cli.carriers.ray_driver" in each.cmdline()]

    (driver,) = drivers()
    assert disturbed(mesh.url, driver.kill) == expected
    eventually(lambda: drivers() and drivers() != [driver], BACK_S, "another one")
    assert workers(nodes) == before


def test_another_mesh_comes_in_by_the_client_s_address(nodes: Nodes, mesh: RunningMesh, tmp_path: Path) -> None:
    """While the first one leaves places; ended by force, its actors end by themselves."""
    asked = mesh.cli("autoscale", "set", MODEL, *POLICY, "--minimum", "2", "--maximum", "2")
    assert asked.returncode == 0, asked.stderr
    on = ("--on", f"ray://{nodes.head.host}:{CLIENT_PORT}")
    ours = stores(nodes)
    second = RunningMesh(tmp_path, *on, *f"--engine simulated --model {MODEL}:1".split(), asks_who=True)
    try:
        second.wait_until_serving()
        assert serving(second) == {f"{MODEL}-0"}
        assert set(hosts(second).values()) <= {nodes.head.host, nodes.other.host}
        assert stores(nodes) > ours
        second.process.kill()
        second.process.wait(10)
        eventually(lambda: stores(nodes) == ours, BACK_S, "nobody is left of it")
    finally:
        second.cut()


def stores(nodes: Nodes) -> set[str]:
    """State stores of the instances that run: each mesh has one."""
    found = nodes.head.processes("serve", "worker") | nodes.other.processes("serve", "worker")
    return {line[line.index("--store") + 1] for line in found.values()}
