"""One source for the rescheduler's mode: what a scheduler was started with holds for the workers, too."""

import asyncio
from typing import Any

from controlplane.model.duties import RESCHEDULER
from controlplane.policies.rescheduling.record import RESCHEDULER_KEY
from controlplane.scheduler.settings import SchedulerSettings
from engine_worker.role import WorkerRole
from engine_worker.settings import WorkerSettings
from fault_simulation.nodes import STORE, SimulatedMesh
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.unit.fault_simulation.small_mesh import MODEL, MODEL_PATH

WORKERS = ("worker-0", "worker-1")


def mesh_of(**schedulers: str) -> SimulatedMesh:
    """Schedulers by the mode that each is told on its command line."""
    mesh = SimulatedMesh(1)
    mesh.add_monitor("monitor")
    for name, mode in schedulers.items():
        mesh.add_scheduler(name, SchedulerSettings(rescheduler=mode))  # type: ignore[arg-type]
    for name in WORKERS:
        mesh.add_worker(name, WorkerSettings(model=MODEL, model_path=str(MODEL_PATH), engine="simulated"))
    mesh.start(STORE)
    for name in ("monitor", *WORKERS):
        mesh.start(name)
    return mesh


async def seen(mesh: SimulatedMesh) -> tuple[str, str, list[bool]]:
    """The leader's mode and what stands in for it, and whether each worker leaves the balancing in stages to it."""
    status: Any = await mesh.operator.ask(
        "scheduler",
        RESCHEDULER,
        scheduler_pb2_grpc.SchedulerStub,
        "GetRescheduler",
        scheduler_pb2.GetReschedulerRequest(),
    )
    left = []
    for name in WORKERS:
        role = mesh.role(name)
        assert isinstance(role, WorkerRole)
        assert role.stages is not None
        left.append(role.stages.manager.is_rescheduled)
    return status.mode, status.fallback, left


def test_workers_report_and_leave_their_stages_to_what_a_scheduler_was_started_with() -> None:
    mesh = mesh_of(first="trajectories", second="current")

    async def main() -> list[tuple[str, str, list[bool]]]:
        mesh.start("first")
        await asyncio.sleep(10)
        mesh.start("second")
        shown = [await seen(mesh)]
        mesh.terminate("first")
        await asyncio.sleep(30)
        shown.append(await seen(mesh))
        async with mesh.operator.mesh() as (store, _):
            await store.delete(RESCHEDULER_KEY)
        await asyncio.sleep(5)
        shown.append(await seen(mesh))
        return shown

    first, other_leads, deleted = mesh.run(main())
    assert first == ("trajectories", "", [True, True]), "nothing stands in: the workers tell of their requests"
    assert other_leads == first, "the second follows the store, whatever it was told"
    assert deleted == ("current", "", [True, True]), "nothing stands there any more: what it was told holds"
    assert not mesh.loop.findings, "\n".join(map(str, mesh.loop.findings))


def test_no_mode_anywhere_is_off() -> None:
    mesh = mesh_of(only="off")

    async def main() -> tuple[str, str, list[bool]]:
        mesh.start("only")
        await asyncio.sleep(10)
        return await seen(mesh)

    assert mesh.run(main()) == ("off", "", [False, False])
