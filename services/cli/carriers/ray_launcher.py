"""Starts Ray actors where a supervisor would start processes."""

import asyncio
import base64
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol
from uuid import uuid4

from mesh.backoff import Backoff
from mesh.errors import RayError
from mesh.identity.files import IDENTITY_VARIABLE
from mesh.parent_death import PARENT_VARIABLE
from mesh.tasks import TaskSet
from services.cli.carriers.container import GPUS_VARIABLE, PASSED_ON
from services.cli.carriers.ray_cluster import CALL_S, RayActorGone
from services.cli.supervisor.launcher import ProcessSpec

log = logging.getLogger(__name__)

GONE: Final = -1
"""Exit status of a process that was gone with its actor before it said any."""
TERMINATED: Final = -15
"""Of one that was to end before it had a place."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
LOOK_S: Final = 10.0
"""How long one call waits for the end of a process: its actor counts on being asked far more often than it would end
for want of it."""
PATIENCE_S: Final = 10.0
"""Before somebody is told that an instance has no place yet."""
KILL_TRIES: Final = 3
"""After so many calls without an answer a process that is to be killed is taken for gone: its actor ends by itself."""
CPUS: Final = 1.0
"""Of each instance: Ray counts them and binds nobody to them."""


class Actors(Protocol):
    """What the launcher asks of a cluster."""

    async def call(self, call: str, deadline_s: float | None = CALL_S, **arguments: Any) -> Any:
        """See `RayCluster.call`."""


@dataclass(frozen=True, slots=True)
class RaySettings:
    """What all actors of one mesh have in common."""

    mesh: str
    owner: str
    """Who runs it: another mesh of the same name, on the same nodes, is somebody else's."""
    environment: Mapping[str, str]
    """Of the supervisor; what `PASSED_ON` says is passed on."""

    def log_name(self, instance: str) -> str:
        """Without its ending."""
        return f"penstock-{self.mesh}-{sha256(self.owner.encode()).hexdigest()[:6]}-{instance}"


class RayLauncher:
    """Implements `services.cli.supervisor.launcher.Launcher`.

    What is launched waits for a place where the cluster has none now, however long: a node may be added, or come back.
    """

    def __init__(self, cluster: Actors, settings: RaySettings, say: Callable[[str], None]) -> None:
        """`say` hears why an instance has to wait."""
        self._cluster = cluster
        self._settings = settings
        self._say = say
        self._run = uuid4().hex[:8]
        self._numbers = itertools.count()
        self._tasks = TaskSet("ray actors")

    async def launch(self, spec: ProcessSpec) -> "RayProcess":
        """Returns at once. Raises OSError where its identity cannot be read."""
        order, gpus = order_of(spec, self._settings)
        # Names of the dead may be listed for a while: none is used twice.
        name = f"{spec.name}/{self._run}-{next(self._numbers)}"
        return RayProcess(self._cluster, spec.name, name, order, gpus, self._tasks, self._say)

    def log_of(self, name: str) -> str:
        """Ray has it on the node where it ran."""
        return f"{self._settings.log_name(name)}.log in the logs of its Ray node"

    async def sweep(self) -> int:
        """End what a mesh of this name has left behind; how many. Raises `RayError`."""
        found = await self._cluster.call("actors")
        for name in found:
            await self._cluster.call("remove", name=name)
        return len(found)

    async def close(self) -> None:
        """Leave nothing."""
        await self._tasks.cancel()
        try:
            await self.sweep()
        except RayError as error:
            log.error("actors of this mesh end by themselves, in a minute", extra={"error": str(error)})


