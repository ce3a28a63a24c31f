"""`penstock cascade`: show, set and remove cascades."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from rich.table import Table

from controlplane.model.cascade_record import MAX_SPECULATE_ROOM, SPECULATE_ROOM
from controlplane.planning.cascade.workload import WorkloadHeader
from mesh.membership import Member
from penstock.v1 import cascade_pb2, cascade_pb2_grpc
from services.cascade.judges.parse import with_rubric
from services.cli.connection import (
    answering_member,
    call,
    given_before,
    mesh_directory,
    mesh_store,
    only_member,
    run,
    same_mesh,
    store_options,
)
from services.cli.finite_range import FiniteRange
from services.cli.planning.plan_table import accepted_from
from services.cli.proto_json import plain
from services.cli.terminal_table import print_table

_json = click.option("--json", "as_json", is_flag=True, callback=given_before, help="Print JSON.")


@click.group(invoke_without_command=True)
@store_options
@_json
@click.pass_context
def command(ctx: click.Context, /, store: str | None, mesh: str, as_json: bool) -> None:
    """Virtual models: the smallest tier answers, a judge scores, and what scores too little goes to the next tier.

    Without a subcommand: show those in force.
    """
    if ctx.invoked_subcommand is not None:
        return
    listed = run(_call(store, mesh, "ListCascades", cascade_pb2.ListCascadesRequest()))
    if as_json:
        click.echo(json.dumps(listed["cascades"], indent=2))
    elif listed["cascades"]:
        print_table(_table(listed["cascades"]))
    else:
        click.echo(f"no cascade is configured; set one up with `penstock cascade set{same_mesh(store, mesh)}`")


@command.command("set")
@click.argument("name", metavar="CASCADE")
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
    "--label",
    default="",
    help="Who says of sampled answers whether they are right: exact, model:NAME, endpoint:MODEL@URL, "
    "preference:model:NAME (is it no worse than the largest tier's?) or one of an installed package. Plans need it "
    "where the judge is confidence.",
)
@click.option(
    "--rubric",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Your own instructions to those of --judge and --label that are models, in place of Penstock's.",
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
@click.option(
    "--speculate",
    type=FiniteRange(min=0, max=1),
    default=0.0,
    show_default=True,
    help="Begin the next tier ahead once an answer will be escalated with at least this probability; 0: never.",
)
@click.option(
    "--speculate-room",
    type=click.IntRange(1, MAX_SPECULATE_ROOM),
    default=SPECULATE_ROOM,
    show_default=True,
    help="Begin a tier ahead only while one of its instances has fewer requests of the frontend than this.",
)
@store_options
@_json
def set_cascade(store: str | None, mesh: str, as_json: bool, rubric: Path | None, **fields: Any) -> None:
    """Create or replace CASCADE, a virtual model, for requests to come; those under way keep what they began with.

    A judge that is a model takes options behind a question mark: draws=N for one that gives no log-probabilities,
    think=TOKENS for one that thinks before it judges.
    """
    instructions = "" if rubric is None else rubric.read_text(encoding="utf-8").strip()
    fields["judges"] = [with_rubric(judge, instructions) for judge in fields["judges"]]
    fields["label"] = with_rubric(fields["label"], instructions)
    cascade = cascade_pb2.CascadeDescription(**fields, rubric=instructions)
    workers = run(_set(store, mesh, cascade))
    unserved = unserved_tiers(cascade.tiers, workers)
    if as_json:
        click.echo(json.dumps({**plain(cascade), "unserved_tiers": unserved}, indent=2))
    else:
        click.echo(f"clients can ask for {cascade.name}: {' -> '.join(cascade.tiers)}")
    if unserved:
        click.echo(f"WARNING: no instance serves {', '.join(unserved)} now; tiers are names of models", err=True)


@command.command("export")
@click.argument("name", metavar="CASCADE")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Where to write the workload, for `penstock plan cascade --workload`.",
)
@click.option(
    "--texts",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write prompts and answers, for people to label (`penstock plan cascade --labels`). Cascade routers "
    "keep them if they are started with --sample-texts.",
)
@store_options
@_json
def export(name: str, out: Path, texts: Path | None, store: str | None, mesh: str, as_json: bool) -> None:
    """Write the last samples of CASCADE, which every tier has answered and its judge has scored."""
    exported = run(_exported(store, mesh, name, texts is not None))
    if not exported.lines:
        raise click.ClickException(
            f"no request of {name} has been answered by every tier yet: samples are taken while requests come, and "
            "their answers known at the end of a window (penstock serve cascade --sample-window-s)"
        )
    out.write_bytes(b"\n".join((msgspec.json.encode(exported.header), *exported.lines)) + b"\n")
    if texts is not None:
        texts.write_bytes(b"\n".join(exported.texts) + b"\n")
    header = exported.header
    labels = f"labelled by {header.label}" if header.label else "without labels"
    if as_json:
        click.echo(json.dumps({"samples": len(exported.lines), **msgspec.to_builtins(header)}))
    else:
        click.echo(f"{len(exported.lines)} samples of {name}, scored by {header.judge}, {labels}, are in {out}")


@command.command("remove")
@click.argument("name", metavar="CASCADE")
@store_options
@_json
def remove(name: str, store: str | None, mesh: str, as_json: bool) -> None:
    """Remove CASCADE; requests under way are answered."""
    run(_call(store, mesh, "RemoveCascade", cascade_pb2.RemoveCascadeRequest(name=name)))
    if as_json:
        click.echo(json.dumps({"removed": name}, indent=2))
        return
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


class _Exported(NamedTuple):
    header: WorkloadHeader
    lines: list[bytes]
    texts: list[bytes]


async def _exported(store: str | None, mesh: str, name: str, with_texts: bool) -> _Exported:
    """What all routers have sampled; each sees its own part of the requests."""
    lines: list[bytes] = []
    texts: list[bytes] = []
    rate_per_s = 0.0
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        only_member(directory, "cascade")
        for router in directory.members("cascade"):
            page = await _page(router, name, with_texts, 0)
            rate_per_s += page.rate_per_s
            while page.samples:
                lines += [sample.line for sample in page.samples]
                texts += [sample.text for sample in page.samples]
                page = await _page(router, name, with_texts, page.samples[-1].number)
    return _Exported(WorkloadHeader(rate_per_s, tuple(page.tiers), page.judge, page.label), lines, texts)


async def _page(router: Member, name: str, with_texts: bool, after: int) -> cascade_pb2.ExportSamplesResponse:
    request = cascade_pb2.ExportSamplesRequest(cascade=name, texts=with_texts, after=after)
    page: cascade_pb2.ExportSamplesResponse = await call(router, cascade_pb2_grpc.CascadeStub, "ExportSamples", request)
    return page


async def _call(store: str | None, mesh: str, method: str, request: Any) -> dict[str, Any]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        router = await answering_member(directory, opened, "cascade")
        return plain(await call(router, cascade_pb2_grpc.CascadeStub, method, request))


def _table(cascades: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in (
        "cascade",
        "tiers",
        "accepted from",
        "judges",
        "labelled by",
        "without a judge",
        "ahead from",
        "thresholds from",
    ):
        table.add_column(name)
    for cascade in cascades:
        plan = int(cascade["plan_revision"])
        table.add_row(
            cascade["name"],
            " -> ".join(cascade["tiers"]),
            ", ".join(map(accepted_from, cascade["thresholds"])),
            ", ".join(cascade["judges"]),
            cascade["label"] or "nobody",
            cascade["without_judge"],
            f"{cascade['speculate']:g}" if cascade.get("speculate") else "never",
            f"plan {plan}" if plan else "an operator",
        )
    return table
