"""A real mesh of real processes, brought up by the very command that users type."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest.mock import patch

from services.cli.connection import AS_OPERATOR
from services.cli.main import main
from tests.in_time import eventually

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
HELD_PACE = 10.0
"""A step of a simulated engine takes a tenth of a second then: short enough for every deadline of a move."""
_LEFTOVER = re.compile(
    r"Task was destroyed|is already running|asynchronous generator|never retrieved|never awaited|Exception ignored"
)
PENSTOCK = (sys.executable, "-m", "services.cli.main")
_LOW, _HIGH = 16_384, 32_768
_PER_PROCESS = (_HIGH - _LOW) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_FIRST = _LOW + _PER_PROCESS * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = range(_FIRST, _FIRST + _PER_PROCESS)
"""Below those of outgoing connections (net.ipv4.ip_local_port_range), and other ones in each process of pytest-xdist:
vLLM binds a port half a minute after it was chosen, and one of those was gone by then."""
_given: set[int] = set()


def free_port() -> int:
    """A port on which nobody listens, and that nobody else in this process was given."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port


class RunningMesh:
    """`penstock up` in a process of its own, with a run directory and a port of its own."""

    def __init__(
        self,
        run_dir: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        asks_who: bool = False,
        cwd: Path | None = None,
    ) -> None:
        """`asks_who`: processes have identities, as by default; tests that speak with them by plain gRPC need none.
        `cwd`: where relative paths begin."""
        self.key = "none"
        """What its readers present, where the mesh asks for API keys."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {**os.environ, "XDG_RUNTIME_DIR": str(run_dir), **(environment or {})}
        self._environment.pop("PENSTOCK_STORE", None)
        self.output_path = run_dir / "up.log"
        self.log_dir = run_dir / "penstock" / "default" / "logs"
        self._pace_path = run_dir / "pace"
        if "simulated" in arguments:
            arguments += ("--engine-arg", f"pace_file={self._pace_path}")
        with self.output_path.open("wb") as output:
            command = (*PENSTOCK, "up", "--port", str(self.port), *(() if asks_who else ("--insecure",)), *arguments)
            self.process = subprocess.Popen(command, env=self._environment, cwd=cwd, stdout=output, stderr=output)

    def wait_until_serving(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return once `penstock up` says that it serves."""

        def serving() -> bool:
            assert self.process.poll() is None, f"penstock up ended: {self.story()}"
            return "serving at" in self.output_path.read_text()

        eventually(serving, timeout_s, lambda: f"the mesh serves\n{self.story()}")

    @contextmanager
    def paced(self, pace: float) -> Iterator[None]:
        """Each step of its simulated engines takes so many times as long in the block."""
        fresh = self._pace_path.with_suffix(".new")
        fresh.write_text(f"{pace:g}")
        fresh.replace(self._pace_path)
        try:
            yield
        finally:
            self._pace_path.unlink()

    def held(self) -> AbstractContextManager[None]:
        """An answer of 200 tokens that begins in the block goes on for 20 s more, and ends within 2 s after it."""
        return self.paced(HELD_PACE)

    def story(self) -> str:
        """What the mesh printed and logged, for a failing test's message."""
        logs = [f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.log_dir.glob("*.log"))]
        return "\n".join([self.output_path.read_text(), *logs])

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a `penstock` command that looks or orders, in this process: it takes milliseconds, and a process of its
        own takes a second of CPU to start, while streams run on.

        Beside an event loop of the test's own it is a process after all: gRPC serves the loop of one thread well.
        """
        if threading.current_thread() is not threading.main_thread() or asyncio._get_running_loop() is not None:
            return self.shell(*arguments)
        output, errors = (TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
        status = 0
        with patch.dict(os.environ, self._environment, clear=True), redirect_stdout(output), redirect_stderr(errors):
            try:
                main(arguments)
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else bool(ended.code)
            finally:
                AS_OPERATOR.use("")
        printed = (each.buffer.getvalue().decode() for each in (output, errors))
        return subprocess.CompletedProcess(arguments, status, *printed)

    def shell(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a `penstock` command as from another shell."""
        return subprocess.run(
            (*PENSTOCK, *arguments), env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start a `penstock` command that runs until it is stopped; its output is added to that of the mesh."""
        with self.output_path.open("ab") as output:
            return subprocess.Popen((*PENSTOCK, *arguments), env=self._environment, stdout=output, stderr=output)

    def status(self) -> dict[str, Any]:
        """`penstock status --json`."""
        result = self.cli("status", "--json")
        assert result.returncode == 0, result.stderr
        status: dict[str, Any] = json.loads(result.stdout)
        return status

    def pid(self, member_id: str) -> int:
        """The process id of a member, once it has announced itself: what began again may be about to."""

        def announced() -> list[int]:
            return [int(each["attributes"]["pid"]) for each in self.status()["roles"] if each["member_id"] == member_id]

        (pid,) = eventually(announced, 60, f"{member_id} is announced")
        return int(pid)

    def kill(self, member_id: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a member's process."""
        os.kill(self.pid(member_id), number)

    def instances(self) -> dict[str, str]:
        """State of each instance in the scheduler's snapshot."""
        return {instance["instance_id"]: instance["state"] for instance in self.status()["instances"]}

    def stop(self) -> int:
        """Ctrl-C, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        status = self.process.wait(STOP_TIMEOUT_S)
        left = "\n".join(self.leftovers())
        assert not left, f"something was left to the garbage collector, or died unheard:\n{left}"
        return status

    def leftovers(self) -> list[str]:
        """Lines of the mesh's logs that tell of tasks and generators that nobody ended."""
        paths = [self.output_path, *sorted(self.log_dir.glob("*"))]
        lines = (f"{path.name}: {line}" for path in paths for line in path.read_text(errors="replace").splitlines())
        return [line for line in lines if _LEFTOVER.search(line)]

    def cut(self) -> None:
        """Whatever a failed test left behind."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)