class RayProcess:
    """Implements `services.cli.supervisor.launcher.Launched`."""

    def __init__(
        self,
        cluster: Actors,
        instance: str,
        name: str,
        order: dict[str, Any],
        gpus: int,
        tasks: TaskSet,
        say: Callable[[str], None],
    ) -> None:
        """`name`: of its actor, which nobody else has; `tasks` outlives it."""
        self.waits_for = ""
        self._cluster = cluster
        self._instance = instance
        self._name = name
        self._order = order
        self._room = {"gpus": gpus, "cpus": 0.0 if gpus else CPUS}
        self._tasks = tasks
        self._say = say
        self._reason = ""
        self._stop_asked, self._kill_asked = asyncio.Event(), asyncio.Event()
        self._end = tasks.spawn(self._run(), name=name)

    @property
    def pid(self) -> int:
        """It has a number on its node alone."""
        return 0

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; `GONE` where its actor or its node is."""
        return self._end.result() if self._end.done() and not self._end.cancelled() else None

    async def wait(self) -> int:
        """Return its exit status once it has ended."""
        return int(await asyncio.shield(self._end))

    def terminate(self) -> None:
        """SIGTERM: it drains and ends by itself; one that waits for a place gives that up."""
        self._stop_asked.set()

    def kill_group(self) -> None:
        """SIGKILL to all that its node runs of it; one that has ended has none."""
        self._kill_asked.set()

    def exit_reason(self) -> str:
        """What its log, or else Ray, said last of why it ended."""
        return self._reason

    async def _run(self) -> int:
        """Until it has ended and its actor is removed."""
        telling: list[asyncio.Task[None]] = []
        is_placed = False
        try:
            is_placed = await self._placed()
            if not is_placed:
                return TERMINATED
            wishes = ((self._stop_asked, "terminate"), (self._kill_asked, "kill"))
            telling += [asyncio.create_task(self._tell(wish, call)) for wish, call in wishes]
            return await self._until_ended()
        except RayActorGone as error:
            self._reason = str(error)
            return GONE
        finally:
            for task in telling:
                task.cancel()
            await asyncio.gather(*telling, return_exceptions=True)
            self._wait_for("")
            await self._remove(is_placed)

    async def _placed(self) -> bool:
        """True once its process runs, False where it was to end before."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            tasks = [
                asyncio.create_task(
                    self._cluster.call("start", None, name=self._name, order=self._order, **self._room)
                ),
                asyncio.create_task(self._stop_asked.wait()),
                asyncio.create_task(self._kill_asked.wait()),
                asyncio.create_task(self._explain()),
            ]
            try:
                await asyncio.wait(tasks[:3], return_when=asyncio.FIRST_COMPLETED)
                if not tasks[0].done():
                    return False
                place = tasks[0].result()
            except RayActorGone:
                raise
            except RayError as error:
                self._wait_for(str(error))
            else:
                self._wait_for("")
                log.info("a Ray actor runs", extra={"instance": self._instance, "node": place["host"]})
                return True
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(backoff.next_s())

    async def _explain(self) -> None:
        """Why there is no place for it, for as long as there is none."""
        await asyncio.sleep(PATIENCE_S)
        while True:
            try:
                self._wait_for(await self._cluster.call("why_waiting", **self._room))
            except RayError as error:
                self._wait_for(str(error))
            await asyncio.sleep(LONGEST_PAUSE_S)

    async def _until_ended(self) -> int:
        """A cluster that is away is asked again: the process may go on without it."""
        backoff, away = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0
        while True:
            try:
                ended = await self._cluster.call("wait", LOOK_S + CALL_S, name=self._name, timeout_s=LOOK_S)
            except RayActorGone:
                raise
            except RayError as error:
                away += 1
                if self._kill_asked.is_set() and away >= KILL_TRIES:
                    self._reason = str(error)
                    return GONE
                log.warning("a Ray actor is not watched", extra={"actor": self._name, "error": str(error)})
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            away = 0
            if ended is not None:
                self._reason = ended["reason"]
                return int(ended["status"])

    async def _tell(self, wish: asyncio.Event, call: str) -> None:
        """Once it is wished, again and again while the cluster is away."""
        await wish.wait()
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                await self._cluster.call(call, name=self._name)
            except RayActorGone:
                return
            except RayError as error:
                log.warning("a Ray actor is not told yet", extra={"call": call, "error": str(error)})
                await asyncio.sleep(backoff.next_s())
            else:
                return

    async def _remove(self, is_placed: bool) -> None:
        try:
            await self._cluster.call("remove", name=self._name, is_placed=is_placed)
        except RayError as error:
            log.warning("a Ray actor ends by itself, in a minute", extra={"actor": self._name, "error": str(error)})

    def _wait_for(self, why: str) -> None:
        if why and why != self.waits_for:
            self._say(f"{self._instance} waits: {why}")
        self.waits_for = why


def order_of(spec: ProcessSpec, settings: RaySettings) -> tuple[dict[str, Any], int]:
    """What `RayDriver.start` takes, and the number of GPUs: Ray chooses which. Raises OSError."""
    environment = {name: value for name, value in settings.environment.items() if name.startswith(PASSED_ON)}
    environment |= spec.environment
    gpus = [each for each in environment.pop(GPUS_VARIABLE, "").split(",") if each]
    # Both are of this machine alone.
    for name in (PARENT_VARIABLE, IDENTITY_VARIABLE):
        environment.pop(name, None)
    arguments, folder = without_option(spec.arguments, "--identity")
    files = sorted(Path(folder).iterdir()) if folder else []
    order = {
        "name": settings.log_name(spec.name),
        "role": spec.role,
        "arguments": arguments,
        "environment": environment,
        "identity": {path.name: base64.b64encode(path.read_bytes()).decode() for path in files if path.is_file()},
    }
    return order, len(gpus)


def without_option(arguments: tuple[str, ...], option: str) -> tuple[tuple[str, ...], str]:
    """All others, and the value of this one; "" where it is not given."""
    if option not in arguments:
        return arguments, ""
    at = arguments.index(option)
    return (*arguments[:at], *arguments[at + 2 :]), arguments[at + 1]
