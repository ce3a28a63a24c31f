"""Nodes of a Ray cluster as processes of this machine, each with an address of the loopback of its own."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from tests.in_time import eventually

ROOT: Final = Path(__file__).resolve().parents[2]
RAY: Final = Path(sys.executable).with_name("ray")
PORT, CLIENT_PORT = 16379, 16380
START_S: Final = 90.0
OBJECT_STORE_BYTES: Final = 80_000_000
"""The least that Ray takes."""
FIRST_WORKER_PORT, WORKER_PORTS = 21_000, 100


class RayNode:
    """A head, or a node that joins one."""

    def __init__(self, number: int, folder: Path, cpus: int, head: "RayNode | None" = None) -> None:
        """`number`: 1 and more, the last part of its address."""
        self.host = f"127.0.0.{number + 1}"
        ports = FIRST_WORKER_PORT + number * WORKER_PORTS
        where = ("--head", "--port", str(PORT), "--ray-client-server-port", str(CLIENT_PORT))
        where = (*where, "--include-dashboard", "false", "--temp-dir", str(folder))
        if head is not None:
            where = ("--address", f"{head.host}:{PORT}")
        command = (
            *(str(RAY), "start", "--block", "--disable-usage-stats", *where, "--node-ip-address", self.host),
            *("--num-cpus", str(cpus), "--num-gpus", "0", "--object-store-memory", str(OBJECT_STORE_BYTES)),
            *("--min-worker-port", str(ports), "--max-worker-port", str(ports + WORKER_PORTS - 1)),
        )
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'generated'}", "RAY_DISABLE_IMPORT_WARNING": "1"}
        environment.pop("RAY_ADDRESS", None)
        self._output = folder / f"node-{number}.log"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def wait_until_started(self) -> None:
        def started() -> bool:
            said = self._output.read_text()
            assert self._process.poll() is None, said
            return "Ray runtime started" in said

        eventually(started, START_S, f"the Ray node {self.host} runs")

    def processes(self, *words: str) -> dict[psutil.Process, list[str]]:
        """Command lines of those of this node that run and have all these words in them."""
        lines = {each: _command_line(each) for each in self._all()}
        return {each: line for each, line in lines.items() if set(words) <= set(line)}

    def kill(self) -> None:
        """As when the machine loses its power: all at once, without a word."""
        found = self._all()
        for each in found:  # none may see the other die and do something about it
            _signalled(each, signal.SIGSTOP)
        for each in found:
            _signalled(each, signal.SIGKILL)
        self._process.wait(30)
        psutil.wait_procs(found, 30)

    def _all(self) -> list[psutil.Process]:
        if self._process.poll() is not None:
            return []
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _signalled(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
