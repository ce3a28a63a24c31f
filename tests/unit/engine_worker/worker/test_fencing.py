"""A worker takes orders of the present leader only."""

from typing import Any

from controlplane.model.duties import RESCHEDULER
from controlplane.protocols.migration.source_events import Ending, MigrationOutcome
from engine_worker.service import WorkerService
from mesh.leadership_state import Fence
from mesh.runtime import SystemThreads
from penstock.v1 import worker_pb2


class RequestMover:
    """Everything moves."""

    def __init__(self) -> None:
        self.moved: list[str] = []

    async def migrate(self, request_id: str, target_id: str, *, stop_and_copy: bool = False) -> MigrationOutcome:
        self.moved.append(request_id)
        return MigrationOutcome(Ending.MOVED)


def order(request_id: str, epoch: int, leader: str) -> worker_pb2.MigrateRequest:
    fencing = worker_pb2.Fencing(duty=RESCHEDULER, epoch=epoch, leader=leader)
    return worker_pb2.MigrateRequest(request_id=request_id, target_instance_id="b", fencing=fencing)


async def test_orders_of_a_former_leader_are_refused_and_operators_orders_are_not() -> None:
    mover, refused = RequestMover(), list[str]()
    unused: Any = None
    service = WorkerService(unused, lambda: 0.0, SystemThreads(), mover_of(mover), fence=Fence(refused.append))
    assert (await service.Migrate(order("r1", 5, "old"), unused)).moved
    assert (await service.Migrate(order("r2", 9, "new"), unused)).moved
    answer = await service.Migrate(order("r3", 5, "old"), unused)
    assert (answer.moved, answer.highest_epoch) == (False, 9)
    assert "old as leader of rescheduler in epoch 5 is refused: new leads since epoch 9" in answer.reason
    assert (await service.Migrate(worker_pb2.MigrateRequest(request_id="r4"), unused)).moved
    assert (mover.moved, refused) == (["r1", "r2", "r4"], [RESCHEDULER])


def mover_of(mover: RequestMover) -> Any:
    """Only `migrate` is asked for here."""
    return mover
