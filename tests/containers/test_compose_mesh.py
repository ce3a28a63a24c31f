"""The Compose file on a Docker engine: built, up, asked, and broken as containers break."""

import json
from collections.abc import Iterator

import pytest

from tests.containers.composed_mesh import ComposedMesh
from tests.containers.streams import disturbed, streamed, undisturbed
from tests.in_time import eventually

docker = pytest.importorskip("docker")
pytestmark = pytest.mark.docker

MAX_IMAGE_BYTES = {"frontend": 250_000_000, "controlplane": 350_000_000}
"""Beyond the base."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposedMesh]:
    try:
        client = docker.from_env()
        client.ping()
    except docker.errors.DockerException as error:
        pytest.skip(f"no Docker engine answers ({error})")
    made = ComposedMesh(client, tmp_path_factory.mktemp("compose"))
    try:
        made.up()
        yield made
    finally:
        made.down()
        client.close()


@pytest.fixture(scope="module")
def expected(mesh: ComposedMesh) -> list[str]:
    """What undisturbed streams say."""
    return undisturbed(mesh.url)


def workers_up(mesh: ComposedMesh) -> int:
    shown = json.loads(mesh.penstock("status", "--json"))
    return sum(member["role"] == "worker" and member["health"] == "serving" for member in shown["roles"])


def test_operators_see_it_and_strangers_do_not(mesh: ComposedMesh) -> None:
    assert eventually(lambda: workers_up(mesh) == 3, 60, "three workers are there")
    etcd = mesh.container("etcd")
    status, _ = etcd.exec_run(["etcdctl", "--endpoints=https://127.0.0.1:2379", "get", "/penstock/", "--prefix"])
    assert status != 0, "etcd asks for an identity"
    shown = mesh.container("scheduler").exec_run(["cat", "/identity/authority/ca-key.pem"])
    assert shown.exit_code != 0
    renewed = mesh.run("run", "--rm", "-T", "identities").stdout
    assert renewed.count("is good") == renewed.count("spiffe://")


def test_containers_are_confined(mesh: ComposedMesh) -> None:
    for service in ("frontend", "scheduler", "worker-0", "etcd"):
        written = mesh.container(service).exec_run(["sh", "-c", "id -u; touch /opt/x 2>&1"])
        assert written.exit_code != 0, service
        assert written.output.startswith(b"10001"), service


@pytest.mark.parametrize("how", ["killed", "frozen", "cut off"])
def test_no_token_is_lost_with_a_container(mesh: ComposedMesh, expected: list[str], how: str) -> None:
    worker = mesh.container("worker-0")
    networks = list(worker.attrs["NetworkSettings"]["Networks"])
    network = mesh.client.networks.get(networks[0])

    def disturb() -> None:
        if how == "killed":
            worker.kill()
        elif how == "frozen":
            worker.pause()
        else:
            network.disconnect(worker, force=True)

    try:
        assert disturbed(mesh.url, disturb) == expected
    finally:
        worker.reload()
        if how == "killed":
            worker.start()
        elif how == "frozen":
            worker.unpause()
        else:
            network.connect(worker, aliases=["worker-0"])
    mesh.wait_until_healthy("worker-0")
    eventually(lambda: workers_up(mesh) == 3, 60, "it is back")


def test_streams_outlive_their_control_plane_and_its_store(mesh: ComposedMesh, expected: list[str]) -> None:
    down = [mesh.container(service) for service in ("scheduler", "monitor", "etcd")]

    def disturb() -> None:
        for container in down:
            container.kill()

    assert disturbed(mesh.url, disturb) == expected
    for container in reversed(down):
        container.start()
    mesh.wait_until_healthy("etcd", "monitor", "scheduler")
    assert [streamed(mesh.url, number) for number in range(2)] == expected[:2]


def test_a_worker_is_rolled_to_another_image_under_load(mesh: ComposedMesh, expected: list[str]) -> None:
    before = mesh.container("worker-1").id

    def roll() -> None:
        rolled = mesh.run("up", "-d", "--no-deps", "--force-recreate", "worker-1")
        assert rolled.returncode == 0

    assert disturbed(mesh.url, roll) == expected
    mesh.wait_until_healthy("worker-1")
    assert mesh.container("worker-1").id != before


@pytest.mark.parametrize("image", MAX_IMAGE_BYTES)
def test_images_stay_small(mesh: ComposedMesh, image: str) -> None:
    base = mesh.client.images.get("python:3.11-slim").attrs["Size"]
    assert mesh.client.images.get(f"penstock/{image}").attrs["Size"] - base < MAX_IMAGE_BYTES[image]
