"""Starts processes, restarts those that end, and leaves none behind."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mesh.parent_death import PARENT_VARIABLE
from mesh.role import EXIT_WRONG_SETTINGS
from mesh.tasks import TaskSet
from services.cli.supervisor.last_words import last_reason
from services.cli.supervisor.restarts import RestartHistory

log = logging.getLogger(__name__)

# These end first, in this order: no new requests, then the engines; the control plane afterwards and all at once.
STOP_ORDER = ("frontend", "worker")
KILL_AFTER_S = 10.0
LOG_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the mesh: what `penstock serve` is called with."""

    name: str
    role: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    spec: ProcessSpec
    process: asyncio.subprocess.Process | None = None
    history: RestartHistory = field(default_factory=RestartHistory)
    stopping: bool = False
    log_begins_at: int = 0
    """Where in the log file the present process began to write."""
    given_up: str = ""
    """Why it is not started again."""


class Supervisor:
    """Keeps the processes that were added running until they are removed, or, for workers, drained.

    `on_event` hears, in words, of every start, end and restart.
    """

    def __init__(self, log_dir: Path, on_event: Callable[[str], None]) -> None:
        self._log_dir = log_dir
        self._on_event = on_event
        self._running: dict[str, _Running] = {}
        self._tasks = TaskSet("supervisor")
        self._gave_up = asyncio.Event()
        log_dir.mkdir(parents=True, exist_ok=True)

    async def add(self, spec: ProcessSpec) -> None:
        """Start a process and keep it running. Raises ValueError for a name that is in use, and OSError."""
        if spec.name in self._running:
            raise ValueError(f"a process called {spec.name!r} is running already")
        entry = _Running(spec)
        self._running[spec.name] = entry
        try:
            await self._start(entry)
        except OSError:
            del self._running[spec.name]
            raise
        self._tasks.spawn(self._watch(entry), name=spec.name)

    async def wait_given_up(self) -> None:
        """Return once a process has been given up: it ended too often, or said at its first start that its settings
        are wrong."""
        await self._gave_up.wait()

    async def remove(self, name: str, kill_after_s: float = KILL_AFTER_S) -> None:
        """Let a process drain and end; kill it after `kill_after_s`. Unknown names are an error (KeyError)."""
        entry = self._running[name]
        entry.stopping = True
        process = entry.process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), kill_after_s)
            except TimeoutError:
                self._on_event(f"{name} did not end within {kill_after_s:g} s and is killed")
                self._kill_group(process)
                await process.wait()
            # What the engine has left behind would keep memory of the GPUs that the next one gets.
            self._kill_group(process)
        self._running.pop(name, None)

    async def stop(self, kill_after_s: float = KILL_AFTER_S) -> None:
        """End all: the frontends, then the workers, then the rest."""
        for role in STOP_ORDER:
            names = [name for name, entry in self._running.items() if entry.spec.role == role]
            await asyncio.gather(*(self.remove(name, kill_after_s) for name in names))
        await asyncio.gather(*(self.remove(name, kill_after_s) for name in list(self._running)))
        await self._tasks.cancel()

    def kill(self) -> None:
        """End all at once, without draining."""
        for entry in self._running.values():
            entry.stopping = True
            if entry.process is not None and entry.process.returncode is None:
                self._kill_group(entry.process)

    def names(self) -> frozenset[str]:
        """Of all that is kept running."""
        return frozenset(self._running)

    def given_up(self) -> dict[str, str]:
        """Those that are not started again although nobody asked them to end, with the last reason, by name."""
        return {name: entry.given_up for name, entry in self._running.items() if entry.given_up}

    def pids(self) -> dict[str, int]:
        """Process ids of those that run now, by name."""
        return {
            name: entry.process.pid
            for name, entry in self._running.items()
            if entry.process is not None and entry.process.returncode is None
        }

    async def _start(self, entry: _Running) -> None:
        spec = entry.spec
        command = (sys.executable, "-m", "services.cli.main", "serve", spec.role, *spec.arguments)
        environment = {**os.environ, **spec.environment, PARENT_VARIABLE: str(os.getpid())}
        with self._log_path(spec.name).open("ab") as log_file:
            entry.log_begins_at = log_file.tell()
            # A session of its own: Ctrl-C in the terminal reaches the supervisor alone, which then drains them.
            entry.process = await asyncio.create_subprocess_exec(
                *command, stdout=log_file, stderr=log_file, env=environment, start_new_session=True
            )

    async def _watch(self, entry: _Running) -> None:
        name = entry.spec.name
        while not entry.stopping:
            assert entry.process is not None
            status = await entry.process.wait()
            if entry.stopping:
                return
            self._kill_group(entry.process)
            if status == 0 and entry.spec.role == "worker":
                # It was drained by `penstock drain`: a worker ends with 0 only when it was asked to.
                self._on_event(f"{name} was drained and has ended; it is not started again")
                del self._running[name]
                return
            if not await self._started_again(entry, status):
                return
            if entry.stopping:  # it was removed in that very moment, when there was nothing to end yet
                self._kill_group(entry.process)
                await entry.process.wait()

    async def _started_again(self, entry: _Running, status: int) -> bool:
        """False where it was removed before, or is given up."""
        reason = _reason_of_end(self._log_path(entry.spec.name), entry.log_begins_at)
        told = f"status {status}: {reason}" if reason else f"status {status}"
        while True:
            delay_s = self._pause_s(entry, status, told)
            if delay_s is None:
                self._gave_up.set()
                return False
            await asyncio.sleep(delay_s)
            if entry.stopping:
                return False
            try:
                await self._start(entry)
            except OSError as error:
                told = f"it cannot be started: {error}"
            else:
                return True

    def _pause_s(self, entry: _Running, status: int, told: str) -> float | None:
        """Seconds until a process that ended is started again, or None if it is given up; says which, and why."""
        name, log_path = entry.spec.name, self._log_path(entry.spec.name)
        if status == EXIT_WRONG_SETTINGS and not entry.history.restarts_s:
            entry.given_up = f"it cannot run with its settings ({told}); see {log_path}"
            self._on_event(f"{name} cannot run with its settings ({told}) and is given up; see {log_path}")
            return None
        delay_s = entry.history.next_delay_s(asyncio.get_running_loop().time())
        if delay_s is None:
            entry.given_up = f"it kept ending ({told}); see {log_path}"
            self._on_event(f"{name} keeps ending ({told}) and is given up; see {log_path}")
        else:
            self._on_event(f"{name} ended ({told}); starting it again in {delay_s:g} s")
        return delay_s

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    @staticmethod
    def _kill_group(process: asyncio.subprocess.Process) -> None:
        """Kill what the process may have left in its group (an engine's own child process)."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("process group is gone already", extra={"pid": process.pid})


def _reason_of_end(log_path: Path, begins_at: int) -> str:
    """What the process whose log begins there said last of why it ended; "" if it said nothing."""
    try:
        with log_path.open("rb") as log_file:
            end = log_file.seek(0, os.SEEK_END)
            log_file.seek(max(begins_at, end - LOG_TAIL_BYTES))
            return last_reason(log_file.read(LOG_TAIL_BYTES).decode(errors="replace"))
    except OSError as error:
        return f"its log cannot be read: {error}"
