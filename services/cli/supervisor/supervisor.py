"""Starts processes, starts those again that end as `RestartManager` says, and leaves none behind."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.deployment.restarts import (
    AwaitEnd,
    Ended,
    Forget,
    GiveUp,
    Kill,
    Launch,
    NotStarted,
    Pause,
    PauseOver,
    ProcessEvent,
    ProcessInstruction,
    RestartManager,
    Say,
    Started,
    StopAsked,
)
from mesh.tasks import TaskSet
from services.cli.supervisor.launcher import Launched, Launcher, ProcessSpec

# These end first, in this order: no new requests, then the engines; the control plane afterwards and all at once.
STOP_ORDER = ("frontend", "worker")
KILL_AFTER_S = 10.0


@dataclass(slots=True)
class _Kept:
    spec: ProcessSpec
    manager: RestartManager
    process: Launched | None = None


class Supervisor:
    """Keeps the processes that were added running until they are removed, or, for workers, drained.

    `on_event` hears, in words, of every start, end and restart.
    """

    def __init__(self, launcher: Launcher, on_event: Callable[[str], None]) -> None:
        self._launcher = launcher
        self._on_event = on_event
        self._kept: dict[str, _Kept] = {}
        self._tasks = TaskSet("supervisor")
        self._gave_up = asyncio.Event()

    async def add(self, spec: ProcessSpec) -> None:
        """Start a process and keep it running. Raises ValueError for a name that is in use, and OSError."""
        entry = self._enter(spec)
        try:
            entry.process = await self._launcher.launch(spec)
        except OSError:
            del self._kept[spec.name]
            raise
        self._begin(entry)

    def adopt(self, spec: ProcessSpec, process: Launched) -> None:
        """Keep a process running that was started before. Raises ValueError for a name that is in use."""
        entry = self._enter(spec)
        entry.process = process
        self._begin(entry)

    async def let_go(self) -> None:
        """Keep nothing running any more, and end nothing either: somebody else adopts it."""
        await self._tasks.cancel()
        self._kept.clear()

    async def wait_given_up(self) -> None:
        """Return once a process has been given up: it ended too often, or said at its first start that its settings
        are wrong."""
        await self._gave_up.wait()

    async def remove(self, name: str, kill_after_s: float = KILL_AFTER_S) -> None:
        """Let a process drain and end; kill it after `kill_after_s`. Unknown names are an error (KeyError)."""
        entry = self._kept[name]
        entry.manager.handle(StopAsked(), self._now_s())
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
        self._kept.pop(name, None)

    async def stop(self, kill_after_s: float = KILL_AFTER_S) -> None:
        """End all: the frontends, then the workers, then the rest."""
        for role in STOP_ORDER:
            names = [name for name, entry in self._kept.items() if entry.spec.role == role]
            await asyncio.gather(*(self.remove(name, kill_after_s) for name in names))
        await asyncio.gather(*(self.remove(name, kill_after_s) for name in list(self._kept)))
        await self._tasks.cancel()

    def kill(self) -> None:
        """End all at once, without draining."""
        for entry in self._kept.values():
            entry.manager.handle(StopAsked(), self._now_s())
            if entry.process is not None and entry.process.returncode is None:
                entry.process.kill_group()

    def names(self) -> frozenset[str]:
        """Of all that is kept running."""
        return frozenset(self._kept)

    def given_up(self) -> dict[str, str]:
        """Those that are not started again although nobody asked them to end, with the last reason, by name."""
        return {name: entry.manager.given_up for name, entry in self._kept.items() if entry.manager.given_up}

    def waiting(self) -> dict[str, str]:
        """Those that have no place to run at yet, with what each waits for, by name."""
        return {
            name: entry.process.waits_for
            for name, entry in self._kept.items()
            if entry.process is not None and entry.process.waits_for
        }

    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        for entry in self._kept.values():
            entry.manager.validate()

    def pids(self) -> dict[str, int]:
        """Process ids of those that run now, by name."""
        return {
            name: entry.process.pid
            for name, entry in self._kept.items()
            if entry.process is not None and entry.process.returncode is None
        }

    def _enter(self, spec: ProcessSpec) -> _Kept:
        if spec.name in self._kept:
            raise ValueError(f"a process called {spec.name!r} is running already")
        entry = _Kept(spec, RestartManager(spec.name, self._launcher.log_of(spec.name)))
        self._kept[spec.name] = entry
        return entry

    def _begin(self, entry: _Kept) -> None:
        """In the same turn of the loop as it was launched: who removes it from now on has it drained."""
        instructions = entry.manager.handle(Started(), self._now_s())
        self._tasks.spawn(self._keep(entry, instructions), name=entry.spec.name)

    async def _keep(self, entry: _Kept, instructions: tuple[ProcessInstruction, ...]) -> None:
        """From its start to its last end."""
        while instructions:
            event: ProcessEvent | None = None
            for instruction in instructions:
                match instruction:
                    case Say(text):
                        self._on_event(text)
                    case AwaitEnd():
                        event = await self._end_of(entry)
                    case Pause(delay_s):
                        await asyncio.sleep(delay_s)
                        event = PauseOver()
                    case Launch():
                        event = await self._launched(entry)
                    case Kill():
                        assert entry.process is not None
                        entry.process.kill_group()
                        await entry.process.wait()
                    case GiveUp():
                        self._gave_up.set()
                    case Forget():
                        del self._kept[entry.spec.name]
            instructions = () if event is None else entry.manager.handle(event, self._now_s())

    async def _end_of(self, entry: _Kept) -> Ended:
        process = entry.process
        assert process is not None
        status = await process.wait()
        if not entry.manager.is_stopping:  # else `remove` does it
            process.kill_group()
        return Ended(status, process.exit_reason())

    async def _launched(self, entry: _Kept) -> Started | NotStarted:
        try:
            entry.process = await self._launcher.launch(entry.spec)
        except OSError as error:
            return NotStarted(str(error))
        return Started()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
