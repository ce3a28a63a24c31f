"""A mesh of one's own to break: `penstock up` as a child process."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from mesh.errors import PeerUnavailable
from mesh.parent_death import PARENT_VARIABLE
from mesh.run_file import read_run_file, run_dir

POLL_S: Final = 0.05
STOP_TIMEOUT_S: Final = 30.0
CHAOS_MODEL: Final = "demo-large"


@asynccontextmanager
async def own_mesh(
    engine: str, workers: int, ready_timeout_s: float, *, prefill: int = 0, decode: int = 0
) -> AsyncIterator[tuple[str, str]]:
    """Yields the URLs of its endpoint and of its state store. Beside the workers there are instances for `prefill` and
    `decode` only. Raises PeerUnavailable if it does not come up."""
    name, port = f"chaos-{os.getpid()}", _free_port()
    command = [sys.executable, "-m", "services.cli.main", "up", "--name", name, "--port", str(port)]
    command += ["--engine", engine, "--workers", str(workers), "--model", CHAOS_MODEL]
    command += ["--prefill", str(prefill), "--decode", str(decode)]
    if engine == "vllm":
        # Other types let the batch that a request happens to share decide between near-equal tokens.
        command += ["--engine-option", "dtype=float32"]
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
            yield running.http_url, running.store_url
        finally:
            await _stop(process)
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
