"""Ask frontends what comes and waits, and a monitor what is under way."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.planning.autoscale.profiled_capacity import RequestLength
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import profile_name
from mesh.membership import Directory, Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from penstock.v1 import (
    frontend_pb2,
    frontend_pb2_grpc,
    monitor_pb2,
    monitor_pb2_grpc,
    worker_pb2,
)

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
HTTP_OK = 200


@dataclass(slots=True)
class Demand:
    """Of all models, since the last look."""

    arrivals: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    running: dict[str, dict[str, int]] = field(default_factory=dict)
    """Requests of each instance that takes new ones, by model."""
    lengths: dict[str, list[RequestLength]] = field(default_factory=dict)
    """Of the requests that were answered, by model."""
    profile_names: dict[str, set[str]] = field(default_factory=dict)
    """What profiles of the model's instances are called, of one for each kind."""
    is_heard: bool = False
    """Whether every frontend answered, and a monitor."""


class DemandReader:
    """Remembers how far it has read each frontend's counters."""

    def __init__(self, directory: Directory, transport: Transport) -> None:
        self._directory = directory
        self._transport = transport
        self._arrivals: dict[str, Mapping[str, int]] = {}
        """As last read, by the frontend's incarnation."""
        self._ended: dict[str, int] = {}

    async def look(self, policies: Mapping[str, AutoscalePolicy]) -> Demand:
        """What came, ended and waits; a frontend that has just come counts from its next look on."""
        demand = Demand()
        frontends = self._directory.members("frontend")
        alive = {member.incarnation_id for member in frontends}
        self._arrivals = {each: seen for each, seen in self._arrivals.items() if each in alive}
        self._ended = {each: last for each, last in self._ended.items() if each in alive}
        answers = await asyncio.gather(*(self._ask_frontend(member, demand, policies) for member in frontends))
        demand.is_heard = await self._ask_monitors(demand) and all(answers) and bool(frontends)
        return demand

    async def _ask_frontend(self, member: Member, demand: Demand, policies: Mapping[str, AutoscalePolicy]) -> bool:
        me = member.incarnation_id
        async with open_channel(self._transport, member.address, member.role) as channel:
            stub = frontend_pb2_grpc.FrontendStub(channel)  # type: ignore[no-untyped-call]
            status = await _answer(stub.GetStatus, frontend_pb2.GetFrontendStatusRequest(), member)
            if status is None:
                return False
            asked = frontend_pb2.ListEndedRequest(after=self._ended.get(me, 0), limit=0 if me in self._ended else 1)
            ended = await _answer(stub.ListEnded, asked, member)
        arrivals = {each.model: each.arrivals_total for each in status.demand}
        before = self._arrivals.get(me)
        self._arrivals[me] = arrivals
        for each in status.demand:
            demand.waiting[each.model] += each.waiting
            if before is not None:
                demand.arrivals[each.model] += each.arrivals_total - before.get(each.model, 0)
        if ended is not None:
            if me in self._ended:
                for request in ended.requests:
                    policy = policies.get(request.model)
                    if policy is not None:
                        demand.ended[request.model] += 1
                        demand.kept[request.model] += is_kept(request, policy)
                        if request.status == HTTP_OK and request.generated_tokens:
                            demand.lengths.setdefault(request.model, []).append(length_of(request))
            self._ended[me] = ended.last
        return True

    async def _ask_monitors(self, demand: Demand) -> bool:
        """The first monitor that answers."""
        for member in self._directory.members("monitor"):
            async with open_channel(self._transport, member.address, member.role) as channel:
                stub = monitor_pb2_grpc.MonitorStub(channel)  # type: ignore[no-untyped-call]
                cluster = await _answer(stub.GetCluster, monitor_pb2.GetClusterRequest(), member)
            if cluster is None:
                continue
            alive = {worker.member_id for worker in self._directory.members("worker")}
            for each in cluster.instances:
                model = each.instance.model
                if each.instance.instance_id not in alive:
                    continue
                demand.waiting[model] += each.load.queued_requests
                demand.profile_names.setdefault(model, set()).add(profile_name_of(each.instance))
                if each.load.state != worker_pb2.INSTANCE_STATE_DRAINING:
                    running = demand.running.setdefault(model, {})
                    running[each.instance.instance_id] = each.load.running_requests + each.load.queued_requests
            return True
        return False


def is_kept(request: frontend_pb2.EndedRequest, policy: AutoscalePolicy) -> bool:
    """Whether a request was answered within the SLO."""
    if request.status != HTTP_OK:
        return False
    first_ms = request.first_token_ms if request.HasField("first_token_ms") else request.ended_ms
    steps = request.generated_tokens - max(1, request.choices)
    tpot_ms = (request.ended_ms - first_ms) / steps if steps > 0 else 0.0
    limits = ((policy.ttft_ms, first_ms), (policy.tpot_ms, tpot_ms), (policy.e2e_ms, request.ended_ms))
    return all(limit is None or value <= limit for limit, value in limits)


def length_of(request: frontend_pb2.EndedRequest) -> RequestLength:
    """Of one choice: several share the prompt that is computed once, and count as so many requests anyway."""
    computed = request.prompt_tokens - min(request.cached_tokens, request.prompt_tokens)
    return RequestLength(max(1, computed), max(1, round(request.generated_tokens / max(1, request.choices))))


def profile_name_of(instance: worker_pb2.InstanceDescription) -> str:
    shape = ReplicaShape(max(1, instance.tensor_parallel), max(1, instance.pipeline_parallel))
    return profile_name(instance.engine, instance.model, instance.device, shape)


async def _answer(method: Any, request: Any, member: Member) -> Any:
    """None where it does not answer, which is logged."""
    try:
        return await method(request, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        reason = str(rpc_error(error, f"{member.role} {member.member_id} at {member.address}"))
        log.warning("the autoscaler does not hear of the load", extra={"reason": reason})
        return None
