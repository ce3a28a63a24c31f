"""When a freshly started mesh can be called serving."""

import asyncio
from collections.abc import Callable

from controlplane.protocols.circuit_breaker import BreakerState
from mesh.errors import RpcError
from mesh.membership import Directory, Member
from penstock.v1 import (
    frontend_pb2,
    frontend_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from services.cli.connection import call

POLL_S = 0.1
TELL_S = 5.0


async def wait_until_serving(
    directory: Directory, workers: int, frontends: int = 1, schedulers: int = 1, endpoints: int | None = None
) -> None:
    """Return once so many frontends are connected to `workers` instances and to so many schedulers, which may place on
    all of them. `endpoints`: a gateway is to pick from so many, too; None: there is none."""
    while True:
        seeing = [await _frontend_sees(member, workers, schedulers) for member in directory.members("frontend")]
        if sum(seeing) >= frontends:
            placing = [await _scheduler_sees(member, workers) for member in directory.members("scheduler")]
            gateways = [
                await _gateway_sees(member, endpoints or 0, schedulers) for member in directory.members("gateway")
            ]
            if sum(placing) >= schedulers and (endpoints is None or any(gateways)):
                return
        await asyncio.sleep(POLL_S)


async def tell_of_start(directory: Directory, workers: int, timeout_s: float, say: Callable[[str], None]) -> None:
    """Say every few seconds how many instances have joined, until cancelled: models take their time to load."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    while True:
        await asyncio.sleep(TELL_S)
        say(start_line(len(directory.members("worker")), workers, clock() - began_s, timeout_s))


def start_line(joined: int, workers: int, gone_s: float, timeout_s: float) -> str:
    """How a start goes. How long a model loads is not known, so what is told is when it is given up."""
    what = f"{joined} of {workers} instances have joined" if joined < workers else "all instances have joined"
    return f"{what} after {gone_s:.0f} s; given up after {timeout_s:g} s (--ready-timeout-s)"


async def _frontend_sees(member: Member, workers: int, schedulers: int) -> bool:
    try:
        request = frontend_pb2.GetFrontendStatusRequest()
        status = await call(member, frontend_pb2_grpc.FrontendStub, "GetStatus", request)
    except RpcError:
        return False
    return int(sum(worker.connected for worker in status.workers)) >= workers and _asked(status) >= schedulers


async def _gateway_sees(member: Member, endpoints: int, schedulers: int) -> bool:
    try:
        request = gateway_pb2.GetGatewayStatusRequest()
        status = await call(member, gateway_pb2_grpc.GatewayStub, "GetStatus", request)
    except RpcError:
        return False
    reached = sum(bool(each.endpoint) for each in status.endpoints)
    return reached >= endpoints and _asked(status) >= schedulers and (bool(status.models) or not endpoints)


def _asked(status: frontend_pb2.GetFrontendStatusResponse | gateway_pb2.GetGatewayStatusResponse) -> int:
    """Schedulers that are asked for placements."""
    return sum(each.connected and each.breaker == BreakerState.CLOSED for each in status.schedulers)


async def _scheduler_sees(member: Member, workers: int) -> bool:
    try:
        request = scheduler_pb2.GetSnapshotRequest()
        snapshot = await call(member, scheduler_pb2_grpc.SchedulerStub, "GetSnapshot", request)
    except RpcError:
        return False
    ready = int(sum(instance.state == "ready" for instance in snapshot.instances))
    return bool(snapshot.synced) and ready >= workers
