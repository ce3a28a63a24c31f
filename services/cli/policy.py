"""`penstock policy [NAME]`: show or switch the placement policy."""

import json
from typing import Any

import click

from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.cli.connection import call, mesh_directory, mesh_store, only_member, run, store_options
from services.cli.proto_json import plain


@click.command()
@click.argument("name", required=False)
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str | None, store: str | None, mesh: str, as_json: bool) -> None:
    """Show the placement policy, or switch to NAME; requests that were placed already stay where they are."""
    policy = run(_policy(store, mesh, name))
    if as_json:
        click.echo(json.dumps(policy, indent=2))
        return
    click.echo(f"{policy['policy']} (available: {', '.join(policy['available'])})")
    if policy["fallback"]:
        click.echo(f"{policy['fallback']} stands in for it: {policy['fallback_reason']}")


async def _policy(store: str | None, mesh: str, name: str | None) -> dict[str, Any]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        scheduler = only_member(directory, "scheduler")
        stub = scheduler_pb2_grpc.SchedulerStub
        if name is not None:
            await call(scheduler, stub, "SetPolicy", scheduler_pb2.SetPolicyRequest(policy=name))
        return plain(await call(scheduler, stub, "GetPolicy", scheduler_pb2.GetPolicyRequest()))
