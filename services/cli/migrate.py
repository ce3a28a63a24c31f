"""`penstock migrate REQUEST_ID --to INSTANCE`: move a running request."""

import asyncio
import json
import sys
from typing import Any

import click
import grpc

from mesh.errors import RpcError
from mesh.membership import Directory, Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from penstock.v1 import worker_pb2, worker_pb2_grpc
from services.cli.connection import AS_OPERATOR, call, mesh_directory, mesh_store, run, store_options
from services.cli.proto_json import plain

EXIT_NOT_MOVED = 1


@click.command()
@click.argument("request_id")
@click.option("--to", "target", required=True, help="Instance that is to have the request.")
@click.option("--stop-and-copy", is_flag=True, help="Copy all of it while it stands still, instead of live.")
@click.option("--timeout-s", default=60.0, show_default=True, help="Seconds after which it is given up.")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    request_id: str, target: str, stop_and_copy: bool, timeout_s: float, store: str | None, mesh: str, as_json: bool
) -> None:
    """Move REQUEST_ID (the x-request-id of a response) to another instance while it runs; all its choices, if it has
    several. The client sees one unbroken stream; where the migration is refused, the request goes on where it is."""
    request = worker_pb2.MigrateRequest(target_instance_id=target, stop_and_copy=stop_and_copy)
    moves = run(_migrate(store, mesh, request_id, request, timeout_s))
    if as_json:
        click.echo(json.dumps(moves, indent=2))
    else:
        for move in moves:
            click.echo(_line(move))
    if not all(move["moved"] for move in moves):
        sys.exit(EXIT_NOT_MOVED)


async def _migrate(
    store: str | None, mesh: str, request_id: str, request: worker_pb2.MigrateRequest, timeout_s: float
) -> list[dict[str, Any]]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        found = await _find(directory, request_id)
        if not found:
            raise RpcError(f"request {request_id} runs on no instance; it may have ended")
        return list(await asyncio.gather(*(move(member, each, request, timeout_s) for member, each in found)))


async def _find(directory: Directory, request_id: str) -> list[tuple[Member, str]]:
    """The engine requests of a client's request, and where they run. Raises RpcError for a worker without an answer."""
    members = directory.members("worker")
    ask = worker_pb2.ListRequestsRequest()
    lists = await asyncio.gather(*(call(each, worker_pb2_grpc.WorkerStub, "ListRequests", ask) for each in members))
    return [
        (member, running.request_id)
        for member, answer in zip(members, lists, strict=True)
        for running in answer.requests
        if running.request_id == request_id or running.request_id.startswith(f"{request_id}-")
    ]


async def move(
    source: Member,
    request_id: str,
    request: worker_pb2.MigrateRequest,
    timeout_s: float,
    transport: Transport = AS_OPERATOR,
) -> dict[str, Any]:
    """Order `source` to move one of its engine requests as `request` says; returns the answer, with where from and
    where to. Raises RpcError."""
    ordered = worker_pb2.MigrateRequest()
    ordered.CopyFrom(request)
    ordered.request_id = request_id
    async with open_channel(transport, source.address, source.role) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer = await stub.Migrate(ordered, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, f"worker {source.member_id} at {source.address}") from error
    target = request.target_instance_id
    return {"request_id": request_id, "from": source.member_id, "to": target, **plain(answer)}


def _line(move: dict[str, Any]) -> str:
    if not move["moved"]:
        return f"{move['request_id']} stays on {move['from']}: {move['reason']}"
    return (
        f"{move['request_id']} moved from {move['from']} to {move['to']}: {move['blocks']} KV blocks in "
        f"{move['rounds']} rounds, paused for {move['paused_ms']:.1f} ms"
    )
