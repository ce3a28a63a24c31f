"""What operators do to a mesh while it serves, as values for a timeline.

Who is meant is said so that it holds whatever else happens: members by name, a running request by a number that is
reduced by how many run then.
"""

import asyncio
from typing import Final, Literal, TypeAlias

import msgspec

from controlplane.model.duties import CASCADES, POOLS, RESCHEDULER, STAGES
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier, encode_plan
from fault_simulation.operator import Operator
from mesh.errors import PeerUnavailable
from mesh.membership import Directory, Member
from penstock.v1 import (
    cascade_pb2,
    cascade_pb2_grpc,
    planner_pb2,
    planner_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    stages_pb2,
    stages_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from services.cli.migrate import move
from services.cli.restart import chosen
from services.cli.restarting import RestartTimeouts, restart_in_turn

MIGRATION_DEADLINE_S: Final = 60.0
START_PATIENCE_S: Final = 60.0
LOOK_S: Final = 0.1

Parameters = tuple[tuple[str, float], ...]


class Migrate(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`penstock migrate`: one of the requests that run then."""

    pick: int
    """Of all engine requests on workers other than `to`, by name; reduced by how many there are."""
    to: str
    stop_and_copy: bool = False

    async def carry_out(self, operator: Operator) -> str:
        """See `Action`."""
        async with operator.mesh() as (_, directory):
            running = [each for each in await _running(operator, directory) if each[1].member_id != self.to]
            if not running:
                return "no request runs elsewhere"
            request_id, source = running[self.pick % len(running)]
            order = worker_pb2.MigrateRequest(target_instance_id=self.to, stop_and_copy=self.stop_and_copy)
            transport = operator.runtime.transport
            moved = await move(source, request_id, order, MIGRATION_DEADLINE_S, transport)
        if not moved["moved"]:
            return f"{request_id} stays on {source.member_id}: {moved['reason']}"
        return f"{request_id} moved from {source.member_id} with {moved['blocks']} blocks"


class Drain(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`penstock drain`, and some time after its end the worker is started again."""

    worker: str
    back_after_s: float

    async def carry_out(self, operator: Operator) -> str:
        """See `Action`."""
        async with operator.mesh() as (_, directory):
            member = _member(directory, "worker", self.worker)
            request = worker_pb2.DrainRequest(migrate=True)
            answer = await operator.call(member, worker_pb2_grpc.WorkerStub, "Drain", request)
            while member in directory.members("worker"):  # noqa: ASYNC110  the directory has no event for one member
                await asyncio.sleep(LOOK_S)
            while operator.machines.runs(self.worker, member.incarnation_id):  # noqa: ASYNC110  it ends its process
                await asyncio.sleep(LOOK_S)
        await asyncio.sleep(self.back_after_s)
        await operator.bring_back(self.worker)
        return f"{answer.running_requests} requests ran there"


class Restart(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`penstock restart MEMBER`."""

    member: str
    role: str
    drain_s: float | None = None

    async def carry_out(self, operator: Operator) -> str:
        """See `Action`."""
        return await _restart(operator, self.member, self.role, self.drain_s)


class RollingRestart(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`penstock restart --rolling [--role ROLE]`."""

    role: str | None = None
    drain_s: float | None = None

    async def carry_out(self, operator: Operator) -> str:
        """See `Action`."""
        return await _restart(operator, None, self.role, self.drain_s)


class SwitchPolicy(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`penstock policy NAME --set ...`."""

    name: str
    parameters: Parameters = ()

    async def carry_out(self, operator: Operator) -> str:
        """See `Action`."""
        request = scheduler_pb2.SetPolicyRequest(policy=self.name, parameters=dict(self.parameters))
        await operator.ask("scheduler", POOLS, scheduler_pb2_grpc.SchedulerStub, "SetPolicy", request)
        return "switched"


class SwitchRescheduler(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`penstock rescheduler MODE --set ...`."""

    mode: Literal["off", "current", "predicted", "trajectories"]
    parameters: Parameters = ()

    async def carry_out(self, operator: Operator) -> str:
        """See `Action`."""
        request = scheduler_pb2.SetReschedulerRequest(mode=self.mode, parameters=dict(self.parameters))
        await operator.ask("scheduler", RESCHEDULER, scheduler_pb2_grpc.SchedulerStub, "SetRescheduler", request)
        return "switched"


class SwitchStages(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`penstock stages on|off`; needs a planner."""

    enabled: bool
    fewest_lengths: int = 0
    """0: the default."""
    replan_s: float = 0.0
    """0: the default."""

    async def carry_out(self, operator: Operator) -> str:
        """See `Action`."""
        request = stages_pb2.SetStagesRequest(
            enabled=self.enabled, fewest_lengths=self.fewest_lengths, replan_s=self.replan_s
        )
        await operator.ask("planner", STAGES, stages_pb2_grpc.StagePlannerStub, "SetStages", request)
        return "switched"


class PlanStages(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`penstock stages plan`: new boundaries from the lengths of the requests that have ended."""

    async def carry_out(self, operator: Operator) -> str:
        """See `Action`."""
        request = stages_pb2.PlanStagesRequest()
        answer = await operator.ask("planner", STAGES, stages_pb2_grpc.StagePlannerStub, "PlanStages", request)
        return "; ".join(f"{each.model}: {each.obstacle or len(each.stages)}" for each in answer.models)


class SetCascade(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`penstock cascade set`: a cascade, or other thresholds for it; needs a cascade router."""

    name: str
    tiers: tuple[str, ...]
    thresholds: tuple[float, ...]
    judges: tuple[str, ...] = ("confidence",)
    without_judge: Literal["escalate", "accept"] = "escalate"
    speculate: float = 0.0

    async def carry_out(self, operator: Operator) -> str:
        """See `Action`."""
        cascade = cascade_pb2.CascadeDescription(**{name: getattr(self, name) for name in self.__struct_fields__})
        request = cascade_pb2.SetCascadeRequest(cascade=cascade)
        await operator.ask("cascade", "", cascade_pb2_grpc.CascadeStub, "SetCascade", request)
        return "set"


class ApplyPlan(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`penstock plan apply`: thresholds and numbers of instances, which the supervisor follows; needs a planner, and
    the cascade to be set up with these tiers."""

    cascade: str
    instances: tuple[tuple[str, int], ...]
    """Of each tier, smallest first."""
    thresholds: tuple[float, ...]

    async def carry_out(self, operator: Operator) -> str:
        """See `Action`."""
        request = planner_pb2.ApplyPlanRequest(plan_json=encode_plan(self.plan).decode())
        answer = await operator.ask("planner", CASCADES, planner_pb2_grpc.PlannerStub, "ApplyPlan", request)
        return f"revision {answer.revision}"

    @property
    def plan(self) -> CascadePlan:
        """As `penstock plan cascade` would have written it."""
        tiers = tuple(
            PlannedTier(model, count, (PlannedReplicas(count),) if count else (), 1.0 if count else 0.0, 10.0)
            for model, count in self.instances
        )
        return CascadePlan(
            self.cascade, tiers, self.thresholds, 50.0, 10.0, 1.0, sum(count for _, count in self.instances)
        )


OperatorAction: TypeAlias = (
    Migrate
    | Drain
    | Restart
    | RollingRestart
    | SwitchPolicy
    | SwitchRescheduler
    | SwitchStages
    | PlanStages
    | SetCascade
    | ApplyPlan
)


async def _running(operator: Operator, directory: Directory) -> list[tuple[str, Member]]:
    """Engine requests and their workers, by name."""
    members = directory.members("worker")
    ask = worker_pb2.ListRequestsRequest()
    lists = await asyncio.gather(
        *(operator.call(each, worker_pb2_grpc.WorkerStub, "ListRequests", ask) for each in members)
    )
    found = [
        (each.request_id, member)
        for member, each_list in zip(members, lists, strict=True)
        for each in each_list.requests
    ]
    return sorted(found, key=lambda each: (each[0], each[1].member_id))


async def _restart(operator: Operator, member_id: str | None, role: str | None, drain_s: float | None) -> str:
    said: list[str] = []
    async with operator.mesh() as (_, directory):
        members = chosen(directory, member_id, role)
        timeouts = RestartTimeouts(drain_s, START_PATIENCE_S)
        done = await restart_in_turn(directory, members, timeouts, said.append, operator.runtime.transport)
    return ", ".join(f"{each.member_id} in {each.serving_s:.1f} s" for each in done)


def _member(directory: Directory, role: str, name: str) -> Member:
    for member in directory.members(role):
        if member.member_id == name:
            return member
    raise PeerUnavailable(f"there is no {role} {name!r} in the mesh")
