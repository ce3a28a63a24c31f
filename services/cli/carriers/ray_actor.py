"""The actor that has one instance's process run on a node of a Ray cluster, which needs Penstock there."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

from mesh.parent_death import PARENT_VARIABLE
from services.cli.supervisor.launcher import LOG_TAIL_BYTES, exit_reason

ORPHANED_AFTER_S: Final = 60.0
"""An actor that its supervisor has not asked anything for so long ends its process, and itself."""
ORPHAN_DRAIN_S: Final = 10.0
_PRIVATE_MEMORY: Final = Path("/dev/shm")
_SET_BY_RAY: Final = ("RAY_", "OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""In the environment of an actor; an engine is to choose its own threads."""
COMMAND: Final = (sys.executable, "-m", "services.cli.main", "serve")


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What an actor is to run. It travels to the node through Ray."""

    name: str
    """Of the mesh and the instance, as its log is called."""
    role: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    identity: Mapping[str, bytes] = field(repr=False)
    """Files of its identity, by name; empty: it has none."""


def this_node() -> tuple[str, Path]:
    """The address of the Ray node that this actor is on, and where Ray looks for logs there."""
    import ray  # takes half a second, and only actors have it

    own_output = Path("/proc/self/fd/1").resolve()
    return str(ray.util.get_node_ip_address()), own_output.parent if own_output.is_file() else Path("/tmp")


class WorkerActor:
    """Runs one process as the child of an actor: both end together, however the actor ends."""

    def __init__(
        self,
        orphaned_after_s: float = ORPHANED_AFTER_S,
        command: tuple[str, ...] = COMMAND,
        where: Callable[[], tuple[str, Path]] = this_node,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """`where`: address of this node and its folder of logs; `end`: by which the actor's own process ends."""
        self._host, self._log_dir = where()
        self._orphaned_after_s = orphaned_after_s
        self._command = command
        self._end = end
        self._asked_s = time.monotonic()
        # One that gets its place when its supervisor is gone is never started.
        self._unstarted = threading.Timer(orphaned_after_s, end, (0,))
        self._unstarted.daemon = True
        self._unstarted.start()
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._identity: Path | None = None
        self._log = Path(os.devnull)
        self._log_begins_at = 0
        self._watch: asyncio.Task[None] | None = None

    async def start(self, order: WorkerOrder) -> tuple[str, int]:
        """Run the process, which listens on this node's address and announces it; returns that and its process id.
        Asked once more, as when an answer was lost, it returns the same."""
        self._asked_s = time.monotonic()
        async with self._starting:
            if self._process is None:
                self._unstarted.cancel()
                self._process = await self._launch(order)
                self._watch = asyncio.create_task(self._until_orphaned())
            return self._host, self._process.pid

    async def wait(self, timeout_s: float) -> tuple[int, str] | None:
        """Exit status and the last reason; None while it runs, after `timeout_s`."""
        self._asked_s = time.monotonic()
        assert self._process is not None, "it is started first"
        try:
            status = await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return None
        with self._log.open("rb") as log_file:
            end = log_file.seek(0, os.SEEK_END)
            log_file.seek(max(self._log_begins_at, end - LOG_TAIL_BYTES))
            return status, exit_reason(log_file.read(LOG_TAIL_BYTES).decode(errors="replace"))

    async def terminate(self) -> None:
        """Ask it to drain and end."""
        self._asked_s = time.monotonic()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def kill(self) -> None:
        """Kill it with all that it started, and delete its identity."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._identity is not None:
            shutil.rmtree(self._identity, ignore_errors=True)

    async def _launch(self, order: WorkerOrder) -> Process:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_RAY)}
        environment = {**inherited, **order.environment, PARENT_VARIABLE: str(os.getpid())}
        identity: tuple[str, ...] = ()
        if order.identity:
            self._identity = _written(order)
            identity = ("--identity", str(self._identity))
        address = ("--bind-host", self._host, "--advertise-host", self._host)
        self._log = self._log_dir / f"{order.name}.log"
        with self._log.open("ab") as log_file:
            self._log_begins_at = log_file.tell()
            return await asyncio.create_subprocess_exec(
                *self._command,
                order.role,
                *order.arguments,
                *identity,
                *address,
                stdout=log_file,
                stderr=log_file,
                env=environment,
                start_new_session=True,
            )

    async def _until_orphaned(self) -> None:
        """A supervisor that was killed, or cannot reach the cluster any more, asks nothing."""
        while (left_s := self._asked_s + self._orphaned_after_s - time.monotonic()) > 0:  # noqa: ASYNC110  each question puts it off
            await asyncio.sleep(left_s)
        await self.terminate()
        await self.wait(ORPHAN_DRAIN_S)
        await self.kill()
        self._end(0)


def _written(order: WorkerOrder) -> Path:
    """The folder with the identity: in memory and for this user alone. One of the same name is what an actor that was
    killed has left behind."""
    parent = _PRIVATE_MEMORY if _PRIVATE_MEMORY.is_dir() else Path(tempfile.gettempdir())
    folder = parent / f"penstock-{os.getuid()}-{sha256(order.name.encode()).hexdigest()[:16]}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for name, content in order.identity.items():
        opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "wb") as file:
            file.write(content)
    return folder
