"""`penstock status`: roles, instances, load, policy, leases."""

import asyncio
import json
from typing import Any

import click
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controlplane.model.duties import POOLS, RESCHEDULER
from mesh.errors import RpcError
from mesh.leadership import leaders
from mesh.leadership_state import LeaderRecord
from mesh.membership import MEMBERS_PREFIX, Directory, Member
from mesh.store.interface import StateStore
from penstock.v1 import frontend_pb2, frontend_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.cli.connection import answering_member, call, mesh_directory, mesh_store, run, store_options
from services.cli.planning.deployments import deployment_status, read_deployments
from services.cli.prediction_status import gather_prediction
from services.cli.proto_json import plain
from services.cli.stages import gather_stages

ROLE_ORDER = ("frontend", "cascade", "predictor", "scheduler", "monitor", "planner", "worker")


@click.command()
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(store: str | None, mesh: str, as_json: bool) -> None:
    """Show roles, instances, load, policy and leases of a running mesh."""
    status = run(gather_status(store, mesh))
    if as_json:
        click.echo(json.dumps(status, indent=2))
        return
    from services.cli.status_tables import print_status

    print_status(status)


async def gather_status(store: str | None, mesh: str) -> dict[str, Any]:
    """What the command prints; a process that does not answer is listed with its error."""
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        incarnations = await _leases(opened)
        leading = await leaders(opened)
        members = [member for role in ROLE_ORDER for member in directory.members(role)]
        roles, snapshot, policy, rescheduler, frontends, prediction = await asyncio.gather(
            asyncio.gather(*(_role(member, incarnations, leading) for member in members)),
            _ask_scheduler(directory, opened, POOLS, "GetSnapshot", scheduler_pb2.GetSnapshotRequest()),
            _ask_scheduler(directory, opened, POOLS, "GetPolicy", scheduler_pb2.GetPolicyRequest()),
            _ask_scheduler(directory, opened, RESCHEDULER, "GetRescheduler", scheduler_pb2.GetReschedulerRequest()),
            asyncio.gather(*(_frontend(member) for member in directory.members("frontend"))),
            gather_prediction(directory),
        )
        schedulers = await asyncio.gather(*(_scheduler(member) for member in directory.members("scheduler")))
        stages = await gather_stages(directory, opened)
        deployments = await read_deployments(opened)
        return {
            "roles": roles,
            "instances": _instances(directory, snapshot),
            "policy": policy,
            "rescheduler": rescheduler,
            "schedulers": schedulers,
            "leaders": {duty: _leader(record) for duty, record in sorted(leading.items())},
            "frontends": frontends,
            "prediction": prediction,
            "stages": stages,
            "deployments": [deployment_status(record) for record in deployments],
            "synced": snapshot.get("synced", False),
        }


async def _leases(store: StateStore) -> dict[str, str]:
    """The lease that each member's record hangs on."""
    listing = await store.range(MEMBERS_PREFIX)
    return {entry.key: entry.incarnation_id for entry in listing.entries}


def _leader(record: LeaderRecord) -> dict[str, Any]:
    return {"member_id": record.member_id, "epoch": record.epoch, "since_unix_ms": record.since_unix_ms}


async def _role(member: Member, leases: dict[str, str], leading: dict[str, LeaderRecord]) -> dict[str, Any]:
    health = "unreachable"
    try:
        reply = await call(member, health_pb2_grpc.HealthStub, "Check", health_pb2.HealthCheckRequest())
        health = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status).lower()
    except RpcError as error:
        health = f"unreachable: {error}"
    return {
        "role": member.role,
        "member_id": member.member_id,
        "health": health,
        "address": member.address,
        "metrics_address": member.metrics_address,
        "incarnation_id": member.incarnation_id,
        "lease": leases.get(member.key, ""),
        "leads": sorted(duty for duty, record in leading.items() if record.incarnation_id == member.incarnation_id),
        "attributes": dict(member.attributes),
    }


async def _scheduler(member: Member) -> dict[str, Any]:
    """What one scheduler places by, and how old its knowledge is."""
    stub = scheduler_pb2_grpc.SchedulerStub
    try:
        snapshot = await call(member, stub, "GetSnapshot", scheduler_pb2.GetSnapshotRequest())
        policy = await call(member, stub, "GetPolicy", scheduler_pb2.GetPolicyRequest())
    except RpcError as error:
        return {"member_id": member.member_id, "error": str(error)}
    return {
        "member_id": member.member_id,
        "policy": snapshot.policy,
        "fallback_reason": policy.fallback_reason,
        "is_standby": policy.is_standby,
        "synced": snapshot.synced,
        "age_ms": snapshot.age_ms,
        "instances": len(snapshot.instances),
        "peers": list(snapshot.peers),
    }


async def _ask_scheduler(
    directory: Directory, store: StateStore, duty: str, method: str, request: Message
) -> dict[str, Any]:
    try:
        scheduler = await answering_member(directory, store, "scheduler", duty)
        return plain(await call(scheduler, scheduler_pb2_grpc.SchedulerStub, method, request))
    except RpcError as error:
        return {"error": str(error)}


async def _frontend(member: Member) -> dict[str, Any]:
    try:
        request = frontend_pb2.GetFrontendStatusRequest()
        reply = await call(member, frontend_pb2_grpc.FrontendStub, "GetStatus", request)
        return {"member_id": member.member_id, **plain(reply)}
    except RpcError as error:
        return {"member_id": member.member_id, "error": str(error)}


def _instances(directory: Directory, snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """The scheduler's view of each worker; one it does not know is listed as such."""
    seen = {instance["instance_id"]: instance for instance in snapshot.get("instances", [])}
    rows: list[dict[str, Any]] = []
    for member in directory.members("worker"):
        row = seen.pop(member.member_id, {"instance_id": member.member_id, "state": "not in the snapshot"})
        facts = {name: member.attributes.get(name, "") for name in ("engine", "model", "phase")}
        rows.append({**row, **facts})
    return rows + list(seen.values())
