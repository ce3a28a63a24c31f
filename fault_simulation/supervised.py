"""`penstock up` on simulated machines: its supervisor and deployer keep simulated processes running.

What is real: which processes there are and what they are told (down to the arguments of `penstock serve`), when they
are started again, how plans are followed, and the state store inside the supervisor's process. What is not: each
process has a machine of its own, named like it, so that the network between any two can break.
"""

import asyncio
import errno
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.manager import DeploymentManager
from engine_worker.settings import WorkerSettings
from fault_simulation.machines import Life, Machines
from fault_simulation.node import NodeState
from fault_simulation.roles import make_role
from mesh.exit_status import ExitStatus
from mesh.role import RoleSettings
from mesh.store import open_store
from services.cli import serve
from services.cli.supervisor.deployer import Patience
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.local_mesh import LocalMesh
from services.cli.supervisor.planned_run import deployment_of, run_as_planned, start_processes, write_first_settings
from services.cli.supervisor.state_server import StateServer
from services.cli.supervisor.supervisor import Supervisor
from services.frontend.settings import FrontendSettings

log = logging.getLogger(__name__)

SHORTEST_START_S: Final = 0.3
LONGEST_START_S: Final = 1.5
"""Between a process's start and the first line of its role: the interpreter and its imports."""
KILLED: Final = -9
LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class UpSettings:
    """What `penstock up` is asked for."""

    mesh: LocalMesh
    """Its addresses are of no account: each process has those of its machine."""
    policy: str = "penstock"
    rescheduler: str = "off"
    stages: bool = False
    ready_timeout_s: float = 60.0
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More arguments of `penstock serve`, by role, as one would give by the environment."""
    model_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More engine arguments of a model's instances, so that models differ in what they answer."""


class Up:
    """One life of `penstock up`."""

    def __init__(self, life: Life, settings: UpSettings, store_file: Any, port: int, http_port: int) -> None:
        self.life = life
        self.events: list[str] = []
        """What it said, in order."""
        self._settings = settings
        self._store_file = store_file
        self._port = port
        self._launcher = SimulatedLauncher(life, settings, http_port)
        self.supervisor = Supervisor(self._launcher, self._say)
        self.deployment: DeploymentManager | None = None
        """Once all that it begins with is started."""

    def validate(self) -> None:
        """See `RestartManager.validate` and `DeploymentManager.validate`."""
        self.supervisor.validate()
        if self.deployment is not None:
            self.deployment.validate()

    async def run(self) -> ExitStatus:
        """Until SIGTERM."""
        life, settings = self.life, self._settings
        await self._ports_are_free()
        address = f"{life.machine.name}:{self._port}"
        server = await StateServer.start(life.runtime, self._store_file, life.machine.disk, address)
        life.store = server.host
        store = open_store(server.url, life.runtime)
        try:
            mesh = replace(settings.mesh, store_url=server.url)
            await write_first_settings(store, settings.policy, settings.rescheduler, settings.stages)
            gpus = GpuPool(0)
            await start_processes(mesh, self.supervisor, gpus)
            patience = Patience(settings.ready_timeout_s, mesh.drain_s)
            self.deployment = deployment_of("default", mesh, gpus, patience)
            await run_as_planned(
                self.deployment,
                store,
                mesh,
                self.supervisor,
                patience,
                life.runtime.clock,
                life.shutdown.asked,
                self._say,
            )
            return ExitStatus.STOPPED
        finally:
            await self.supervisor.stop()
            await store.close()
            await server.stop()

    async def bring_back(self, name: str) -> None:
        """Start a process again that was drained, as `penstock up` itself does once a plan wants it."""
        # A life that has not begun with it yet, as the ports of the former one are still taken, does so by itself.
        spec = self._launcher.specs.get(name)
        if spec is not None and name not in self.supervisor.names():
            await self.supervisor.add(spec)

    def _say(self, event: str) -> None:
        self.events.append(event)
        log.warning("%s", event)

    async def _ports_are_free(self) -> None:
        """Processes of a former life that still drain have the ports: whoever starts `penstock up` tries again."""
        mesh = self.life.mesh
        while any(machine.is_supervised and machine.is_up for machine in mesh.machines.values()):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


