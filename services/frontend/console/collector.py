"""One look at the mesh: every process that has something to say is asked once, all at the same time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controlplane.deployment.deployment_status import DEPLOYMENTS_PREFIX, DeploymentStatus
from controlplane.model.duties import AUTOSCALE, CASCADES, POOLS, STAGES
from mesh.errors import PeerUnavailable, RpcError, StoreError
from mesh.leadership import leaders
from mesh.leadership_state import LeaderRecord
from mesh.membership import Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Clock, Transport
from mesh.store.interface import StateStore
from penstock.v1 import (
    autoscale_pb2,
    autoscale_pb2_grpc,
    cascade_pb2,
    cascade_pb2_grpc,
    frontend_pb2,
    frontend_pb2_grpc,
    monitor_pb2,
    monitor_pb2_grpc,
    planner_pb2,
    planner_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    stages_pb2,
    stages_pb2_grpc,
)

log = logging.getLogger(__name__)

DEADLINE_S: Final = 0.8
"""Of each question: a process that hangs is seen to, and holds up nobody's next look."""
SNAPSHOT_AGE_MS: Final = 900
"""Of what a scheduler may have shown another frontend's console already."""
PLACEMENTS: Final = 20
OPTIONS: Final = 6
CONTROL_ROLES: Final = ("frontend", "gateway", "scheduler", "monitor", "cascade", "predictor", "planner")

T = TypeVar("T")


class Members(Protocol):
    """Who is in the mesh, as `mesh.membership.Directory` knows it."""

    def members(self, role: str) -> tuple[Member, ...]:
        """Those with a role, by id."""

    @property
    def missing(self) -> int:
        """Members whose record is gone, and that may be alive."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Stands where an answer would."""

    why: str


@dataclass(frozen=True, slots=True)
class Look:
    """What was heard of the mesh at one moment. Mappings by member are by member id."""

    at_unix_ms: int
    members: tuple[Member, ...]
    """Of all roles."""
    missing_members: int
    leaders: Mapping[str, LeaderRecord] | Unanswered
    """By duty."""
    unwell: Mapping[str, str]
    """Why a process of the control plane does not serve, by ROLE/MEMBER."""
    snapshot: scheduler_pb2.GetSnapshotResponse | Unanswered
    cluster: monitor_pb2.GetClusterResponse | Unanswered
    policies: Mapping[str, scheduler_pb2.GetPolicyResponse | Unanswered]
    reschedulers: Mapping[str, scheduler_pb2.GetReschedulerResponse | Unanswered]
    placements: Mapping[str, scheduler_pb2.ListPlacementsResponse | Unanswered]
    frontends: Mapping[str, frontend_pb2.GetFrontendStatusResponse | Unanswered]
    running: Mapping[str, frontend_pb2.ListFrontendRequestsResponse | Unanswered]
    ended: Mapping[str, frontend_pb2.ListEndedResponse | Unanswered]
    """Since the look before."""
    cascades: cascade_pb2.ListCascadesResponse | Unanswered
    plans: planner_pb2.ListPlansResponse | Unanswered
    stages: stages_pb2.GetStagesResponse | Unanswered
    scaled: autoscale_pb2.ListScaledResponse | Unanswered
    deployments: Sequence[DeploymentStatus] | Unanswered


