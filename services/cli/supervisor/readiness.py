"""When a freshly started mesh can be called serving."""

import asyncio

from controlplane.protocols.circuit_breaker import BreakerState
from mesh.errors import RpcError
from mesh.membership import Directory, Member
from penstock.v1 import frontend_pb2, frontend_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.cli.connection import call

POLL_S = 0.1


async def wait_until_serving(directory: Directory, workers: int, frontends: int = 1, schedulers: int = 1) -> None:
    """Return once so many frontends are connected to `workers` instances and to so many schedulers, which may place on
    all of them."""
    while True:
        seeing = [await _frontend_sees(member, workers, schedulers) for member in directory.members("frontend")]
        if sum(seeing) >= frontends:
            placing = [await _scheduler_sees(member, workers) for member in directory.members("scheduler")]
            if sum(placing) >= schedulers:
                return
        await asyncio.sleep(POLL_S)


async def _frontend_sees(member: Member, workers: int, schedulers: int) -> bool:
    try:
        request = frontend_pb2.GetFrontendStatusRequest()
        status = await call(member, frontend_pb2_grpc.FrontendStub, "GetStatus", request)
    except RpcError:
        return False
    asked = sum(each.connected and each.breaker == BreakerState.CLOSED for each in status.schedulers)
    return int(sum(worker.connected for worker in status.workers)) >= workers and asked >= schedulers


async def _scheduler_sees(member: Member, workers: int) -> bool:
    try:
        request = scheduler_pb2.GetSnapshotRequest()
        snapshot = await call(member, scheduler_pb2_grpc.SchedulerStub, "GetSnapshot", request)
    except RpcError:
        return False
    ready = int(sum(instance.state == "ready" for instance in snapshot.instances))
    return bool(snapshot.synced) and ready >= workers
