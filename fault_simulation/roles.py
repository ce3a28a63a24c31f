"""The roles of the mesh, each with what a simulation puts in the place of a machine's own."""

import random
from typing import TYPE_CHECKING, Any

from controlplane.monitor.role import MonitorRole
from controlplane.planner.role import PlannerRole
from controlplane.scheduler.role import SchedulerRole
from engine_worker.engine_choice import make_simulated
from engine_worker.role import WorkerRole
from fault_simulation.http import SimulatedHttpServer
from fault_simulation.http_transport import SimulatedHttpTransport
from fault_simulation.kv_fabric import SimulatedKvFabric
from fault_simulation.plan_maker import SimulatedPlanMaker
from mesh.role import Role
from services.cascade.role import CascadeRole
from services.frontend.role import FrontendRole
from services.predictor.role import PredictorRole

if TYPE_CHECKING:
    from fault_simulation.nodes import Life


def make_role(life: "Life", role: str, settings: Any) -> Role:
    """A role by its name, told `settings`, for a process that has just begun."""
    network, node = life.mesh.network, life.node
    match role:
        case "frontend":
            return FrontendRole(settings, lambda app, host, port: SimulatedHttpServer(network, node, app, host, port))
        case "scheduler":
            return SchedulerRole(settings)
        case "monitor":
            return MonitorRole(settings)
        case "worker":
            # Its KV blocks travel over the simulated network, too.
            def fabric(_: object) -> SimulatedKvFabric:
                return SimulatedKvFabric(network, node, node.name)

            return WorkerRole(settings, lambda told, seed, clock: make_simulated(told, clock, fabric))
        case "predictor":
            return PredictorRole(settings)
        case "cascade":
            return CascadeRole(settings, SimulatedHttpTransport(network, node))
        case "planner":
            rng = random.Random(f"{life.seed}/plans")
            return PlannerRole(settings, SimulatedPlanMaker(life.runtime.clock, rng))
    raise ValueError(f"there is no role {role!r}")
