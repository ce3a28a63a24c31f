"""When a freshly started mesh can be called serving."""

import asyncio

from mesh.errors import RpcError
from mesh.membership import Directory
from penstock.v1 import frontend_pb2, frontend_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.cli.connection import call

POLL_S = 0.1


async def wait_until_serving(directory: Directory, workers: int) -> None:
    """Return once a frontend is connected to `workers` instances and the scheduler may place on all of them."""
    while True:
        if await _frontend_sees(directory, workers) and await _scheduler_sees(directory, workers):
            return
        await asyncio.sleep(POLL_S)


async def _frontend_sees(directory: Directory, workers: int) -> bool:
    for member in directory.members("frontend"):
        try:
            request = frontend_pb2.GetFrontendStatusRequest()
            status = await call(member, frontend_pb2_grpc.FrontendStub, "GetStatus", request)
        except RpcError:
            return False
        return int(sum(worker.connected for worker in status.workers)) >= workers
    return False


async def _scheduler_sees(directory: Directory, workers: int) -> bool:
    for member in directory.members("scheduler"):
        try:
            request = scheduler_pb2.GetSnapshotRequest()
            snapshot = await call(member, scheduler_pb2_grpc.SchedulerStub, "GetSnapshot", request)
        except RpcError:
            return False
        ready = int(sum(instance.state == "ready" for instance in snapshot.instances))
        return bool(snapshot.synced) and ready >= workers
    return False
