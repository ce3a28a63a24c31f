"""Which carrier starts what: instances go to the one that was chosen, all else stays a process of this machine."""

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from mesh.errors import ConfigurationError
from mesh.run_file import run_dir
from services.cli.carriers.container import ContainerSettings
from services.cli.carriers.container_launcher import ContainerLauncher
from services.cli.carriers.docker_engine import DockerEngine, engine_address
from services.cli.carriers.ray_cluster import RayCluster, cluster_at, is_client_address
from services.cli.carriers.ray_launcher import RayLauncher, RaySettings
from services.cli.supervisor.launcher import Launched, Launcher, ProcessSpec, SystemLauncher
from services.cli.supervisor.local_mesh import LocalMesh, own_workers, processes

PROCESSES, DOCKER, RAY = "processes", "docker", "ray"
CARRIERS: Final = (PROCESSES, DOCKER, RAY)
CPU_IMAGE, GPU_IMAGE = "penstock/worker-cpu", "penstock/worker-gpu"
_OF_THIS_MACHINE: Final = ("--host-kv", "--disk-kv")
"""Options of workers that share memory or disk of this machine, which no carrier gives them."""


class CarriedInstances:
    """Implements `services.cli.supervisor.launcher.Launcher` by two others."""

    def __init__(self, here: Launcher, carrier: Launcher, names_here: frozenset[str]) -> None:
        """`names_here`: of all that the carrier does not start."""
        self._here = here
        self._carrier = carrier
        self._names_here = names_here

    async def launch(self, spec: ProcessSpec) -> Launched:
        return await self._of(spec.name).launch(spec)

    def log_of(self, name: str) -> str:
        return self._of(name).log_of(name)

    def _of(self, name: str) -> Launcher:
        return self._here if name in self._names_here else self._carrier


def checked_carrier(text: str) -> str:
    """One of `CARRIERS`, or ray://HOST:PORT. Raises `ConfigurationError` for any other."""
    if text not in CARRIERS and not is_client_address(text):
        raise ConfigurationError(f"--on {text}: {', '.join(CARRIERS)} or ray://HOST:PORT are possible")
    return text


@asynccontextmanager
async def ray_cluster_on(carrier: str, name: str, log_dir: Path) -> AsyncIterator[RayCluster | None]:
    """The Ray cluster of the mesh called `name`, connected; None where the carrier is another. Raises `PenstockError`
    where it cannot be had."""
    if carrier != RAY and not is_client_address(carrier):
        yield None
        return
    # Somebody else's mesh of this name, on this cluster, is another one.
    namespace = f"penstock:{socket.gethostname()}:{run_dir()}/{name}"
    cluster = cluster_at("" if carrier == RAY else carrier, namespace, log_dir / "ray.log")
    try:
        await cluster.connect()
        yield cluster
    finally:
        await cluster.close()


@asynccontextmanager
async def launcher_on(
    carrier: str,
    image: str,
    name: str,
    mesh: LocalMesh,
    log_dir: Path,
    say: Callable[[str], None],
    cluster: RayCluster | None = None,
) -> AsyncIterator[Launcher]:
    """What starts the processes of the mesh called `name`, its instances on this carrier: of this image, or on this
    cluster. `say` hears of what a former run has left behind. Raises `PenstockError` where it cannot be had."""
    here = SystemLauncher(log_dir)
    if carrier == PROCESSES:
        yield here
        return
    if kept := [option for option in mesh.worker_options if option in _OF_THIS_MACHINE]:
        raise ConfigurationError(f"--on {carrier}: instances do not share what {kept[0]} names; leave it out")
    if cluster is not None:
        actors = RayLauncher(cluster, RaySettings(name, cluster.namespace, dict(os.environ)), say)
        if left := await actors.sweep():
            say(f"ended Ray actors that a former mesh {name} had left running: {left}")
        try:
            yield CarriedInstances(here, actors, names_here(mesh))
        finally:
            await actors.close()
        return
    settings = ContainerSettings(name, f"{run_dir()}/{name}", image, f"{os.getuid()}:{os.getgid()}", dict(os.environ))
    engine = DockerEngine(engine_address())
    containers = ContainerLauncher(engine, settings)
    try:
        if left := await containers.sweep():
            say(f"removed containers that a former mesh {name} had left running: {left}")
        try:
            yield CarriedInstances(here, containers, names_here(mesh))
        finally:
            await containers.close()
    finally:
        await engine.close()


def names_here(mesh: LocalMesh) -> frozenset[str]:
    """Of all processes that have no engine of their own."""
    return frozenset(spec.name for spec in processes(mesh)) - {spec.name for spec in own_workers(mesh)}
