"""`penstock up` has its instances started by the carrier that was asked for, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.errors import ConfigurationError, DockerError
from services.cli.carriers.carried import DOCKER, PROCESSES, launcher_on
from services.cli.supervisor.launcher import SystemLauncher
from services.cli.supervisor.local_mesh import LocalMesh, ModelSpec, own_workers
from tests.unit.services.cli.carriers.fake_docker import IMAGE, FakeDocker

pytestmark = pytest.mark.live

MESH = LocalMesh(
    models=(ModelSpec("chat", Path("/models/chat"), 2),),
    engine="simulated",
    engine_args=(),
    store_url="penstock://127.0.0.1:1",
    http_host="127.0.0.1",
    http_port=8000,
)


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


async def test_instances_are_started_by_the_carrier(
    docker: FakeDocker, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker.address)
    said: list[str] = []
    first, second = own_workers(MESH)
    async with launcher_on(DOCKER, IMAGE, "m", MESH, run_folder, said.append) as launcher:
        await launcher.launch(first)
        left = docker.containers.copy()
        assert set(left) == {"penstock-m-chat-0"}
        assert launcher.log_of("frontend") == str(run_folder / "frontend.log")
        assert launcher.log_of("chat-7") == "docker logs penstock-m-chat-7", "one that a plan has started"
    assert not docker.containers, "nothing is left of a mesh that ends"
    docker.containers.update(left)
    async with launcher_on(DOCKER, IMAGE, "m", MESH, run_folder, said.append) as launcher:
        assert said == ["removed containers that a former mesh m had left running: 1"]
        await launcher.launch(second)
        assert docker.running() == {"penstock-m-chat-1"}


async def test_processes_need_no_engine(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    async with launcher_on(PROCESSES, IMAGE, "m", MESH, run_folder, print) as launcher:
        assert isinstance(launcher, SystemLauncher)
    with pytest.raises(DockerError, match="no Docker engine answers"):
        async with launcher_on(DOCKER, IMAGE, "m", MESH, run_folder, print):
            pytest.fail("there is none")


async def test_what_containers_do_not_share_is_refused(run_folder: Path) -> None:
    mesh = replace(MESH, worker_options=("--host-kv", "1GiB", "--host-kv-dir", "/dev/shm/x"))
    with pytest.raises(ConfigurationError, match="instances do not share what --host-kv names"):
        async with launcher_on(DOCKER, IMAGE, "m", mesh, run_folder, print):
            pytest.fail("it is refused")