class SimulatedLauncher:
    """A `Launcher`. Its processes get SIGTERM when their parent dies, as by PR_SET_PDEATHSIG."""

    def __init__(self, parent: Life, settings: UpSettings, http_port: int) -> None:
        self.specs: dict[str, ProcessSpec] = {}
        """As they were launched last, by name."""
        self._parent = parent
        self._settings = settings
        self._http_port = http_port
        self._children: dict[str, Life] = {}
        parent.node.on_death.append(self._orphan)

    async def launch(self, spec: ProcessSpec) -> "SimulatedProcess":
        mesh = self._parent.mesh
        self.specs[spec.name] = spec
        machine = mesh.machines.get(spec.name)
        if machine is None:
            machine = mesh.add(spec.name, lambda life: self._live(life, spec))
        elif machine.is_up:
            raise OSError(errno.EADDRINUSE, f"{spec.name} is running already")
        machine.is_supervised = True
        machine.body = lambda life: self._live(life, spec)
        child = self._children[spec.name] = mesh.start(spec.name)
        return SimulatedProcess(mesh, self._parent, child)

    def log_of(self, name: str) -> str:
        """There is none."""
        return f"{name}.log"

    async def _live(self, life: Life, spec: ProcessSpec) -> ExitStatus:
        rng = random.Random(f"{life.seed}/start")
        await asyncio.sleep(rng.uniform(SHORTEST_START_S, LONGEST_START_S))
        common, settings = _settings(spec.role, (*spec.arguments, *self._settings.arguments.get(spec.role, ())))
        if isinstance(settings, FrontendSettings):
            settings = replace(settings, http_host=spec.name, http_port=self._http_port)
        elif isinstance(settings, WorkerSettings):
            options = (*settings.engine_arg, *self._settings.model_options.get(settings.model, ()))
            settings = replace(settings, engine_arg=options)
        role = make_role(life, spec.role, settings)
        return await life.run_role(role, replace(common, bind_host=spec.name))

    def _orphan(self) -> None:
        for child in self._children.values():
            child.terminate()


class SimulatedProcess:
    """A `Launched`."""

    def __init__(self, mesh: Machines, parent: Life, life: Life) -> None:
        self.pid = mesh.next_pid()
        self._mesh = mesh
        self._life = life
        self._ended = asyncio.Event()
        self._parent = parent
        life.node.on_death.append(self._on_death)

    def _on_death(self) -> None:
        self._mesh.loop.call_in(self._parent.node, 0.0, self._ended.set)

    @property
    def returncode(self) -> int | None:
        if self._life.node.state is not NodeState.DEAD:
            return None
        return KILLED if self._life.status is None else int(self._life.status)

    async def wait(self) -> int:
        await self._ended.wait()
        status = self.returncode
        assert status is not None, "a process that has ended has a status"
        return status

    @property
    def waits_for(self) -> str:
        """Simulated machines have room."""
        return ""

    def terminate(self) -> None:
        """Ask the process to end as SIGTERM does, after its drain."""
        self._life.terminate()

    def kill_group(self) -> None:
        """SIGKILL; simulated engines leave nothing behind."""
        if self._life.node.state is not NodeState.DEAD:
            self._mesh.kill(self._life.machine.name)

    def exit_reason(self) -> str:
        """It left no log."""
        return ""


@cache
def _settings(role: str, arguments: tuple[str, ...]) -> tuple[RoleSettings, Any]:
    """Settings are values, so one parse of the same arguments serves all processes and seeds."""
    return serve.parse_settings(role, arguments)
