"""`penstock up` gives up and stops in words, whatever it was doing."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from mesh.errors import DockerError
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from services.cli.supervisor.launcher import ProcessSpec, SystemLauncher
from services.cli.supervisor.local_mesh import LocalMesh
from services.cli.supervisor.supervisor import Supervisor
from services.cli.up import _until_serving, command
from tests.mesh.running_mesh import free_port

pytestmark = pytest.mark.live

NO_MESH = LocalMesh(
    models=(), engine="simulated", engine_args=(), store_url="embedded:", http_host="127.0.0.1", http_port=8000
)


async def _serving(supervisor: Supervisor, timeout_s: float, stop_asked: asyncio.Event) -> bool:
    store = EmbeddedStore(StoreHost(SystemClock(), SystemEntropy()))
    async with asyncio.timeout(20.0):
        return await _until_serving(store, NO_MESH, supervisor, timeout_s, stop_asked)


async def test_ctrl_c_before_it_serves_ends_quietly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop_asked = asyncio.Event()
    stop_asked.set()
    assert not await _serving(Supervisor(SystemLauncher(tmp_path), print), 20.0, stop_asked)
    assert capsys.readouterr().err == ""


async def test_too_late_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not await _serving(Supervisor(SystemLauncher(tmp_path), print), 0.01, asyncio.Event())
    assert "not serving within 0.01 s" in capsys.readouterr().err


@pytest.mark.process
async def test_a_process_that_is_given_up_ends_the_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(SystemLauncher(tmp_path), print)
    await supervisor.add(ProcessSpec("m", "monitor", ("--no-such-option",)))
    try:
        assert not await _serving(supervisor, 20.0, asyncio.Event())
    finally:
        await supervisor.stop()
    told = capsys.readouterr()
    assert "given up" in told.err
    assert "--no-such-option" in told.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--port", "99999"], "--port"),
        (["--policy", "nope"], "lmetric"),
        (["--mesh", "a/b"], "no name of a mesh"),
        (["--ready-timeout-s", "-1"], "--ready-timeout-s"),
    ],
)
def test_wrong_options_start_nothing(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(command, ["--engine", "simulated", *arguments])
    assert result.exit_code == 2
    assert reason in result.output


def test_a_mesh_whose_carrier_is_not_there_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    result = CliRunner().invoke(command, ["--engine", "simulated", "--on", "docker", "--port", str(free_port())])
    assert isinstance(result.exception, DockerError), result.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "no run file, no identity"
