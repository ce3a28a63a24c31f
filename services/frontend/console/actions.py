"""What operators do from the console; each is what a command of `penstock` does, and says which."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.duties import AUTOSCALE, CASCADES, POOLS, RESCHEDULER
from mesh.errors import PeerUnavailable, RpcError
from mesh.membership import Member
from penstock.v1 import (
    autoscale_pb2,
    autoscale_pb2_grpc,
    frontend_pb2,
    frontend_pb2_grpc,
    member_pb2,
    member_pb2_grpc,
    planner_pb2,
    planner_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from services.frontend.console.collector import CONTROL_ROLES, Collector

CALL_DEADLINE_S: Final = 3.0
MOVE_DEADLINE_S: Final = 60.0

SCALE_OPTIONS: Final[Mapping[str, str]] = {
    "ttft_ms": "--slo-ttft-ms",
    "tpot_ms": "--slo-tpot-ms",
    "e2e_ms": "--slo-e2e-ms",
    "capacity_per_s": "--capacity",
}
"""Of `penstock autoscale set`, where they are not named as the fields of the record."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Parameters = Annotated[dict[str, float], msgspec.Meta(max_length=32)]


class SetPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="policy", tag_field="action"):
    """Place by another policy from now on."""

    name: Name
    parameters: Parameters = {}

    @property
    def command(self) -> str:
        """The same, typed."""
        return _command("policy", self.name, *_settings(self.parameters))


class SetRescheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rescheduler", tag_field="action"):
    """Move running requests in another way, or not at all."""

    mode: Name
    parameters: Parameters = {}

    @property
    def command(self) -> str:
        """The same, typed."""
        return _command("rescheduler", self.mode, *_settings(self.parameters))


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drain", tag_field="action"):
    """Move everything away from an instance, then end it."""

    instance: Name

    @property
    def command(self) -> str:
        """The same, typed."""
        return _command("drain", self.instance)


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="restart", tag_field="action"):
    """Drain a process and have it started again."""

    role: Name
    member: Name

    @property
    def command(self) -> str:
        """The same, typed."""
        return _command("restart", self.member, "--role", self.role)


class Migrate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="migrate", tag_field="action"):
    """Move a running request."""

    request: Name
    to: Name

    @property
    def command(self) -> str:
        """The same, typed."""
        return _command("migrate", self.request, "--to", self.to)


class SetGoal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="goal", tag_field="action"):
    """Say what the plans of a cascade are to reach: a quality, or a latency."""

    cascade: Name
    gpus: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    tiers: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=16)]
    quality: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    latency_s: Annotated[float, msgspec.Meta(gt=0)] | None = None

    @property
    def command(self) -> str:
        """The same, typed."""
        tiers = [word for tier in self.tiers for word in ("--tier", tier)]
        quality = [] if self.quality is None else ["--quality", f"{self.quality:g}"]
        latency = [] if self.latency_s is None else ["--latency-s", f"{self.latency_s:g}"]
        return _command("plan", "goal", self.cascade, "--gpus", str(self.gpus), *tiers, *quality, *latency)


class SetAutoscale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="autoscale", tag_field="action"):
    """Have a model's replicas follow its load; what was set for it before is replaced."""

    policy: AutoscalePolicy

    @property
    def command(self) -> str:
        """The same, typed."""
        words = []
        for name, value in msgspec.to_builtins(self.policy).items():
            option = SCALE_OPTIONS.get(name, f"--{name.replace('_', '-')}")
            if name == "kinds":
                words += [word for kind in self.policy.kinds for word in ("--kind", kind.option)]
            elif name != "model":
                words += [option] if value is True else [option, f"{value:g}"]
        return _command("autoscale", "set", self.policy.model, *words)


class RemoveAutoscale(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="autoscale_remove", tag_field="action"
):
    """Scale a model no more; its replicas stay as they are."""

    model: Name

    @property
    def command(self) -> str:
        """The same, typed."""
        return _command("autoscale", "remove", self.model)


Action = SetPolicy | SetRescheduler | Drain | Restart | Migrate | SetGoal | SetAutoscale | RemoveAutoscale


class Done(msgspec.Struct, frozen=True):
    """What came of an action."""

    message: str
    command: str


