"""`penstock status`: roles, instances, load, policy, leases."""

import asyncio
import json
from collections.abc import Callable
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
from penstock.v1 import (
    frontend_pb2,
    frontend_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from services.cli.autoscale.shown import gather_autoscale
from services.cli.connection import answering_member, call, mesh_directory, mesh_store, run, store_options
from services.cli.finite_range import FiniteRange
from services.cli.lora import gather_adapters
from services.cli.planning.deployments import deployment_status, read_deployments
from services.cli.planning.promises import gather_promises
from services.cli.prediction_status import gather_prediction
from services.cli.proto_json import plain
from services.cli.rank_status import gather_ranks
from services.cli.stages import gather_stages

ROLE_ORDER = ("frontend", "gateway", "cascade", "predictor", "scheduler", "monitor", "planner", "operator", "worker")


@click.command()
@click.option("--watch", "watch_s", type=FiniteRange(0.2, 3600), metavar="SECONDS", is_flag=False, flag_value=2.0,
              help="Show it again and again, every 2 seconds unless told otherwise, until Ctrl-C.")  # fmt: skip
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, a line each time.")
def command(watch_s: float | None, store: str | None, mesh: str, as_json: bool) -> None:
    """Show roles, instances, load, policy and leases of a running mesh."""
    from services.cli.status_tables import print_status

    def show(status: dict[str, Any]) -> None:
        if not as_json:
            print_status(status, clears=watch_s is not None)
        else:
            click.echo(json.dumps(status, indent=2 if watch_s is None else None))

    try:
        run(_show(store, mesh, watch_s, show))
    except KeyboardInterrupt:
        return  # how one leaves a watch


async def _show(store: str | None, mesh: str, watch_s: float | None, show: Callable[[dict[str, Any]], None]) -> None:
    """Once, or every `watch_s` seconds."""
    show(await gather_status(store, mesh))
    while watch_s is not None:
        await asyncio.sleep(watch_s)
        show(await gather_status(store, mesh))


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
        ranks = await gather_ranks(directory)
        schedulers = await asyncio.gather(*(_scheduler(member) for member in directory.members("scheduler")))
        gateways = await asyncio.gather(*(_gateway(member) for member in directory.members("gateway")))
        stages = await gather_stages(directory, opened)
        deployments = await read_deployments(opened)
        adapters = await gather_adapters(directory, opened, snapshot)
        promises = await gather_promises(directory, opened)
        autoscale = await gather_autoscale(directory, opened)
        return {
            "roles": roles,
            "instances": _instances(directory, snapshot, ranks),
            "policy": policy,
            "rescheduler": rescheduler,
            "schedulers": schedulers,
            "leaders": {duty: _leader(record) for duty, record in sorted(leading.items())},
            "frontends": frontends,
            "gateways": gateways,
            "prediction": prediction,
            "stages": stages,
            "adapters": adapters,
            "deployments": [deployment_status(record) for record in deployments],
            "promises": promises,
            "autoscale": autoscale,
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
        scheme = "https" if member.attributes.get("tls") else "http"
        return {"member_id": member.member_id, "http_scheme": scheme, **plain(reply)}
    except RpcError as error:
        return {"member_id": member.member_id, "error": str(error)}


async def _gateway(member: Member) -> dict[str, Any]:
    try:
        request = gateway_pb2.GetGatewayStatusRequest()
        reply = await call(member, gateway_pb2_grpc.GatewayStub, "GetStatus", request)
        return {"member_id": member.member_id, "address": member.address, **plain(reply)}
    except RpcError as error:
        return {"member_id": member.member_id, "error": str(error)}


_FACTS = ("engine", "model", "phase", "tensor_parallel", "pipeline_parallel", "data_parallel")


def _instances(
    directory: Directory, snapshot: dict[str, Any], ranks: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The scheduler's view of each worker; one it does not know is listed as such."""
    seen = {instance["instance_id"]: instance for instance in snapshot.get("instances", [])}
    rows: list[dict[str, Any]] = []
    for member in directory.members("worker"):
        row = seen.pop(member.member_id, {"instance_id": member.member_id, "state": "not in the snapshot"})
        facts = {name: member.attributes.get(name, "") for name in _FACTS}
        told = {"ranks": ranks[member.member_id]} if member.member_id in ranks else {}
        rows.append({**row, **facts, **told})
    return rows + list(seen.values())
