"""`penstock plan goal|show|apply`: what the running mesh's planner is to reach, and what it has planned."""

import json
from pathlib import Path
from typing import Any

import click

from controlplane.model.duties import CASCADES
from controlplane.planning.cascade.plan import decode_plan
from mesh.errors import ConfigurationError
from penstock.v1 import planner_pb2, planner_pb2_grpc
from services.cli.connection import answering_member, call, mesh_directory, mesh_store, run, same_mesh, store_options
from services.cli.finite_range import FiniteRange
from services.cli.planning.deployments import deployment_lines, deployments_of, read_deployments
from services.cli.planning.goal_options import judge_gpu_option, latency_options, probability_option
from services.cli.planning.plan_table import plan_table
from services.cli.planning.promises import gather_promises, promise_line
from services.cli.proto_json import plain
from services.cli.terminal_table import print_table

_OPTIONS = {"gpus": "--gpus", "tiers": "--tier", "quality": "--quality", "latency_s": "--latency-s"}
"""What makes a goal, by name."""


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command("goal")
@click.argument("cascade")
@click.option("--gpus", type=click.IntRange(1, 4096), help="Of all tiers together. Needed, as --tier is.")
@click.option("--quality", type=FiniteRange(0, 100), help="Hold this mean quality as fast as possible.")
@probability_option
@latency_options
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    help="MODEL@DEVICE[:DTYPE] of the catalogue, or profile:ENGINE/MODEL/DEVICE[/tpN[-ppM]] of a measured one (several "
    "after commas: one for each shape of replica); one for each tier of the cascade, smallest first.",
)
@click.option(
    "--judge-s",
    type=FiniteRange(min=0),
    help="One judgement takes.  [default: 0 with the judges confidence and exact, else 1]",
)
@judge_gpu_option
@click.option(
    "--replan/--no-replan", default=True, show_default=True, help="Plan anew whenever the workload has moved."
)
@click.option("--remove", is_flag=True, help="Have CASCADE planned no more; the plan in force stays.")
@store_options
@_json
def goal(store: str | None, mesh: str, remove: bool, as_json: bool, **fields: Any) -> None:
    """Say what the plans of CASCADE are to reach. Planning begins with the next sampled workload."""
    if remove:
        _remove_goal(store, mesh, as_json, **fields)
        return
    missing = [option for option in ("gpus", "tiers") if not fields[option]]
    if missing:
        raise click.UsageError(f"a goal needs {' and '.join(_OPTIONS[option] for option in missing)}")
    request = planner_pb2.SetGoalRequest(
        goal=planner_pb2.CascadeGoal(**{name: value for name, value in fields.items() if value is not None})
    )
    run(_call(store, mesh, "SetGoal", request))
    if as_json:
        click.echo(json.dumps(plain(request.goal), indent=2))
        return
    watch = f"penstock plan show{same_mesh(store, mesh)}"
    click.echo(f"{fields['cascade']} is planned from the next workload on; watch it with: {watch}")


def _remove_goal(store: str | None, mesh: str, as_json: bool, cascade: str, **fields: Any) -> None:
    if any(fields[option] for option in _OPTIONS):
        raise click.UsageError(f"--remove goes without {', '.join(_OPTIONS.values())}")
    answer = run(_call(store, mesh, "RemoveGoal", planner_pb2.RemoveGoalRequest(cascade=cascade)))
    if not answer["removed"]:
        raise ConfigurationError(f"{cascade} has no goal; see penstock plan show{same_mesh(store, mesh)}")
    if as_json:
        click.echo(json.dumps({"removed": cascade}, indent=2))
        return
    click.echo(f"{cascade} is planned no more; the plan in force stays")


@click.command("show")
@store_options
@_json
def show(store: str | None, mesh: str, as_json: bool) -> None:
    """Show goals, plans in force, whether their instances run, and what the planner made of the last workload."""
    listed = run(_plans(store, mesh))
    if as_json:
        click.echo(json.dumps(listed, indent=2))
        return
    if not listed:
        click.echo("no cascade has a goal or a plan; see `penstock plan goal --help`")
    for status in listed:
        if status["plan_json"]:
            print_table(plan_table(decode_plan(status["plan_json"].encode())))
            for line in deployment_lines(status["deployments"]):
                click.echo(f"{status['cascade']}: {line}")
        if status["promise"]:
            click.echo(promise_line(status["promise"]))
        click.echo(f"{status['cascade']}: {status['verdict']}")


@click.command("apply")
@click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@store_options
@_json
def apply(plan: Path, store: str | None, mesh: str, as_json: bool) -> None:
    """Put the plan in the file PLAN (`penstock plan cascade --json`) into force.

    Thresholds hold at once for requests to come. `penstock up` starts and drains instances to match; elsewhere
    `penstock plan export` writes what your deployment is to be told.
    """
    content = plan.read_bytes()
    made = decode_plan(content)
    answer = run(_call(store, mesh, "ApplyPlan", planner_pb2.ApplyPlanRequest(plan_json=content.decode())))
    if as_json:
        click.echo(json.dumps({"cascade": made.name, "revision": answer["revision"]}, indent=2))
    else:
        click.echo(f"{made.name}: plan {answer['revision']} is in force")


async def _plans(store: str | None, mesh: str) -> list[dict[str, Any]]:
    """What the planner says of every cascade, and supervisors of its instances."""
    listed: list[dict[str, Any]] = (await _call(store, mesh, "ListPlans", planner_pb2.ListPlansRequest()))["plans"]
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        records = await read_deployments(opened)
        promises = {promise["cascade"]: promise for promise in await gather_promises(directory, opened)}
    for status in listed:
        status["promise"] = promises.get(status["cascade"])
        plan = decode_plan(status["plan_json"].encode()) if status["plan_json"] else None
        models = [tier.model for tier in plan.tiers] if plan else []
        status["deployments"] = deployments_of(status["cascade"], models, status["revision"], records)
    return listed


async def _call(store: str | None, mesh: str, method: str, request: Any) -> dict[str, Any]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        planner = await answering_member(directory, opened, "planner", CASCADES)
        return plain(await call(planner, planner_pb2_grpc.PlannerStub, method, request))
