"""Containers are kept running, drained and replaced by the supervisor of processes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.manager import DeploymentManager, StartInstance
from controlplane.model.autoscale_record import ScaleRecord
from mesh.errors import ConfigurationError
from mesh.exit_status import ExitStatus
from mesh.membership import Directory
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from services.cli.carriers.container import OWNER_LABEL, ContainerSettings
from services.cli.carriers.container_launcher import GONE, ContainerLauncher
from services.cli.carriers.docker_engine import DockerEngine
from services.cli.supervisor.deployer import Deployer
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.process_actuator import ProcessActuator
from services.cli.supervisor.supervisor import Supervisor
from tests.unit.services.cli.carriers.fake_docker import FakeDocker
from tests.unit.services.operator.mesh_on_cluster import Workers

pytestmark = pytest.mark.live

WAIT_S = 20.0
FATAL = json.dumps({"level": "error", "message": "it ends", "error": "no such model"})


def spec(name: str) -> ProcessSpec:
    return ProcessSpec(name, "worker", ("--member-id", name))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  what the engine's side does offers nothing to await
            await asyncio.sleep(0.005)


async def test_one_that_dies_is_started_again_and_its_reason_told(
    docker: FakeDocker, launcher: ContainerLauncher
) -> None:
    said: list[str] = []
    supervisor = Supervisor(launcher, said.append)
    await supervisor.add(spec("a"))
    first = docker.containers["penstock-m-a"]
    docker.end("penstock-m-a", ExitStatus.RESTART)
    await until(lambda: docker.containers.get("penstock-m-a", first).id != first.id)
    await until(lambda: docker.running() == {"penstock-m-a"})
    docker.end("penstock-m-a", 1, f"starting\n{FATAL}\nbye\n")
    await until(lambda: len(said) == 2)
    assert said[1] == "a ended (status 1: no such model); starting it again in 0.5 s"
    await supervisor.stop()


async def test_what_was_drained_stays_away_and_keeps_its_log(docker: FakeDocker, launcher: ContainerLauncher) -> None:
    supervisor = Supervisor(launcher, print)
    await supervisor.add(spec("a"))
    docker.end("penstock-m-a", ExitStatus.DRAINED, "done\n")
    await until(lambda: not supervisor.names())
    assert docker.containers["penstock-m-a"].status == "exited"
    assert launcher.log_of("a") == "docker logs penstock-m-a"


async def test_exactly_the_chosen_one_is_asked_to_end(docker: FakeDocker, launcher: ContainerLauncher) -> None:
    supervisor = Supervisor(launcher, print)
    for name in ("a", "b"):
        await supervisor.add(spec(name))
    removing = asyncio.create_task(supervisor.remove("a"))
    await until(lambda: docker.containers["penstock-m-a"].signals == ["SIGTERM"])
    assert not removing.done(), "it drains"
    docker.end("penstock-m-a", 0)
    await removing
    assert docker.running() == {"penstock-m-b"}
    assert not docker.containers["penstock-m-b"].signals
    await supervisor.let_go()


async def test_one_that_does_not_end_is_killed(docker: FakeDocker, launcher: ContainerLauncher) -> None:
    supervisor = Supervisor(launcher, print)
    await supervisor.add(spec("a"))
    await supervisor.remove("a", 0.0)
    assert docker.containers["penstock-m-a"].signals[-1] == "SIGKILL"
    assert not docker.running()


async def test_what_cannot_start_leaves_no_container(docker: FakeDocker, launcher: ContainerLauncher) -> None:
    docker.refuses_to_start = "could not select device driver nvidia"
    with pytest.raises(OSError, match="device driver nvidia"):
        await launcher.launch(spec("a"))
    assert not docker.containers


async def test_a_missing_image_is_told(docker: FakeDocker) -> None:
    engine = DockerEngine(docker.address)
    launcher = ContainerLauncher(engine, ContainerSettings("m", "/run/m", "nope", "7:8", {}))
    with pytest.raises(OSError, match="No such image: nope"):
        await launcher.launch(spec("a"))
    await launcher.close()
    await engine.close()


async def test_a_container_of_somebody_else_is_left_alone(docker: FakeDocker, launcher: ContainerLauncher) -> None:
    await launcher.launch(spec("a"))
    docker.containers["penstock-m-a"].config["Labels"][OWNER_LABEL] = "/run/other/m"
    with pytest.raises(OSError, match="there is another container penstock-m-a"):
        await launcher.launch(spec("a"))
    await launcher.close()
    assert docker.running() == {"penstock-m-a"}
    assert await launcher.sweep() == 0


async def test_what_a_dead_supervisor_has_left_is_removed(docker: FakeDocker, launcher: ContainerLauncher) -> None:
    for name in ("a", "b"):
        await launcher.launch(spec(name))
    docker.end("penstock-m-b", 1)
    assert await launcher.sweep() == 1
    assert not docker.containers


async def test_what_has_failed_keeps_its_log_when_the_mesh_ends(
    docker: FakeDocker, launcher: ContainerLauncher
) -> None:
    for name in ("a", "b", "c"):
        await launcher.launch(spec(name))
    docker.end("penstock-m-a", 0)
    docker.end("penstock-m-b", 2)
    await launcher.close()
    assert set(docker.containers) == {"penstock-m-b"}


async def test_an_engine_that_falters_is_asked_again(docker: FakeDocker, launcher: ContainerLauncher) -> None:
    process = await launcher.launch(spec("a"))
    docker.failures = 2
    docker.end("penstock-m-a", 137, out_of_memory=True)
    assert await process.wait() == process.returncode == 137
    assert process.exit_reason() == "it was out of memory (OOMKilled)"


async def test_one_that_somebody_removed_is_gone(docker: FakeDocker, launcher: ContainerLauncher) -> None:
    process = await launcher.launch(spec("a"))
    container = docker.containers.pop("penstock-m-a")
    container.ended.set()
    assert await process.wait() == GONE
    assert process.exit_reason() == "somebody removed its container"


async def test_without_an_engine_the_user_is_told_what_to_do(tmp_path: Path) -> None:
    engine = DockerEngine(f"unix://{tmp_path}/none.sock")
    launcher = ContainerLauncher(engine, ContainerSettings("m", "/run/m", "i", "7:8", {}))
    with pytest.raises(OSError, match=r"no Docker engine answers at unix://.*set DOCKER_HOST"):
        await launcher.launch(spec("a"))
    await engine.close()
    with pytest.raises(ConfigurationError, match="tcp://far:2375"):
        DockerEngine("tcp://far:2375")


async def test_scales_act_on_containers(docker: FakeDocker, launcher: ContainerLauncher) -> None:
    """Up by one, then down by one: the one that the record names, when it has drained."""
    supervisor, workers = Supervisor(launcher, print), Workers()
    store = EmbeddedStore(StoreHost(SystemClock(), SystemEntropy()))
    for name in ("chat-0", "chat-1"):
        await supervisor.add(spec(name))
        workers.join(name)
    running = {"chat": dict.fromkeys(("chat-0", "chat-1"), (1, 1))}
    pool = GpuPool(0)
    for name in running["chat"]:
        pool.take(name, 1)
    manager = DeploymentManager("here", pool, 300.0, running, {"chat": (1, 1)})

    def make_spec(instance: StartInstance) -> ProcessSpec:
        return spec(instance.name)

    actuator = ProcessActuator(supervisor, cast(Directory, workers), make_spec)
    deployer = Deployer(manager, store, actuator, 600.0, SystemClock().now_s, print)
    deployer.serve({"chat": (1, 1)}, {"chat": ScaleRecord("chat", 3)})
    await deployer.turn()
    assert docker.running() == {f"penstock-m-chat-{number}" for number in range(3)}
    workers.join("chat-2")
    assert (await deployer.turn()).is_reached
    deployer.serve({"chat": (1, 1)}, {"chat": ScaleRecord("chat", 2, ("chat-1",))})
    await deployer.turn()
    await until(lambda: docker.containers["penstock-m-chat-1"].signals == ["SIGTERM"])
    docker.end("penstock-m-chat-1", 0)
    await until(lambda: "chat-1" not in supervisor.names())
    workers.leave("chat-1")
    assert docker.running() == {"penstock-m-chat-0", "penstock-m-chat-2"}
    await supervisor.let_go()
    await store.close()
