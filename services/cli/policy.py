"""`penstock policy [NAME]`: show or switch the placement policy."""

import json
from typing import Any

import click

from controlplane.model.duties import POOLS
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.cli.connection import answering_member, call, mesh_directory, mesh_store, run, store_options
from services.cli.proto_json import plain


@click.command()
@click.argument("name", required=False)
@click.option("--set", "settings", multiple=True, help="A parameter of the policy, such as lambda=0.7; repeatable.")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str | None, settings: tuple[str, ...], store: str | None, mesh: str, as_json: bool) -> None:
    """Show the placement policy, or switch to NAME; requests that were placed already stay where they are.

    Parameters that are not --set have their defaults.
    """
    if settings and name is None:
        raise click.UsageError("--set needs the NAME of a policy: penstock policy NAME --set PARAMETER=NUMBER")
    policy = run(_policy(store, mesh, name, parameters_of(settings)))
    if as_json:
        click.echo(json.dumps(policy, indent=2))
        return
    parameters = "".join(f" {parameter}={value:g}" for parameter, value in sorted(policy["parameters"].items()))
    click.echo(f"{policy['policy']}{parameters} (available: {', '.join(policy['available'])})")
    for unusable in policy["unusable"]:
        click.echo(f"cannot be used: {unusable}", err=True)
    if policy["profile"]:
        click.echo(f"predicts by the profile {policy['profile']}")
    if policy["fallback"]:
        click.echo(f"{policy['fallback']} stands in for it: {policy['fallback_reason']}")


def parameters_of(settings: tuple[str, ...]) -> dict[str, float]:
    """`lambda=0.7` and the like, as names and values."""
    parameters: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name in parameters:
            raise click.BadParameter(f"{name} is set twice; give each parameter once")
        try:
            parameters[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise click.BadParameter(f"{setting!r} is not PARAMETER=NUMBER, such as lambda=0.7")
    return parameters


async def _policy(store: str | None, mesh: str, name: str | None, parameters: dict[str, float]) -> dict[str, Any]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        scheduler = await answering_member(directory, opened, "scheduler", POOLS)
        stub = scheduler_pb2_grpc.SchedulerStub
        if name is not None:
            request = scheduler_pb2.SetPolicyRequest(policy=name, parameters=parameters)
            await call(scheduler, stub, "SetPolicy", request)
        return plain(await call(scheduler, stub, "GetPolicy", scheduler_pb2.GetPolicyRequest()))