@dataclass(frozen=True, slots=True)
class Operator:
    """Carries out actions. All raise RpcError where the mesh refuses or cannot."""

    collector: Collector

    async def carry_out(self, action: Action) -> Done:
        """Do it; returns as soon as the process that it is for has taken it on, a move when it has ended."""
        match action:
            case SetPolicy():
                message = await self._set_policy(action)
            case SetRescheduler():
                message = await self._set_rescheduler(action)
            case Drain():
                message = await self._drain(action)
            case Restart():
                message = await self._restart(action)
            case Migrate():
                message = await self._migrate(action)
            case SetGoal():
                message = await self._set_goal(action)
            case SetAutoscale(policy):
                ask = autoscale_pb2.SetAutoscaleRequest(policy_json=msgspec.json.encode(policy).decode())
                await self._ask_scaler("SetAutoscale", ask)
                message = f"{policy.model} is scaled so from the next decision on, within {policy.interval_s:g} s"
            case RemoveAutoscale(model):
                answer = await self._ask_scaler("RemoveAutoscale", autoscale_pb2.RemoveAutoscaleRequest(model=model))
                message = f"{model} keeps the replicas that it has" if answer.removed else f"{model} was not scaled"
        return Done(message, action.command)

    async def _set_policy(self, action: SetPolicy) -> str:
        request = scheduler_pb2.SetPolicyRequest(policy=action.name, parameters=action.parameters)
        stub = scheduler_pb2_grpc.SchedulerStub
        answer = await self.collector.ask_leader("scheduler", POOLS, stub, "SetPolicy", request, CALL_DEADLINE_S)
        return f"requests are placed by {answer.policy} from now on"

    async def _set_rescheduler(self, action: SetRescheduler) -> str:
        request = scheduler_pb2.SetReschedulerRequest(mode=action.mode, parameters=action.parameters)
        stub = scheduler_pb2_grpc.SchedulerStub
        answer = await self.collector.ask_leader(
            "scheduler", RESCHEDULER, stub, "SetRescheduler", request, CALL_DEADLINE_S
        )
        return f"the rescheduler is {answer.mode} from now on"

    async def _drain(self, action: Drain) -> str:
        member, request = self._member("worker", action.instance), worker_pb2.DrainRequest(migrate=True)
        answer = await self.collector.ask(member, worker_pb2_grpc.WorkerStub, "Drain", request, CALL_DEADLINE_S)
        return f"{action.instance} drains: {answer.running_requests} requests run on it; it ends behind the last"

    async def _restart(self, action: Restart) -> str:
        member = self._member(action.role, action.member)
        request = member_pb2.RestartRequest(incarnation_id=member.incarnation_id)
        answer = await self.collector.ask(member, member_pb2_grpc.MemberStub, "Restart", request, CALL_DEADLINE_S)
        by = "is started again" if answer.supervised else "its container or init system has to start it again"
        return f"{action.role} {action.member} drains for {answer.drain_s:g} s at most, ends, and {by}"

    async def _migrate(self, action: Migrate) -> str:
        self._member("worker", action.to)
        request = worker_pb2.MigrateRequest(request_id=action.request, target_instance_id=action.to)
        source = self._member("worker", await self._instance_of(action.request))
        answer = await self.collector.ask(source, worker_pb2_grpc.WorkerStub, "Migrate", request, MOVE_DEADLINE_S)
        if not answer.moved:
            raise RpcError(f"{action.request} stays on {source.member_id}: {answer.reason}")
        moved = f"{answer.blocks} KV blocks in {answer.rounds} rounds, paused for {answer.paused_ms:.1f} ms"
        return f"{action.request} moved from {source.member_id} to {action.to}: {moved}"

    async def _set_goal(self, action: SetGoal) -> str:
        goal = planner_pb2.CascadeGoal(cascade=action.cascade, gpus=action.gpus, tiers=action.tiers, replan=True)
        if action.quality is not None:
            goal.quality = action.quality
        if action.latency_s is not None:
            goal.latency_s = action.latency_s
        request, stub = planner_pb2.SetGoalRequest(goal=goal), planner_pb2_grpc.PlannerStub
        await self.collector.ask_leader("planner", CASCADES, stub, "SetGoal", request, CALL_DEADLINE_S)
        return f"{action.cascade} is planned from the next workload on"

    async def _ask_scaler(self, method: str, request: Any) -> Any:
        stub = autoscale_pb2_grpc.AutoscalerStub
        return await self.collector.ask_leader("planner", AUTOSCALE, stub, method, request, CALL_DEADLINE_S)

    async def _instance_of(self, request_id: str) -> str:
        """Where a choice runs, as some frontend knows. Raises PeerUnavailable."""
        ask, stub = frontend_pb2.ListFrontendRequestsRequest(), frontend_pb2_grpc.FrontendStub
        for frontend in self.collector.members.members("frontend"):
            try:
                listed = await self.collector.ask(frontend, stub, "ListRequests", ask, CALL_DEADLINE_S)
            except RpcError:
                continue  # another one may have it
            for request in listed.requests:
                if request.request_id == request_id:
                    return str(request.instance_id)
        raise PeerUnavailable(f"request {request_id} runs at no frontend that answers; it may have ended")

    def _member(self, role: str, member_id: str) -> Member:
        if role not in (*CONTROL_ROLES, "worker"):
            raise PeerUnavailable(f"there is no role {role!r}")
        for member in self.collector.members.members(role):
            if member.member_id == member_id:
                return member
        raise PeerUnavailable(f"there is no {role} {member_id!r} in the mesh")


def _command(*words: str) -> str:
    return shlex.join(("penstock", *words))


def _settings(parameters: Mapping[str, float]) -> list[str]:
    return [word for name, value in sorted(parameters.items()) for word in ("--set", f"{name}={value:g}")]


def decode_action(body: bytes) -> Action:
    """Raises msgspec.ValidationError, or its DecodeError, that says what is wrong with it."""
    action: Any = msgspec.json.decode(body, type=Action)
    checked: Action = action
    return checked
