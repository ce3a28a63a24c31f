"""Empties an instance: every running request is moved to another one."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import grpc

from controlplane.model.instance import InstancePhase
from engine_worker.coordinator.coordinator import Coordinator
from engine_worker.instance import Instance
from mesh.membership import Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

LOAD_DEADLINE_S = 1.0
PAUSE_S = 0.2
"""Between two passes over what stayed; doubled after each that moved nothing."""
LONGEST_PAUSE_S = 5.0
MAX_REQUESTS_A_PASS = 64


async def evacuate(instance: Instance, coordinator: Coordinator, transport: Transport) -> int:
    """Move the running requests of a draining instance to the least loaded others, and again elsewhere where one is
    refused, until none is left: what cannot be moved now may be once another instance has room or is there again.
    Returns how many moved."""
    moved, pause_s = 0, PAUSE_S
    refused: dict[str, frozenset[str]] = {}
    while here := [tracked.request.request_id for tracked in instance.table.live() if tracked.state == "running"]:
        # Those that are being moved by others' orders may yet stay.
        running = [request_id for request_id in here if not coordinator.is_ordered(request_id)]
        loads = await ready_loads(transport, coordinator.peers()) if running else {}
        plan = assign(running[:MAX_REQUESTS_A_PASS], loads, refused) if loads else {}
        outcomes = await asyncio.gather(*(coordinator.migrate(each, target) for each, target in plan.items()))
        for (request_id, target), outcome in zip(plan.items(), outcomes, strict=True):
            if not outcome.moved:
                extra = {"request_id": request_id, "target": target, "reason": outcome.reason}
                log.warning("a request could not be moved away", extra=extra)
                refused[request_id] = refused.get(request_id, frozenset()) | {target}
        successes = sum(outcome.moved for outcome in outcomes)
        moved += successes
        if not plan or successes < len(plan):
            await asyncio.sleep(pause_s)
            pause_s = PAUSE_S if successes else min(2 * pause_s, LONGEST_PAUSE_S)
    log.info("moved the running requests away", extra={"moved": moved})
    return moved


def assign(
    request_ids: Sequence[str], loads: Mapping[str, int], refused: Mapping[str, frozenset[str]]
) -> dict[str, str]:
    """A target for each request: the least loaded (`loads` in requests), counting those assigned before, that has not
    refused it; where all have, they are asked again. Pure."""
    counts = dict(sorted(loads.items()))
    plan: dict[str, str] = {}
    for request_id in request_ids:
        unwilling = refused.get(request_id, frozenset())
        if unwilling >= set(loads):
            unwilling = frozenset()
        target = min((each for each in counts if each not in unwilling), key=counts.__getitem__)
        counts[target] += 1
        plan[request_id] = target
    return plan


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
    async with open_channel(transport, member.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer = await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=LOAD_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            reason = str(rpc_error(error, f"worker {member.member_id}"))
            log.warning("no request is moved to an instance that does not answer", extra={"reason": reason})
            return None
    load: worker_pb2.LoadReport = answer.load
    return load
