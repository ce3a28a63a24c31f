"""How loaded the other instances are, for a drain to choose among them."""

import asyncio
import logging
from collections.abc import Sequence

import grpc

from controlplane.model.instance import InstancePhase
from mesh.membership import Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

LOAD_DEADLINE_S = 1.0


async def ready_loads(transport: Transport, members: Sequence[Member]) -> dict[str, int]:
    """Waiting and running requests of those that are ready, can be moved to and answer; of those that decode, if there
    are any."""
    answers = await asyncio.gather(*(_load(transport, member) for member in members))
    ready = [
        (member, load.running_requests + load.queued_requests)
        for member, load in zip(members, answers, strict=True)
        if load is not None and load.state == worker_pb2.INSTANCE_STATE_READY and not load.transfer_obstacle
    ]
    decoding = [(member, requests) for member, requests in ready if phase_of(member).decodes]
    return {member.member_id: requests for member, requests in decoding or ready}


def phase_of(member: Member) -> InstancePhase:
    """As the worker has announced it."""
    return InstancePhase(member.attributes.get("phase", InstancePhase.ANY))


async def _load(transport: Transport, member: Member) -> worker_pb2.LoadReport | None:
    async with open_channel(transport, member.address, member.role) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer = await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=LOAD_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            reason = str(rpc_error(error, f"worker {member.member_id}"))
            log.warning("no request is moved to an instance that does not answer", extra={"reason": reason})
            return None
    load: worker_pb2.LoadReport = answer.load
    return load
