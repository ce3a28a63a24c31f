"""A mesh of one's own to break: `penstock up` as a child process."""

import asyncio
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mesh.errors import PeerUnavailable
from mesh.parent_death import PARENT_VARIABLE
from mesh.run_file import RunFile, read_run_file, run_dir

POLL_S: Final = 0.05
STOP_TIMEOUT_S: Final = 30.0
MAX_TRIES: Final = 50
PORTS: Final = range(16_384, 32_700)
"""Below those that the kernel gives to outgoing connections: the frontend binds its port seconds after it was chosen,
and one of those is taken by then now and then."""
CHAOS_MODEL: Final = "demo-large"


@dataclass(frozen=True, slots=True)
class TemporaryMesh:
    """Engine, processes and options of the mesh that `penstock chaos` brings up for itself."""

    engine: str
    workers: int
    frontends: int = 1
    options: tuple[str, ...] = ()
    """More ones of `penstock up`."""


@asynccontextmanager
async def temporary_mesh(
    kind: TemporaryMesh, ready_timeout_s: float, keep_logs: Path | None = None
) -> AsyncIterator[RunFile]:
    """Yields what the mesh tells of itself. The logs of its processes go to the folder `keep_logs`, if any, and are
    deleted otherwise. Raises PeerUnavailable if it does not come up."""
    name, port = f"chaos-{os.getpid()}", free_ports(kind.frontends)
    command = [sys.executable, "-m", "services.cli.main", "up", "--mesh", name, "--port", str(port)]
    command += ["--engine", kind.engine, "--workers", str(kind.workers), "--model", CHAOS_MODEL]
    command += ["--frontends", str(kind.frontends), "--ready-timeout-s", str(ready_timeout_s), *kind.options]
    if kind.engine == "vllm":
        # Other types let the batch that a request happens to share decide between near-equal tokens.
        command += ["--engine-arg", "dtype=float32"]
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder:
        output_path = Path(folder) / "up.log"
        with output_path.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, env={**os.environ, PARENT_VARIABLE: str(os.getpid())}
            )
        try:
            await _wait_until_serving(process, output_path.read_text, ready_timeout_s)
            running = read_run_file(name)
            if running is None:
                raise PeerUnavailable(f"the mesh {name} ended right after its start")
            yield running
        finally:
            await _stop(process)
            if keep_logs is not None:
                shutil.copytree(run_dir() / name / "logs", keep_logs, dirs_exist_ok=True)
                shutil.copy(output_path, keep_logs / "up.log")
            shutil.rmtree(run_dir() / name, ignore_errors=True)


async def _wait_until_serving(process: asyncio.subprocess.Process, story: Callable[[], str], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while "serving at" not in story():
                if process.returncode is not None:
                    raise PeerUnavailable(f"penstock up ended with {process.returncode}: {story()}")
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise PeerUnavailable(f"the mesh does not serve after {timeout_s:g} s: {story()}") from None


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ctrl-C, and a second one for what does not drain."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        process.send_signal(number)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            continue


def free_ports(count: int = 1) -> int:
    """The first of `count` consecutive ports that nobody listens on just now. Raises PeerUnavailable."""
    for _ in range(MAX_TRIES):
        first = random.SystemRandom().choice(PORTS)
        with ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise PeerUnavailable(f"this machine has no {count} free ports in a row")
