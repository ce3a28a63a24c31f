"""The mesh's own roles, whole and unchanged, as processes on simulated machines."""

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final

from controlplane.monitor.settings import MonitorSettings
from controlplane.planner.settings import PlannerSettings
from controlplane.scheduler.settings import SchedulerSettings
from engine_worker.settings import WorkerSettings
from fault_simulation.host_disk import SimulatedHostDisk
from fault_simulation.host_memory import SimulatedHostMemory
from fault_simulation.machines import Life, Machine, Machines
from fault_simulation.node import Node, NodeState
from fault_simulation.operator import Operator
from fault_simulation.roles import make_role
from fault_simulation.supervised import Up, UpSettings
from mesh.exit_status import ExitStatus
from mesh.role import RoleSettings
from services.cascade.settings import CascadeSettings
from services.cli.supervisor.state_server import StateServer
from services.frontend.settings import FrontendSettings
from services.predictor.settings import PredictorSettings

STORE: Final = "store"
STORE_PORT: Final = 2379
STORE_URL: Final = f"penstock://{STORE}:{STORE_PORT}"
HTTP_PORT: Final = 8000
STORE_FILE: Final = Path("/var/lib/penstock/store")
DRAIN_S: Final = 8.0
"""What running work is given after SIGTERM: less than by default, so that a simulation sees drains that are cut."""


class SimulatedMesh(Machines):
    """Machines with the roles of a mesh, its state store, an operator and a client."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.client = Node("client")
        """Where requests come from."""
        self.host_memories: dict[str, SimulatedHostMemory] = {}
        """Stores of KV blocks, which all workers share."""
        self.host_disks: dict[str, SimulatedHostDisk] = {}
        """Those behind them."""
        self.up: Up | None = None
        """The last life of `penstock up`, where there is one."""
        self.add(STORE, _serve_store)
        self.operator = Operator(self, STORE_URL, self.bring_back)

    def add_role(self, name: str, role: str, settings: Any) -> Machine:
        """A machine for a role, told what it is told on the command line."""
        return self.add(name, lambda life: life.run_role(make_role(life, role, settings), _common(name)))

    def add_monitor(self, name: str, settings: MonitorSettings | None = None) -> None:
        """A machine for a monitor."""
        self.add_role(name, "monitor", settings or MonitorSettings())

    def add_scheduler(self, name: str, settings: SchedulerSettings | None = None) -> None:
        """A machine for a scheduler."""
        self.add_role(name, "scheduler", settings or SchedulerSettings())

    def add_worker(self, name: str, settings: WorkerSettings) -> None:
        """A machine for a worker with a simulated engine."""
        self.add_role(name, "worker", settings)

    def add_frontend(self, name: str, settings: FrontendSettings | None = None) -> None:
        """A machine for a frontend, at port 8000."""
        self.add_role(name, "frontend", settings or FrontendSettings(http_host=name, http_port=HTTP_PORT))

    def add_cascade(self, name: str, settings: CascadeSettings | None = None) -> None:
        """A machine for a cascade router."""
        self.add_role(name, "cascade", settings or CascadeSettings())

    def add_planner(self, name: str, settings: PlannerSettings | None = None) -> None:
        """A machine for a planner."""
        self.add_role(name, "planner", settings or PlannerSettings())

    def add_predictor(self, name: str, settings: PredictorSettings | None = None) -> None:
        """A machine for a length predictor. Simulated engines have no hidden states to predict from and predict
        lengths themselves, so it is a member that nobody asks."""
        self.add_role(name, "predictor", settings or PredictorSettings())

    def add_supervisor(self, settings: UpSettings) -> None:
        """Have the machine of the store run `penstock up`, the store inside its process. Its processes get machines by
        their names when it starts them; kill it, and the store is gone and all of them are told to end."""

        def run(life: Life) -> Awaitable[ExitStatus]:
            self.up = Up(life, settings, STORE_FILE, STORE_PORT, HTTP_PORT)
            return self.up.run()

        self.machines[STORE].body = run

    async def bring_back(self, name: str) -> None:
        """Have a process started again that has ended and that nobody starts again by himself."""
        machine = self.machines[name]
        if not machine.is_supervised:
            if not machine.is_up:
                self.start(name)
        elif self.up is not None and self.up.life.node.state is not NodeState.DEAD:
            await self.loop.spawn(self.up.life.node, self.up.bring_back(name), f"bring {name} back")


def _common(name: str) -> RoleSettings:
    return RoleSettings(store_url=STORE_URL, member_id=name, bind_host=name, drain_s=DRAIN_S)


async def _serve_store(life: Life) -> ExitStatus:
    """The store in a process of its own, on its machine's disk."""
    server = await StateServer.start(life.runtime, STORE_FILE, life.machine.disk, f"{STORE}:{STORE_PORT}")
    life.store = server.host
    await life.shutdown.asked.wait()
    await server.stop()
    return ExitStatus.STOPPED
