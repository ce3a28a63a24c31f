"""The roles of the mesh, each with what a simulation puts in the place of a machine's own."""

import random
from functools import partial
from typing import Any

from controlplane.monitor.role import MonitorRole
from controlplane.planner.role import PlannerRole
from controlplane.scheduler.role import SchedulerRole
from engine_worker.engine_choice import make_simulated
from engine_worker.engines.simulated_movable import MovableSimulatedEngine
from engine_worker.host_tier.disk_store import DiskStore
from engine_worker.host_tier.settings import HostStores, HostTierSettings
from engine_worker.host_tier.store import HostStore
from engine_worker.role import WorkerRole
from engine_worker.settings import WorkerSettings
from fault_simulation.host_disk import HostDisks, SimulatedHostDisk, open_simulated
from fault_simulation.host_memory import HostMemories, SimulatedHostMemory, SimulatedStoreMemory
from fault_simulation.http import SimulatedHttpServer
from fault_simulation.http_transport import SimulatedHttpTransport
from fault_simulation.kv_fabric import SimulatedKvFabric
from fault_simulation.machines import Life
from fault_simulation.node import InjectedError, NodeState
from fault_simulation.plan_maker import SimulatedCapacityMaker, SimulatedPlanMaker
from mesh.role import Role
from mesh.runtime import Clock
from services.cascade.role import CascadeRole
from services.frontend.role import FrontendRole
from services.predictor.role import PredictorRole


def _breakable(engine: MovableSimulatedEngine, life: Life) -> MovableSimulatedEngine:
    """The same engine, which cannot run what moves to it while its machine says so."""
    activate = engine.activate

    def activate_or_raise(migration_id: str, emitted_token_ids: tuple[int, ...], computed_tokens: int) -> None:
        if life.machine.is_engine_broken:
            raise InjectedError("the engine cannot run it")
        activate(migration_id, emitted_token_ids, computed_tokens)

    engine.activate = activate_or_raise  # type: ignore[method-assign]
    return engine


def _open_store(life: Life, key: str, block_bytes: int, settings: HostTierSettings) -> HostStore:
    """All workers share a store, whichever machine they are on."""
    assert isinstance(life.mesh, HostMemories)
    memories = life.mesh.host_memories
    if key not in memories:
        memories[key] = SimulatedHostMemory(f"host/{key}", settings.nbytes // block_bytes, block_bytes)
    return HostStore(SimulatedStoreMemory(memories[key], lambda: life.node.state is not NodeState.DEAD))


def _open_disk(life: Life, key: str, block_bytes: int, settings: HostTierSettings) -> DiskStore | None:
    """All workers share that, too."""
    if not settings.disk_nbytes:
        return None
    assert isinstance(life.mesh, HostDisks)
    disks = life.mesh.host_disks
    if key not in disks:
        rng = random.Random(f"{life.mesh.seed}/disk/{key}")
        disks[key] = SimulatedHostDisk(f"disk/{key}", settings.disk_nbytes // block_bytes, block_bytes, rng)
    return open_simulated(disks[key], lambda: life.node.state is not NodeState.DEAD, life.machine.name)


def make_role(life: Life, role: str, settings: Any) -> Role:
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

            def engine(told: WorkerSettings, seed: int, clock: Clock) -> MovableSimulatedEngine:
                stores = HostStores(partial(_open_store, life), partial(_open_disk, life), life.runtime.threads)
                made = make_simulated(told, clock, fabric, life.machine.adapter_digest, stores, life.runtime.entropy)
                assert isinstance(made, MovableSimulatedEngine)
                return _breakable(made, life)

            return WorkerRole(settings, engine)
        case "predictor":
            return PredictorRole(settings)
        case "cascade":
            return CascadeRole(settings, SimulatedHttpTransport(network, node))
        case "planner":
            rng = random.Random(f"{life.seed}/plans")
            clock = life.runtime.clock
            return PlannerRole(settings, SimulatedPlanMaker(clock, rng), SimulatedCapacityMaker(clock))
    raise ValueError(f"there is no role {role!r}")
