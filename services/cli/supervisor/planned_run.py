"""What `penstock up` does once it has a state store: starts its processes, and as many instances as plans say."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec

from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.manager import DeploymentManager, StartInstance
from controlplane.deployment.replicas import id_part, shape_of
from controlplane.policies.rescheduling.record import RESCHEDULER_KEY, ReschedulerRecord
from controlplane.policies.stages.placement import Stages
from controlplane.policies.stages.record import STAGES_KEY, StagesSetting
from mesh.membership import Directory
from mesh.runtime import Clock
from mesh.store.interface import StateStore
from services.cli.supervisor.deployer import Deployer, Patience
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.local_mesh import LocalMesh, own_workers, processes, worker_process
from services.cli.supervisor.process_actuator import ProcessActuator
from services.cli.supervisor.supervisor import Supervisor

POLICY_KEY: Final = "/penstock/config/policy"


async def write_first_settings(store: StateStore, policy: str, rescheduler: str, stages: bool) -> None:
    """What the mesh is to begin with. With stages, the policy is theirs. Raises `StoreError`."""
    await store.put(POLICY_KEY, msgspec.json.encode({"name": Stages.name if stages else policy}))
    await store.put(STAGES_KEY, msgspec.json.encode(StagesSetting(enabled=stages)))
    await store.put(RESCHEDULER_KEY, msgspec.json.encode(ReschedulerRecord(rescheduler)))


async def start_processes(mesh: LocalMesh, supervisor: Supervisor, gpus: GpuPool) -> None:
    """All that the mesh begins with. Raises OSError, and `ConfigurationError` where there are too few GPUs."""
    room, own = gpus.room_of(shape_of(mesh.engine_args)), {spec.name for spec in own_workers(mesh)}
    for spec in processes(mesh):
        placed = replace(spec, environment=gpus.take(spec.name, room)) if spec.name in own else spec
        await supervisor.add(placed)


def deployment_of(
    name: str, mesh: LocalMesh, gpus: GpuPool, patience: Patience, gpu_kind: str = ""
) -> DeploymentManager:
    """The manager of a mesh whose processes are started, each on GPUs of this pool, which are of this kind. `name`: the
    supervisor's."""
    shape = shape_of(mesh.engine_args)
    running = {
        each.name: {f"{id_part(each.name)}-{index}": shape for index in range(each.workers)} for each in mesh.models
    }
    shapes = {each.name: shape for each in mesh.models}
    return DeploymentManager(name, gpus, patience.ready_s, running, shapes, gpu_kind)


async def run_as_planned(
    manager: DeploymentManager,
    store: StateStore,
    mesh: LocalMesh,
    supervisor: Supervisor,
    patience: Patience,
    clock: Clock,
    stop_asked: asyncio.Event,
    say: Callable[[str], None],
) -> None:
    """Run as many instances as the plans in force say, until asked to stop; `say` hears what is done and missing."""

    def make_spec(instance: StartInstance) -> ProcessSpec:
        spec = worker_process(mesh, instance.model, instance.name, instance.shape)
        return replace(spec, environment=instance.environment)

    directory = Directory(store)
    await directory.start()
    actuator = ProcessActuator(supervisor, directory, make_spec)
    deployer = Deployer(manager, store, actuator, patience.drain_s, clock.now_s, say)
    follow = asyncio.create_task(deployer.follow())
    stop = asyncio.create_task(stop_asked.wait())
    try:
        await asyncio.wait((follow, stop), return_when=asyncio.FIRST_COMPLETED)
        if follow.done():
            follow.result()
    finally:
        stop.cancel()
        follow.cancel()
        await asyncio.wait((follow, stop))
        await directory.stop()
