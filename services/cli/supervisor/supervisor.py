"""Starts processes, restarts those that end, and leaves none behind."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.deployment.restarts import RestartHistory
from mesh.shutdown import ExitStatus
from mesh.tasks import TaskSet
from services.cli.supervisor.launcher import Launched, Launcher, ProcessSpec

# These end first, in this order: no new requests, then the engines; the control plane afterwards and all at once.
STOP_ORDER = ("frontend", "worker")
KILL_AFTER_S = 10.0
ASKED_TO_END = {
    ExitStatus.STOPPED: "by a signal that was not the supervisor's",
    ExitStatus.RESTART: "as `penstock restart` asked",
}
"""By somebody else than the supervisor, who would not start it again."""


@dataclass(slots=True)
class _Running:
    spec: ProcessSpec
    process: Launched | None = None
    history: RestartHistory = field(default_factory=RestartHistory)
    stopping: bool = False
    given_up: str = ""
    """Why it is not started again."""


class Supervisor:
    """Keeps the processes that were added running until they are removed, or, for workers, drained.

    `on_event` hears, in words, of every start, end and restart.
    """

    def __init__(self, launcher: Launcher, on_event: Callable[[str], None]) -> None:
        self._launcher = launcher
        self._on_event = on_event
        self._running: dict[str, _Running] = {}
        self._tasks = TaskSet("supervisor")
        self._gave_up = asyncio.Event()

    async def add(self, spec: ProcessSpec) -> None:
        """Start a process and keep it running. Raises ValueError for a name that is in use, and OSError."""
        if spec.name in self._running:
            raise ValueError(f"a process called {spec.name!r} is running already")
        entry = _Running(spec)
        self._running[spec.name] = entry
        try:
            entry.process = await self._launcher.launch(spec)
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
                process.kill_group()
                await process.wait()
            # What the engine has left behind would keep memory of the GPUs that the next one gets.
            process.kill_group()
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
                entry.process.kill_group()

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

    async def _watch(self, entry: _Running) -> None:
        name = entry.spec.name
        while not entry.stopping:
            process = entry.process
            assert process is not None
            status = await process.wait()
            if entry.stopping:
                return
            process.kill_group()
            if status == ExitStatus.DRAINED:
                self._on_event(f"{name} was drained and has ended; it is not started again")
                del self._running[name]
                return
            if not await self._started_again(entry, status, process.exit_reason()):
                return
            if entry.stopping:  # it was removed in that very moment, when there was nothing to end yet
                entry.process.kill_group()
                await entry.process.wait()

    async def _started_again(self, entry: _Running, status: int, reason: str) -> bool:
        """False where it was removed before, or is given up."""
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
                entry.process = await self._launcher.launch(entry.spec)
            except OSError as error:
                status, told = ExitStatus.FAILED, f"it cannot be started: {error}"
            else:
                return True

    def _pause_s(self, entry: _Running, status: int, told: str) -> float | None:
        """Seconds until a process that ended is started again, or None if it is given up; says which, and why."""
        name, log_path = entry.spec.name, self._launcher.log_of(entry.spec.name)
        if status in ASKED_TO_END:
            # No failure, so neither a pause nor a step towards being given up.
            self._on_event(f"{name} ended, {ASKED_TO_END[ExitStatus(status)]}; starting it again")
            return 0.0
        if status == ExitStatus.WRONG_SETTINGS and not entry.history.restarts_s:
            entry.given_up = f"it cannot run with its settings ({told}); see {log_path}"
            self._on_event(f"{name} cannot run with its settings ({told}) and is given up; see {log_path}")
            return None
        if status == ExitStatus.SUPERSEDED:
            entry.given_up = f"another process of the mesh has taken its name; see {log_path}"
            self._on_event(f"{name} has ended: another process of the mesh has taken its name; see {log_path}")
            return None
        delay_s = entry.history.next_delay_s(asyncio.get_running_loop().time())
        if delay_s is None:
            entry.given_up = f"it kept ending ({told}); see {log_path}"
            self._on_event(f"{name} keeps ending ({told}) and is given up; see {log_path}")
        else:
            self._on_event(f"{name} ended ({told}); starting it again in {delay_s:g} s")
        return delay_s
