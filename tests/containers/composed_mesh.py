"""The Compose file as Docker runs it: simulated engines in the frontend's image, so that nothing needs vLLM."""

import os
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml
from docker import DockerClient
from docker.models.containers import Container

from tests.deploy.compose_file import DEPLOY, load_compose
from tests.in_time import eventually
from tests.mesh.running_mesh import free_port

COMPOSE: Final = load_compose()["services"]
PROJECT: Final = "penstock-test"
LEFT_OUT: Final = ("prometheus", "grafana")
"""Whose images are others'."""
COMMAND_S: Final = 1800.0
"""Of one command of Compose: it may build images."""
HEALTHY_S: Final = 300.0


def compose_command(client: DockerClient) -> list[str]:
    """The plugin, or the program that came before it, of which Debian has 1.29."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]


class ComposedMesh:
    """deploy/compose.yaml under a project name of its own, with the changes that a test needs laid over it."""

    def __init__(self, client: DockerClient, folder: Path) -> None:
        self.client = client
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        override = folder / "override.yaml"
        override.write_text(yaml.safe_dump(self._override()))
        files = (DEPLOY / "compose.yaml", override)
        named = [part for file in files for part in ("-f", str(file))]
        self._command = [*compose_command(client), "-p", PROJECT, *named]
        self._environment = {**os.environ, "PENSTOCK_ENGINE": "simulated", "PENSTOCK_PORT": str(self.port)}

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """One command of Compose."""
        return subprocess.run(
            (*self._command, *arguments),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=check,
        )

    def penstock(self, *arguments: str) -> str:
        """What a command of an operator prints."""
        return self.run("run", "--rm", "-T", "cli", *arguments).stdout

    def up(self, *services: str) -> None:
        """Start these services, or all but `LEFT_OUT`, and return when they are healthy."""
        wanted = services or tuple(
            name for name, service in COMPOSE.items() if "profiles" not in service and name not in LEFT_OUT
        )
        started = self.run("up", "-d", *wanted, check=False)
        assert started.returncode == 0, started.stderr[-3000:]
        self.wait_until_healthy(*(name for name in wanted if name != "identities"))

    def wait_until_healthy(self, *services: str) -> None:
        for service in services:
            eventually(lambda name=service: self.health(name) == "healthy", HEALTHY_S, f"{service} is healthy")

    def health(self, service: str) -> str:
        """What Docker says of its container: starting, healthy or unhealthy."""
        return str(self.container(service).attrs["State"]["Health"]["Status"])

    def container(self, service: str) -> Container:
        labels = [f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}"]
        (found,) = self.client.containers.list(all=True, filters={"label": labels})
        return found

    def down(self) -> None:
        self.run("down", "--volumes", "--timeout", "10", check=False)

    def _override(self) -> dict[str, Any]:
        workers = [name for name in COMPOSE if name.startswith("worker-") and "profiles" not in COMPOSE[name]]
        built = COMPOSE["frontend"]["build"]
        return {"services": {name: {"image": "penstock/frontend", "build": built} for name in workers}}
