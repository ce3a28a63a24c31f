"""`penstock cascade`: show, set and remove cascades."""

import json
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mesh.membership import Member
from penstock.v1 import cascade_pb2, cascade_pb2_grpc
from services.cli.connection import answering_member, call, mesh_directory, mesh_store, run, store_options
from services.cli.finite_range import FiniteRange
from services.cli.planning.plan_table import accepted_from
from services.cli.proto_json import plain


@click.group(invoke_without_command=True)
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, /, store: str | None, mesh: str, as_json: bool) -> None:
    """Virtual models: the smallest tier answers, a judge scores, and what scores too little goes to the next tier.

    Without a subcommand: show those in force.
    """
    ctx.obj = (store, mesh)
    if ctx.invoked_subcommand is not None:
        return
    listed = run(_call(store, mesh, "ListCascades", cascade_pb2.ListCascadesRequest()))
    if as_json:
        click.echo(json.dumps(listed["cascades"], indent=2))
    elif listed["cascades"]:
        Console().print(_table(listed["cascades"]))
    else:
        click.echo("no cascade is configured; set one up with `penstock cascade set`")


@command.command("set")
@click.argument("name")
@click.option("--tier", "tiers", multiple=True, required=True, help="A model, smallest first; repeatable.")
@click.option(
    "--threshold",
    "thresholds",
    multiple=True,
    type=FiniteRange(min=0),
    help="Score from which on a tier's answer is accepted; one for each tier but the last. Above 100: never.",
)
@click.option(
    "--judge",
    "judges",
    multiple=True,
    default=("confidence",),
    show_default=True,
    help="confidence, exact, model:NAME, endpoint:MODEL@URL or one of an installed package (`penstock plugins`); "
    "repeatable, the next where one gives no score.",
)
@click.option(
    "--without-judge",
    type=click.Choice(["escalate", "accept"]),
    default="escalate",
    show_default=True,
    help="What to do with an answer that no judge could score.",
)
@click.option(
    "--expected-s",
    multiple=True,
    type=FiniteRange(min=0),
    help="What a tier's answer takes, for deadlines; default: as measured.",
)
@click.pass_obj
def set_cascade(mesh_of: tuple[str | None, str], /, **fields: Any) -> None:
    """Create or replace the cascade NAME, for requests to come; those under way keep what they began with."""
    cascade = cascade_pb2.CascadeDescription(**fields)
    workers = run(_set(*mesh_of, cascade))
    click.echo(f"clients can ask for {cascade.name}: {' -> '.join(cascade.tiers)}")
    if unserved := unserved_tiers(cascade.tiers, workers):
        click.echo(f"WARNING: no instance serves {', '.join(unserved)} now; tiers are names of models", err=True)


@command.command("remove")
@click.argument("name")
@click.pass_obj
def remove(mesh_of: tuple[str | None, str], /, name: str) -> None:
    """Remove the cascade NAME; requests under way are answered."""
    run(_call(*mesh_of, "RemoveCascade", cascade_pb2.RemoveCascadeRequest(name=name)))
    click.echo(f"{name} is gone; its models can still be asked for by their own names")


def unserved_tiers(tiers: Iterable[str], workers: Iterable[Member]) -> list[str]:
    """Those that no worker serves: mistyped, or yet to come."""
    served = {worker.attributes.get("model") for worker in workers}
    return [tier for tier in tiers if tier not in served]


async def _set(store: str | None, mesh: str, cascade: cascade_pb2.CascadeDescription) -> tuple[Member, ...]:
    """Returns the workers of the mesh."""
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        router = await answering_member(directory, opened, "cascade")
        request = cascade_pb2.SetCascadeRequest(cascade=cascade)
        await call(router, cascade_pb2_grpc.CascadeStub, "SetCascade", request)
        return directory.members("worker")


async def _call(store: str | None, mesh: str, method: str, request: Any) -> dict[str, Any]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        router = await answering_member(directory, opened, "cascade")
        return plain(await call(router, cascade_pb2_grpc.CascadeStub, method, request))


def _table(cascades: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("cascade", "tiers", "accepted from", "judges", "without a judge", "thresholds from"):
        table.add_column(name)
    for cascade in cascades:
        plan = int(cascade["plan_revision"])
        table.add_row(
            cascade["name"],
            " -> ".join(cascade["tiers"]),
            ", ".join(map(accepted_from, cascade["thresholds"])),
            ", ".join(cascade["judges"]),
            cascade["without_judge"],
            f"plan {plan}" if plan else "an operator",
        )
    return table
