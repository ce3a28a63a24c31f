"""What `penstock up` does once it has a state store: starts its processes, and as many instances as plans say."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec

from controlplane.policies.rescheduling.record import RESCHEDULER_KEY, ReschedulerRecord
from controlplane.policies.stages.placement import Stages
from controlplane.policies.stages.record import STAGES_KEY, StagesSetting
from mesh.membership import Directory
from mesh.runtime import Clock
from mesh.store.interface import StateStore
from services.cli.supervisor.fleet import Fleet, Patience
from services.cli.supervisor.gpus import GpuPool
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.local_mesh import LocalMesh, processes, worker_process
from services.cli.supervisor.plan_follower import PlanFollower
from services.cli.supervisor.replicas import Shape, gpus_of, shape_of
from services.cli.supervisor.supervisor import Supervisor

POLICY_KEY: Final = "/penstock/config/policy"


async def write_first_settings(store: StateStore, policy: str, rescheduler: str, stages: bool) -> None:
    """What the mesh is to begin with. With stages, the policy is theirs. Raises `StoreError`."""
    await store.put(POLICY_KEY, msgspec.json.encode({"name": Stages.name if stages else policy}))
    await store.put(STAGES_KEY, msgspec.json.encode(StagesSetting(enabled=stages)))
    await store.put(RESCHEDULER_KEY, msgspec.json.encode(ReschedulerRecord(rescheduler)))


async def start_processes(mesh: LocalMesh, supervisor: Supervisor, gpus: GpuPool) -> None:
    """All that the mesh begins with. Raises OSError, and `ConfigurationError` where there are too few GPUs."""
    for spec in processes(mesh):
        await supervisor.add(_on_gpus(spec, gpus, shape_of(mesh.engine_options)))


async def run_as_planned(
    name: str,
    store: StateStore,
    mesh: LocalMesh,
    supervisor: Supervisor,
    gpus: GpuPool,
    patience: Patience,
    clock: Clock,
    stop_asked: asyncio.Event,
    say: Callable[[str], None],
) -> None:
    """Run as many instances as the plans in force say, until asked to stop. `name`: the supervisor's."""

    def make_spec(model: str, instance: str, shape: Shape) -> ProcessSpec:
        return _on_gpus(worker_process(mesh, model, instance, shape), gpus, shape)

    directory = Directory(store)
    await directory.start()
    shape = shape_of(mesh.engine_options)
    fleet = Fleet(supervisor, directory, gpus, make_spec, patience, clock.now_s)
    fleet.adopt({each.name: {f"{each.name}-{index}": shape for index in range(each.workers)} for each in mesh.models})
    follower = PlanFollower(name, store, fleet, say)
    follow = asyncio.create_task(follower.follow())
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


def _on_gpus(spec: ProcessSpec, gpus: GpuPool, shape: Shape) -> ProcessSpec:
    """An instance with GPUs of its own; other processes as they are. Raises `ConfigurationError`."""
    if spec.role != "worker":
        return spec
    return replace(spec, environment=gpus.take(spec.name, gpus_of(shape)))
