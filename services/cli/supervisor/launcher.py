"""How a supervisor starts processes and what it then can do with them; a simulation starts others."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mesh.parent_death import PARENT_VARIABLE

log = logging.getLogger(__name__)

LOG_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the mesh: what `penstock serve` is called with."""

    name: str
    role: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Launched(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its process id; 0 for one that runs on another machine."""

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for the signal that ended it; None while it runs."""

    @property
    def waits_for(self) -> str:
        """What it has no place without, in words for the user; "" once it runs."""

    async def wait(self) -> int:
        """Return its exit status once it has ended."""

    def terminate(self) -> None:
        """Ask it to drain and end; it runs still."""

    def kill_group(self) -> None:
        """Kill it with all that it started, or what it has left behind; no effect where nothing is left."""

    def exit_reason(self) -> str:
        """What it said last of why it ended; "" if it said nothing."""


class Launcher(Protocol):
    """Starts processes of the mesh."""

    async def launch(self, spec: ProcessSpec) -> Launched:
        """Returns once it runs. Raises OSError where it cannot be started."""

    def log_of(self, name: str) -> str:
        """Where the processes of this name leave their logs, for messages."""


class SystemLauncher:
    """Starts `penstock serve` as child processes, each with a log file in `log_dir`."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)

    async def launch(self, spec: ProcessSpec) -> Launched:
        """In a session of its own: Ctrl-C in the terminal reaches the supervisor alone, which then drains it."""
        command = (sys.executable, "-m", "services.cli.main", "serve", spec.role, *spec.arguments)
        environment = {**os.environ, **spec.environment, PARENT_VARIABLE: str(os.getpid())}
        log_path = self._log_path(spec.name)
        with log_path.open("ab") as log_file:
            begins_at = log_file.tell()
            process = await asyncio.create_subprocess_exec(
                *command, stdout=log_file, stderr=log_file, env=environment, start_new_session=True
            )
        return _ChildProcess(process, log_path, begins_at)

    def log_of(self, name: str) -> str:
        """Path of the log file; processes of the same name append to it."""
        return str(self._log_path(name))

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"


class _ChildProcess:
    def __init__(self, process: asyncio.subprocess.Process, log_path: Path, log_begins_at: int) -> None:
        self._process = process
        self._log_path = log_path
        self._log_begins_at = log_begins_at

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def waits_for(self) -> str:
        return ""

    async def wait(self) -> int:
        return await self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("process group is gone already", extra={"pid": self.pid})

    def exit_reason(self) -> str:
        try:
            with self._log_path.open("rb") as log_file:
                end = log_file.seek(0, os.SEEK_END)
                log_file.seek(max(self._log_begins_at, end - LOG_TAIL_BYTES))
                return exit_reason(log_file.read(LOG_TAIL_BYTES).decode(errors="replace"))
        except OSError as error:
            return f"its log cannot be read: {error}"


def exit_reason(log_tail: str) -> str:
    """The last error in the lines, without its traceback; "" where they hold none.

    Lines are a role's JSON log, or what the command line says of wrong options.
    """
    for line in reversed(log_tail.splitlines()):
        if reason := _reason(line):
            return reason
    return ""


def _reason(line: str) -> str:
    for beginning in ("Error: ", "penstock: "):
        if line.startswith(beginning):
            return line.removeprefix(beginning).strip()
    try:
        record = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(record, dict) or record.get("level") not in ("error", "critical"):
        return ""
    traceback = str(record.get("traceback", "")).strip()
    if traceback:
        # `package.module.Class: message`; who starts a mesh has no use for the module.
        name, _, message = traceback.splitlines()[-1].partition(": ")
        return f"{name.rpartition('.')[2]}: {message}" if message else name
    return str(record.get("error") or record.get("message", ""))
