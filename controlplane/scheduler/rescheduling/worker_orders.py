"""Orders on their way to workers."""

import grpc

from controlplane.model.duties import RESCHEDULER
from controlplane.policies.rescheduling.migrations import OrderedMigration
from mesh.membership import Directory
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from penstock.v1 import worker_pb2, worker_pb2_grpc


class WorkerOrders:
    """Calls Worker.Migrate on the source, which carries out the whole migration and answers how it went."""

    def __init__(self, deadline_s: float, scheduler_id: str, transport: Transport, directory: Directory) -> None:
        """`scheduler_id`: who gives the orders."""
        self._transport = transport
        self._deadline_s = deadline_s
        self._scheduler_id = scheduler_id
        self._directory = directory

    async def migrate(self, ordered: OrderedMigration, address: str, epoch: int) -> worker_pb2.MigrateResponse:
        """Raises `RpcError`; a migration that has not ended by the deadline is cancelled by the worker. `address` is as
        of the beginning of the worker's reports; the directory knows of a later one. `epoch`: of the leadership under
        which it was ordered."""
        order = ordered.order
        for member in self._directory.members("worker"):
            if member.member_id == order.source_instance_id:
                address = member.address
        request = worker_pb2.MigrateRequest(
            request_id=order.request_id,
            target_instance_id=order.target_instance_id,
            fencing=worker_pb2.Fencing(duty=RESCHEDULER, epoch=epoch, leader=self._scheduler_id),
        )
        async with open_channel(self._transport, address, "worker") as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            try:
                answer: worker_pb2.MigrateResponse = await stub.Migrate(request, timeout=self._deadline_s)
            except grpc.aio.AioRpcError as error:
                raise rpc_error(error, f"worker {order.source_instance_id} at {address}") from error
        return answer
