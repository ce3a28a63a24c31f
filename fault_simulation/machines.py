"""Simulated machines, their network and their time, and the processes that live on them."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ClassVar, Final, TypeVar

from prometheus_client import CollectorRegistry
from xxhash import xxh3_128_hexdigest

from fault_simulation.disk import SimulatedDisk
from fault_simulation.isolation import collect_garbage, isolated, set_imports_aside
from fault_simulation.loop import VirtualLoop
from fault_simulation.network import Network
from fault_simulation.node import Node, NodeState, NodeTask
from fault_simulation.runtime import WallClock, simulated_runtime
from mesh.errors import AdapterNotFound
from mesh.exit_status import ExitStatus
from mesh.role import Role, RoleContext, RoleEnvironment, RoleSettings, run_role_in
from mesh.runtime import Runtime
from mesh.shutdown import Shutdown
from mesh.store import open_store
from mesh.store.host import StoreHost

LONGEST_CLOCK_OFFSET_S: Final = 1e5
STARTED_AGAIN: Final = frozenset({ExitStatus.FAILED, ExitStatus.RESTART})
RESTART_S: Final = 1.0

Result = TypeVar("Result")
Body = Callable[["Life"], Awaitable[ExitStatus]]


def everybodys_digest(path: str) -> str:
    """The checksum of an adapter, as every machine has it."""
    return xxh3_128_hexdigest(path.encode())


class Machine:
    """A host that outlives the processes on it, one at a time. Its name is its address."""

    def __init__(self, name: str, rng: random.Random, body: Body) -> None:
        self.name = name
        self.body = body
        """What a process does there."""
        self.wall = WallClock(rng.uniform(-0.05, 0.05))
        self.disk = SimulatedDisk(random.Random(rng.getrandbits(64)))
        self.clock_offset_s = rng.uniform(0.0, LONGEST_CLOCK_OFFSET_S)
        self.is_supervised = False
        """Whether a supervisor starts what ends there; otherwise it is a container that restarts on failure."""
        self.is_engine_broken = False
        """Of a worker: its engine runs nothing that moves to it."""
        self.adapters: dict[str, str] = {}
        """Of a worker: LoRA adapters whose files are not everybody's there, path to checksum; empty: there are none."""
        self.lives = 0
        self.life: Life | None = None

    def adapter_digest(self, path: str) -> str:
        """The checksum of the adapter at a path of this machine. Raises AdapterNotFound."""
        digest = self.adapters.get(path, everybodys_digest(path))
        if not digest:
            raise AdapterNotFound(f"there is no LoRA adapter at {path}")
        return digest

    @property
    def is_up(self) -> bool:
        """Whether a process lives there, paused or not."""
        return self.life is not None and self.life.node.state is not NodeState.DEAD


class Life:
    """One process, from its start to its end."""

    def __init__(self, mesh: "Machines", machine: Machine) -> None:
        machine.lives += 1
        self.mesh = mesh
        self.machine = machine
        self.node = Node(machine.name, machine.clock_offset_s)
        self.seed = f"{mesh.seed}/{machine.name}/{machine.lives}"
        self.runtime: Runtime = simulated_runtime(
            mesh.network, self.node, machine.wall, self.seed, is_framed=mesh.is_framed
        )
        self.shutdown = Shutdown()
        self.registry = CollectorRegistry()
        """The metrics of its role."""
        self.role: Role | None = None
        self.context: RoleContext | None = None
        """What its role was given to work with."""
        self.store: StoreHost | None = None
        """Of the store's process."""
        self.status: ExitStatus | None = None
        """Set once it has ended by itself."""
        self.failure = ""
        """What it died of by itself."""
        self.task: NodeTask = mesh.loop.spawn(self.node, self._run(), f"process {machine.name}")

    async def run_role(self, role: Role, settings: RoleSettings) -> ExitStatus:
        """As `mesh.role.run_role`, in a simulated environment."""
        self.role = role
        store = open_store(settings.store_url, self.runtime)
        environment = RoleEnvironment(
            runtime=self.runtime,
            store=store,
            registry=self.registry,
            metrics_address=f"{self.machine.name}:9000",
            pid=self.machine.lives,
            shutdown=self.shutdown,
            supervised=self.machine.is_supervised,
        )
        try:
            return await run_role_in(_seen(role, self), settings, environment)
        finally:
            await store.close()

    def terminate(self) -> None:
        """Ask the process to end as SIGTERM does: it drains first, and a second one cuts the drain."""
        self.mesh.loop.call_in(self.node, 0.0, self.shutdown.on_signal)

    async def _run(self) -> None:
        try:
            self.status = await self.machine.body(self)
        # As Python does in a process of its own: a traceback and status 1.
        except Exception as error:  # noqa: BLE001
            self.status, self.failure = ExitStatus.FAILED, f"{type(error).__name__}: {error}"
        # What the process left running ends with it, when this callback has returned.
        self.mesh.loop.call_in(self.mesh.loop.world, 0.0, self.mesh.ended, self)