@dataclass(slots=True)
class Collector:
    """Looks at the mesh from one process; keeps a channel to each process that it asks. `stop` it."""

    members: Members
    store: StateStore
    transport: Transport
    clock: Clock
    deadline_s: float = DEADLINE_S
    _channels: dict[tuple[str, str], grpc.aio.Channel] = field(default_factory=dict)
    """By incarnation and address."""
    _heard: dict[str, int] = field(default_factory=dict)
    """Number of the last ended request, by the frontend's incarnation."""

    async def look(self) -> Look:
        """Takes `deadline_s` for each process to stand in for another one, at most. Never raises for one that does not
        answer: that is said in its place."""
        everyone = [member for role in (*CONTROL_ROLES, "worker") for member in self.members.members(role)]
        await self._forget_channels(everyone)
        leading = await self._within(leaders(self.store), "the state store")
        health = health_pb2.HealthCheckRequest()
        frontends, schedulers = self.members.members("frontend"), self.members.members("scheduler")
        asked = [member for member in everyone if member.role not in ("worker", "frontend", "scheduler")]
        places = scheduler_pb2.ListPlacementsRequest(limit=PLACEMENTS, options=OPTIONS)
        snapshot = scheduler_pb2.GetSnapshotRequest(max_age_ms=SNAPSHOT_AGE_MS)
        scheduler, frontend = scheduler_pb2_grpc.SchedulerStub, frontend_pb2_grpc.FrontendStub
        planner, stages = planner_pb2_grpc.PlannerStub, stages_pb2_grpc.StagePlannerStub
        router, monitor = cascade_pb2_grpc.CascadeStub, monitor_pb2_grpc.MonitorStub
        scaler = autoscale_pb2_grpc.AutoscalerStub
        answers: Sequence[Any] = await asyncio.gather(
            self._one("scheduler", leading, POOLS, scheduler, "GetSnapshot", snapshot),
            self._one("monitor", leading, "", monitor, "GetCluster", monitor_pb2.GetClusterRequest()),
            self._each(schedulers, scheduler, "GetPolicy", lambda _: scheduler_pb2.GetPolicyRequest()),
            self._each(schedulers, scheduler, "GetRescheduler", lambda _: scheduler_pb2.GetReschedulerRequest()),
            self._each(schedulers, scheduler, "ListPlacements", lambda _: places),
            self._each(frontends, frontend, "GetStatus", lambda _: frontend_pb2.GetFrontendStatusRequest()),
            self._each(frontends, frontend, "ListRequests", lambda _: frontend_pb2.ListFrontendRequestsRequest()),
            self._each(frontends, frontend, "ListEnded", self._since),
            self._one("cascade", leading, "", router, "ListCascades", cascade_pb2.ListCascadesRequest()),
            self._one("planner", leading, CASCADES, planner, "ListPlans", planner_pb2.ListPlansRequest()),
            self._one("planner", leading, STAGES, stages, "GetStages", stages_pb2.GetStagesRequest()),
            self._one("planner", leading, AUTOSCALE, scaler, "ListScaled", autoscale_pb2.ListScaledRequest()),
            self._within(self._deployments(), "the state store"),
            asyncio.gather(*(self._ask(each, health_pb2_grpc.HealthStub, "Check", health) for each in asked)),
        )
        *heard, healths = answers
        self._note_ended(frontends, heard[7])
        return Look(
            int(1000 * self.clock.unix_s()),
            tuple(everyone),
            self.members.missing,
            leading,
            {
                f"{member.role}/{member.member_id}": why
                for member, why in zip(asked, map(_ill, healths), strict=False)
                if why
            },
            *heard,
        )

    async def stop(self) -> None:
        """Close all channels."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))

    async def ask(
        self, member: Member, stub: Callable[[Any], Any], method: str, request: Any, deadline_s: float
    ) -> Any:
        """One call to a member, over the channel that is kept. Raises RpcError."""
        key = (member.incarnation_id, member.address)
        if key not in self._channels:
            self._channels[key] = open_channel(self.transport, member.address, member.role)
        try:
            return await getattr(stub(self._channels[key]), method)(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, f"{member.role} {member.member_id} at {member.address}") from error

    def in_turn(self, role: str, leading: Mapping[str, LeaderRecord] | Unanswered, duty: str) -> list[Member]:
        """Whom to ask, the leader of the duty first."""
        leader = leading.get(duty) if isinstance(leading, Mapping) else None
        first = "" if leader is None else leader.member_id
        return sorted(self.members.members(role), key=lambda member: member.member_id != first)

    async def ask_leader(
        self, role: str, duty: str, stub: Callable[[Any], Any], method: str, request: Any, deadline_s: float
    ) -> Any:
        """One call to the leader of a duty, or to the next of its role if that cannot be reached. Raises RpcError."""
        leading = await self._within(leaders(self.store), "the state store")
        failure: RpcError = PeerUnavailable(f"no {role} has joined the mesh; is `penstock serve {role}` running?")
        for member in self.in_turn(role, leading, duty):
            try:
                return await self.ask(member, stub, method, request, deadline_s)
            except PeerUnavailable as error:
                failure = error
        raise failure

    async def _ask(self, member: Member, stub: Callable[[Any], Any], method: str, request: Any) -> Any:
        try:
            return await self.ask(member, stub, method, request, self.deadline_s)
        except RpcError as error:
            return Unanswered(str(error))

    async def _each(
        self, members: Sequence[Member], stub: Callable[[Any], Any], method: str, request: Callable[[Member], Any]
    ) -> dict[str, Any]:
        answers = await asyncio.gather(*(self._ask(member, stub, method, request(member)) for member in members))
        return {member.member_id: answer for member, answer in zip(members, answers, strict=True)}

    async def _one(
        self,
        role: str,
        leading: Mapping[str, LeaderRecord] | Unanswered,
        duty: str,
        stub: Callable[[Any], Any],
        method: str,
        request: Any,
    ) -> Any:
        """The first answer of a role's members, the leader asked first."""
        answer: Any = Unanswered(f"no {role} has joined the mesh")
        for member in self.in_turn(role, leading, duty):
            answer = await self._ask(member, stub, method, request)
            if not isinstance(answer, Unanswered):
                break
        return answer

    async def _within(self, work: Awaitable[T], whom: str) -> T | Unanswered:
        try:
            async with asyncio.timeout(self.deadline_s):
                return await work
        except TimeoutError:
            return Unanswered(f"{whom} did not answer within {self.deadline_s:g} s")
        except StoreError as error:
            return Unanswered(str(error))

    async def _deployments(self) -> Sequence[DeploymentStatus]:
        found = []
        for entry in (await self.store.range(DEPLOYMENTS_PREFIX)).entries:
            try:
                found.append(msgspec.json.decode(entry.value, type=DeploymentStatus))
            except msgspec.MsgspecError as error:
                log.warning("a deployment record cannot be read", extra={"key": entry.key, "error": str(error)})
        return found

    def _since(self, member: Member) -> frontend_pb2.ListEndedRequest:
        return frontend_pb2.ListEndedRequest(after=self._heard.get(member.incarnation_id, 0))

    def _note_ended(self, frontends: Sequence[Member], answers: Mapping[str, Any]) -> None:
        heard = {}
        for member in frontends:
            answer = answers[member.member_id]
            before = self._heard.get(member.incarnation_id, 0)
            heard[member.incarnation_id] = before if isinstance(answer, Unanswered) else answer.last
        self._heard = heard

    async def _forget_channels(self, members: Sequence[Member]) -> None:
        present = {(member.incarnation_id, member.address) for member in members}
        gone = [self._channels.pop(key) for key in list(self._channels) if key not in present]
        await asyncio.gather(*(channel.close() for channel in gone))


def _ill(answer: Any) -> str:
    if isinstance(answer, Unanswered):
        return answer.why
    serves = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "" if serves else "it says that it does not serve"
