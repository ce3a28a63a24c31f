"""`penstock up --on docker` on a Docker engine: instances are containers, started, replaced, drained and ended."""

import json
from collections.abc import Iterator

import pytest

from tests.containers.composed_mesh import ComposedMesh
from tests.containers.streams import disturbed, undisturbed
from tests.in_time import eventually
from tests.mesh.running_mesh import RunningMesh

docker = pytest.importorskip("docker")
pytestmark = pytest.mark.docker

MODEL = "demo-large"
INSTANCE = "io.penstock.instance"
OPTIONS = f"--on docker --image penstock/frontend --engine simulated --model {MODEL}:3"
POLICY = "--slo-ttft-ms 2000 --capacity 1000 --cold-start-s 2 --interval-s 1 --settle-s 0".split()


@pytest.fixture(scope="module")
def client() -> Iterator["docker.DockerClient"]:
    try:
        found = docker.from_env()
        found.ping()
    except docker.errors.DockerException as error:
        pytest.skip(f"no Docker engine answers ({error})")
    yield found
    found.close()


@pytest.fixture(scope="module")
def mesh(client: "docker.DockerClient", tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    built = ComposedMesh(client, tmp_path_factory.mktemp("built")).run("build", "frontend", check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    running = RunningMesh(tmp_path_factory.mktemp("up"), *OPTIONS.split(), asks_who=True)
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
        assert containers(client) == {}, "those that ended well are removed"
    finally:
        running.cut()
        for left in client.containers.list(all=True, filters={"label": INSTANCE}):
            left.remove(force=True)


def containers(client: "docker.DockerClient", everywhere: bool = True) -> dict[str, str]:
    """Ids of the instances' containers, by instance; not `everywhere`: of those that run."""
    found = client.containers.list(all=everywhere, filters={"label": INSTANCE})
    return {each.labels[INSTANCE]: each.id for each in found}


def serving(mesh: RunningMesh) -> set[str]:
    return {name for name, state in mesh.instances().items() if state == "ready"}


def test_instances_are_containers_with_little_rights(client: "docker.DockerClient", mesh: RunningMesh) -> None:
    assert set(containers(client)) == serving(mesh) == {f"{MODEL}-{number}" for number in range(3)}
    for container in client.containers.list(filters={"label": INSTANCE}):
        written = container.exec_run(["sh", "-c", "touch /opt/x"])
        assert written.exit_code != 0
        assert container.attrs["HostConfig"]["CapDrop"] == ["ALL"]


def test_one_that_is_killed_under_load_is_replaced_and_nothing_is_lost(
    client: "docker.DockerClient", mesh: RunningMesh
) -> None:
    expected, before = undisturbed(mesh.url), containers(client)
    name = f"{MODEL}-0"
    assert disturbed(mesh.url, lambda: client.containers.get(before[name]).kill()) == expected
    eventually(
        lambda: containers(client, everywhere=False).get(name, before[name]) != before[name], 60, "its successor"
    )
    eventually(lambda: len(serving(mesh)) == 3, 60, "it serves again")
    after = containers(client)
    assert {each: id for each, id in after.items() if each != name} == {
        each: id for each, id in before.items() if each != name
    }


def test_autoscaling_ends_exactly_the_chosen_one_under_load(client: "docker.DockerClient", mesh: RunningMesh) -> None:
    expected, before = undisturbed(mesh.url), containers(client, everywhere=False)

    def scale_in() -> None:
        set_to = mesh.cli("autoscale", "set", MODEL, *POLICY, "--minimum", "2", "--maximum", "2")
        assert set_to.returncode == 0, set_to.stderr

    assert disturbed(mesh.url, scale_in) == expected
    eventually(lambda: len(containers(client, everywhere=False)) == 2, 60, "one has ended")
    after = containers(client, everywhere=False)
    assert after.items() < before.items(), "the others are the same containers"
    (gone,) = before.keys() - after.keys()
    assert client.containers.get(before[gone]).attrs["State"]["ExitCode"] == 0, "it drained"
    assert serving(mesh) == set(after)
    grown = mesh.cli("autoscale", "set", MODEL, *POLICY, "--minimum", "4", "--maximum", "4")
    assert grown.returncode == 0, grown.stderr
    eventually(lambda: len(serving(mesh)) == 4, 60, "two more have started")
    assert after.items() < containers(client, everywhere=False).items()


def test_status_and_logs_lead_to_the_containers(client: "docker.DockerClient", mesh: RunningMesh) -> None:
    roles = json.loads(mesh.cli("status", "--json").stdout)["roles"]
    workers = {each["member_id"] for each in roles if each["role"] == "worker"}
    assert workers == set(containers(client, everywhere=False))
    container = client.containers.get(containers(client)[f"{MODEL}-0"])
    assert container.name == f"penstock-default-{MODEL}-0"
    assert json.loads(container.logs().decode().splitlines()[-1])
