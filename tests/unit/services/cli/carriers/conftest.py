from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.carriers.container import ContainerSettings
from services.cli.carriers.container_launcher import ContainerLauncher
from services.cli.carriers.docker_engine import DockerEngine
from tests.unit.services.cli.carriers.fake_docker import IMAGE, FakeDocker


@pytest.fixture
async def docker(tmp_path: Path) -> AsyncIterator[FakeDocker]:
    fake = FakeDocker(tmp_path / "docker.sock")
    async with fake.serve():
        yield fake


@pytest.fixture
async def launcher(docker: FakeDocker) -> AsyncIterator[ContainerLauncher]:
    engine = DockerEngine(docker.address)
    launcher = ContainerLauncher(engine, ContainerSettings("m", "/run/m", IMAGE, "7:8", {}))
    yield launcher
    await launcher.close()
    await engine.close()
