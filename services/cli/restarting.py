"""Restarts members of a mesh one at a time: ends a process in peace and waits until the mesh is as whole as before."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.errors import DeadlineExceeded, RpcError
from mesh.membership import Directory, Member
from mesh.runtime import Transport
from penstock.v1 import frontend_pb2, frontend_pb2_grpc, member_pb2, member_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.cli.connection import AS_OPERATOR, call

POLL_S = 0.1
ROLLING_ORDER = ("operator", "planner", "cascade", "predictor", "monitor", "scheduler", "worker", "gateway", "frontend")
"""What requests pass through comes last, so that a release that cannot start is found before it costs capacity."""
LONE_DRAIN_S = 0.0
"""For the only worker of a model: its requests can go nowhere else, and while they finish nobody takes new ones. Cut at
once, all of them wait just as long as the process takes to start."""


class Restarted(msgspec.Struct, frozen=True):
    """One restarted member, with its incarnations before and after."""

    role: str
    member_id: str
    former_incarnation_id: str
    incarnation_id: str
    left_s: float
    """From the order until the new incarnation joined: drain, end and start."""
    serving_s: float
    """From the order until the whole mesh used it again."""


@dataclass(frozen=True, slots=True)
class RestartTimeouts:
    """How long one restart may take, to drain and to start again."""

    drain_s: float | None
    """What running work is given; None: as much as the process gives it after SIGTERM, and to the only worker of a
    model `LONE_DRAIN_S`."""
    start_s: float
    """From the end of the drain until the new incarnation serves."""


async def restart(
    directory: Directory,
    member: Member,
    timeouts: RestartTimeouts,
    say: Callable[[str], None],
    transport: Transport = AS_OPERATOR,
) -> Restarted:
    """Drain `member`, have it end, and return once its next incarnation serves and nothing is missing in the mesh that
    was there before.

    Raises RpcError where it cannot be reached or refuses, DeadlineExceeded where it does not come back in time.
    """
    clock = asyncio.get_running_loop().time
    began_s, name = clock(), f"{member.role} {member.member_id}"
    missing_before = await missing(directory, transport)
    request = member_pb2.RestartRequest(incarnation_id=member.incarnation_id, drain_s=timeouts.drain_s)
    if timeouts.drain_s is None and is_lone_worker(member, directory.members("worker")):
        say(
            f"{member.member_id} is the only worker of {member.attributes.get('model')}: requests wait until it is back"
        )
        request.drain_s = LONE_DRAIN_S
    answer = await call(member, member_pb2_grpc.MemberStub, "Restart", request, transport=transport)
    say(f"{name} drains for {answer.drain_s:g} s at most and ends")
    if not answer.supervised:
        say(f"{name} is not run by `penstock up`: its container's restart policy or init system has to start it again")
    limit_s = answer.drain_s + timeouts.start_s
    why = f"{name} has not joined the mesh again"
    try:
        async with asyncio.timeout(limit_s):
            successor = await _successor(directory, member)
            left_s = clock() - began_s
            say(f"{name} has joined again after {left_s:.1f} s")
            while lacking := sorted(await missing(directory, transport) - missing_before):
                why = lacking[0]
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DeadlineExceeded(f"{why}, {limit_s:g} s after its restart was ordered; see its log") from None
    return Restarted(
        member.role,
        member.member_id,
        member.incarnation_id,
        successor.incarnation_id,
        round(left_s, 3),
        round(clock() - began_s, 3),
    )


async def restart_in_turn(
    directory: Directory,
    members: Sequence[Member],
    timeouts: RestartTimeouts,
    say: Callable[[str], None],
    transport: Transport = AS_OPERATOR,
) -> list[Restarted]:
    """One after another; who has left the mesh before its turn is passed over. The first that fails ends it, because
    going on would take down the rest as well."""
    done: list[Restarted] = []
    clock = asyncio.get_running_loop().time
    began_s = clock()
    for number, member in enumerate(members, 1):
        if member not in directory.members(member.role):
            say(f"{number}/{len(members)}: {member.role} {member.member_id} has left meanwhile; passed over")
            continue
        left_s = (clock() - began_s) / len(done) * (len(members) - number + 1) if done else 0.0
        still = f"; all of it still takes about {left_s:.0f} s" if done else ""
        say(f"{number}/{len(members)}: {member.role} {member.member_id}{still}")
        done.append(await restart(directory, member, timeouts, say, transport))
    return done


def in_rolling_order(members: Collection[Member]) -> list[Member]:
    """All members, as `ROLLING_ORDER` has their roles; roles that it does not know come first."""
    rank = {role: number for number, role in enumerate(ROLLING_ORDER)}
    return sorted(members, key=lambda member: (rank.get(member.role, -1), member.role, member.member_id))


def is_lone_worker(member: Member, workers: Collection[Member]) -> bool:
    """Whether no other worker serves its model."""
    model = member.attributes.get("model")
    return member.role == "worker" and not any(
        other.attributes.get("model") == model and other.member_id != member.member_id for other in workers
    )


async def missing(directory: Directory, transport: Transport = AS_OPERATOR) -> frozenset[str]:
    """What keeps members from being used, each a sentence: who does not serve, which scheduler does not place on which
    worker, which frontend is not connected to which worker or does without its scheduler."""
    everyone = [member for role in (*ROLLING_ORDER,) for member in directory.members(role)]
    found = await asyncio.gather(
        *(_health(member, transport) for member in everyone),
        *(_scheduler(member, directory, transport) for member in directory.members("scheduler")),
        *(_frontend(member, directory, transport) for member in directory.members("frontend")),
    )
    return frozenset(sentence for sentences in found for sentence in sentences)


async def _successor(directory: Directory, member: Member) -> Member:
    """The next incarnation of a member, once it has joined."""
    while True:
        for other in directory.members(member.role):
            if other.member_id == member.member_id and other.incarnation_id != member.incarnation_id:
                return other
        await asyncio.sleep(POLL_S)


async def _health(member: Member, transport: Transport) -> list[str]:
    try:
        request = health_pb2.HealthCheckRequest()
        answer = await call(member, health_pb2_grpc.HealthStub, "Check", request, transport=transport)
    except RpcError:
        return [f"{member.role} {member.member_id} does not answer"]
    serves = answer.status == health_pb2.HealthCheckResponse.SERVING
    return [] if serves else [f"{member.role} {member.member_id} does not serve"]


async def _scheduler(member: Member, directory: Directory, transport: Transport) -> list[str]:
    try:
        request = scheduler_pb2.GetSnapshotRequest()
        snapshot = await call(member, scheduler_pb2_grpc.SchedulerStub, "GetSnapshot", request, transport=transport)
    except RpcError:
        return [f"scheduler {member.member_id} does not answer"]
    ready = {instance.instance_id for instance in snapshot.instances if instance.state == "ready"}
    unused = [worker.member_id for worker in directory.members("worker") if worker.member_id not in ready]
    unsynced = [] if snapshot.synced else [f"scheduler {member.member_id} has no news of a monitor"]
    return [*unsynced, *(f"scheduler {member.member_id} does not place on {worker}" for worker in unused)]


async def _frontend(member: Member, directory: Directory, transport: Transport) -> list[str]:
    try:
        request = frontend_pb2.GetFrontendStatusRequest()
        status = await call(member, frontend_pb2_grpc.FrontendStub, "GetStatus", request, transport=transport)
    except RpcError:
        return [f"frontend {member.member_id} does not answer"]
    linked = {(worker.instance_id, worker.incarnation_id) for worker in status.workers if worker.connected}
    workers = directory.members("worker")
    apart = [each.member_id for each in workers if (each.member_id, each.incarnation_id) not in linked]
    alone = [f"frontend {member.member_id} does without a scheduler"] if status.placement_fallback else []
    return [*alone, *(f"frontend {member.member_id} is not connected to {worker}" for worker in apart)]