def _seen(role: Role, life: Life) -> Role:
    """The same role, whose life keeps what it is given, to look at."""

    class Seen:
        name: ClassVar[str] = role.name
        failed, drain, stop = staticmethod(role.failed), staticmethod(role.drain), staticmethod(role.stop)

        async def start(self, context: RoleContext) -> Mapping[str, str]:
            life.context = context
            return await role.start(context)

    return Seen()


class Machines:
    """Whatever runs on them. Everything that happens is decided by the seed."""

    def __init__(self, seed: int) -> None:
        set_imports_aside()
        self.seed = seed
        self.loop = VirtualLoop()  # type: ignore[abstract]  # what it lacks, no role calls
        self.network = Network(self.loop, f"{seed}/network")
        self.machines: dict[str, Machine] = {}
        self.told: logging.Handler | None = None
        """Hears what the roles log, while it is run."""
        self.is_framed = False
        """Whether processes that start from now on have their streams in frames."""
        self._pids = 0

    def add(self, name: str, body: Body) -> Machine:
        """A machine, without a process yet."""
        machine = self.machines[name] = Machine(name, random.Random(f"{self.seed}/{name}"), body)
        self.network.hosts[name] = name
        return machine

    def run(self, main: Coroutine[Any, Any, Result], limit_s: float = 3600.0) -> Result:
        """The result of `main`, which runs in the world. The mesh is of no use afterwards, except to look at."""

        async def run() -> Result:
            collecting = asyncio.create_task(collect_garbage())
            try:
                return await main
            finally:
                collecting.cancel()

        with isolated(self.loop, self.told):
            return self.loop.run(run(), limit_s)

    # -- what can be done to a machine

    def start(self, name: str) -> Life:
        """Begin a process there; there must be none."""
        machine = self.machines[name]
        assert not machine.is_up, f"{name} is up already"
        machine.life = Life(self, machine)
        return machine.life

    def kill(self, name: str) -> None:
        """kill -9; what its disk had not synced is lost, as by a loss of power."""
        machine = self.machines[name]
        if machine.is_up:
            assert machine.life is not None
            self._end(machine.life.node)
            machine.disk.crash()

    def terminate(self, name: str) -> None:
        """SIGTERM: drain and end."""
        life = self.machines[name].life
        if life is not None:
            life.terminate()

    def pause(self, name: str) -> None:
        """Freeze a machine's process as SIGSTOP does: no line of it runs until `resume`; its connections stay open."""
        life = self.machines[name].life
        if life is not None:
            self.loop.pause(life.node)

    def resume(self, name: str) -> None:
        """Let a paused process go on, as SIGCONT does: what came meanwhile reaches it all at once."""
        life = self.machines[name].life
        if life is not None:
            self.loop.resume(life.node)

    def ended(self, life: Life) -> None:
        """A process has ended by itself; where no supervisor does it, a restart policy `on-failure` starts it again."""
        if life.node.state is not NodeState.DEAD:
            self._end(life.node)
            life.machine.disk.release_locks()
            if life.status in STARTED_AGAIN and not life.machine.is_supervised:
                self.loop.call_in(self.loop.world, RESTART_S, self._start_again, life)

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """What the role that lives on a machine shows Prometheus: the sum over all samples that have these labels."""
        life = self.machines[name].life
        if life is None:
            return 0.0
        samples = (sample for family in life.registry.collect() for sample in family.samples)
        return sum(each.value for each in samples if each.name == metric and labels.items() <= each.labels.items())

    def runs(self, name: str, incarnation_id: str) -> bool:
        """Whether this incarnation of a member has not ended yet."""
        life = self.machines[name].life
        lives = life is not None and life.node.state is not NodeState.DEAD
        return lives and (life.context is None or life.context.incarnation_id == incarnation_id)  # type: ignore[union-attr]

    def role(self, name: str) -> Role | None:
        """The role that lives on a machine, to look at."""
        machine = self.machines[name]
        return machine.life.role if machine.is_up and machine.life is not None else None

    def next_pid(self) -> int:
        """Of another process."""
        self._pids += 1
        return self._pids

    def _start_again(self, life: Life) -> None:
        if life.machine.life is life:  # nobody else has started one meanwhile
            self.start(life.machine.name)

    def _end(self, node: Node) -> None:
        self.loop.kill(node)
        self.network.died(node)
