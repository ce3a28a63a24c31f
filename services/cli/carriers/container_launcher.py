"""Starts containers where a supervisor would start processes."""

import asyncio
import logging
from typing import Final

from mesh.backoff import Backoff
from mesh.errors import DockerError
from mesh.tasks import TaskSet
from services.cli.carriers.container import OWNER_LABEL, ContainerSettings, container_config
from services.cli.carriers.docker_engine import Container, DockerEngine
from services.cli.supervisor.launcher import ProcessSpec, exit_reason

log = logging.getLogger(__name__)

GONE: Final = -1
"""Exit status of a container that was removed before it said any."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
AWAY_TRIES: Final = 30
"""An engine that has not answered so often in a row, two minutes and more, has lost its containers."""


class ContainerLauncher:
    """Implements `services.cli.supervisor.launcher.Launcher`.

    A container that has ended keeps its log until its name is needed again, or the mesh ends well or starts anew.
    """

    def __init__(self, engine: DockerEngine, settings: ContainerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._tasks = TaskSet("containers")

    async def launch(self, spec: ProcessSpec) -> "ContainerProcess":
        """Returns once the container runs. Raises OSError."""
        try:
            await self._make_room(self._settings.name(spec.name))
            container = await self._engine.create(
                self._settings.name(spec.name), container_config(spec, self._settings)
            )
            try:
                await self._engine.start(container)
            except DockerError:
                await self._engine.remove(container)
                raise
        except DockerError as error:
            raise OSError(str(error)) from error
        return ContainerProcess(self._engine, container, self._tasks)

    def log_of(self, name: str) -> str:
        """The command that shows it."""
        return f"docker logs {self._settings.name(name)}"

    async def sweep(self) -> int:
        """Remove what a mesh of this name has left behind; how many ran still. Raises `DockerError`."""
        found = await self._own()
        for each in found:
            await self._engine.remove(each.id)
        return sum(each.is_running for each in found)

    async def close(self) -> None:
        """Remove all but what has failed, whose log may be wanted."""
        await self._tasks.cancel()
        try:
            for each in await self._own():
                if each.is_running or not each.exit_status:
                    await self._engine.remove(each.id)
        except DockerError as error:
            log.error("containers of this mesh may be left behind", extra={"error": str(error)})

    async def _own(self) -> list[Container]:
        ids = await self._engine.labelled(OWNER_LABEL, self._settings.owner)
        found = [await self._engine.inspect(each) for each in ids]
        return [each for each in found if each is not None]

    async def _make_room(self, name: str) -> None:
        """The former container of this name is in the way, whether it has ended or its start was given up."""
        former = await self._engine.inspect(name)
        if former is None:
            return
        if former.labels.get(OWNER_LABEL) != self._settings.owner:
            raise DockerError(f"there is another container {name}: remove it, or choose another --mesh")
        await self._engine.remove(former.id)


class ContainerProcess:
    """Implements `services.cli.supervisor.launcher.Launched`."""

    def __init__(self, engine: DockerEngine, container: str, tasks: TaskSet) -> None:
        """`container`: its id; `tasks` outlives it."""
        self._engine = engine
        self._container = container
        self._tasks = tasks
        self._reason = ""
        self._end = tasks.spawn(self._until_ended(), name=f"end of {container[:12]}")

    @property
    def pid(self) -> int:
        """It has a number in its container alone."""
        return 0

    @property
    def returncode(self) -> int | None:
        """Its first process's exit status, 128 and more for signals; `GONE` where somebody removed it."""
        return self._end.result() if self._end.done() and not self._end.cancelled() else None

    @property
    def waits_for(self) -> str:
        """A container has its place once it is started."""
        return ""

    async def wait(self) -> int:
        """Return its exit status once it has ended."""
        return int(await asyncio.shield(self._end))

    def terminate(self) -> None:
        """SIGTERM: it drains and ends by itself."""
        self._signal("SIGTERM")

    def kill_group(self) -> None:
        """SIGKILL to its first process, with which all others of the container end; one that has ended has none."""
        self._signal("SIGKILL")

    def exit_reason(self) -> str:
        """What its log, or else the engine, said last of why it ended."""
        return self._reason

    def _signal(self, signal: str) -> None:
        if self.returncode is None:
            self._tasks.spawn(self._send(signal), name=f"{signal} to {self._container[:12]}")

    async def _send(self, signal: str) -> None:
        """Again and again while the engine is away; `returncode` ends it."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while self.returncode is None:
            try:
                await self._engine.send_signal(self._container, signal)
            except DockerError as error:
                log.warning("a container is not signalled yet", extra={"signal": signal, "error": str(error)})
                await asyncio.sleep(backoff.next_s())
            else:
                return

    async def _until_ended(self) -> int:
        """An engine that is away is asked again: the container may go on without it."""
        backoff, away = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0
        while away < AWAY_TRIES:
            try:
                await self._engine.wait(self._container)
                shown = await self._engine.inspect(self._container)
                if shown is None:
                    self._reason = "somebody removed its container"
                    return GONE
                if not shown.is_running:
                    said = exit_reason(await self._engine.log_tail(self._container))
                    self._reason = said or shown.error
                    return shown.exit_status
                backoff.reset()
                away = 0
            except DockerError as error:
                log.warning("a container is not watched", extra={"error": str(error)})
                away += 1
                self._reason = str(error)
                await asyncio.sleep(backoff.next_s())
        return GONE
