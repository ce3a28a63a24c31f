"""`penstock stages [on|off|plan]`: which instances serve which lengths."""

import json
import time
from typing import Any

import click

from controlplane.model.duties import STAGES
from mesh.errors import RpcError
from mesh.membership import Directory
from mesh.store.interface import StateStore
from penstock.v1 import stages_pb2, stages_pb2_grpc
from services.cli.connection import answering_member, call, mesh_directory, mesh_store, run, store_options
from services.cli.finite_range import FiniteRange
from services.cli.proto_json import plain

SHOWN_MOVES = 8
METHODS = ("exact", "prefill", "heuristic", "chain", "single")
REFINEMENTS = ("quality", "quantity", "memory", "frozen")


@click.command()
@click.argument("action", required=False, type=click.Choice(["on", "off", "plan"]))
@click.option("--method", type=click.Choice(METHODS), help="With on: how a plan is sought.")
@click.option("--refinement", type=click.Choice(REFINEMENTS), help="With on: what boundaries are moved by.")
@click.option("--fewest-lengths", type=click.IntRange(1), help="With on: ended requests that a plan needs.")
@click.option("--replan-s", type=FiniteRange(1), help="With on: seconds between plans.")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    action: str | None,
    method: str | None,
    refinement: str | None,
    fewest_lengths: int | None,
    replan_s: float | None,
    store: str | None,
    mesh: str,
    as_json: bool,
) -> None:
    """Show the stages of a running mesh: their instances, their ranges of lengths, how boundaries have moved.

    `on` and `off` switch stages for all models, `plan` makes new plans now. Requests are placed by stage only under
    the placement policy `stages`: see `penstock policy stages`.
    """
    given = (method, refinement, fewest_lengths, replan_s)
    if action != "on" and any(each is not None for each in given):
        raise click.UsageError("--method, --refinement, --fewest-lengths and --replan-s go with `penstock stages on`")
    request = stages_pb2.SetStagesRequest(
        enabled=action == "on",
        method=method or "",
        refinement=refinement or "",
        fewest_lengths=fewest_lengths or 0,
        replan_s=replan_s or 0.0,
    )
    status = run(_stages(store, mesh, action, request))
    if as_json:
        click.echo(json.dumps(status, indent=2))
        return
    for line in stage_lines(status, moves=SHOWN_MOVES):
        click.echo(line)


async def gather_stages(directory: Directory, store: StateStore) -> dict[str, Any]:
    """The planner's view, or its error."""
    try:
        return await _ask(directory, store, "GetStages", stages_pb2.GetStagesRequest())
    except RpcError as error:
        return {"error": str(error)}


def stage_lines(status: dict[str, Any], *, moves: int = 0) -> list[str]:
    """Stages as lines of text, with the last `moves` moves of boundaries."""
    if "error" in status:
        return [f"stages: {status['error']}"]
    if not status["enabled"]:
        return ["stages: off"]
    lines = []
    for model in status["models"]:
        lines += _model_lines(model, moves)
    return lines or ["stages: on, no instance yet"]


def _model_lines(model: dict[str, Any], moves: int) -> list[str]:
    obstacle = f"; {model['obstacle']}" if model["obstacle"] else ""
    if not model["revision"]:
        return [f"stages of {model['model']}: none yet, all instances are one{obstacle}"]
    age_s = max(0.0, time.time() - model["planned_unix_ms"] / 1000)
    lines = [
        f"stages of {model['model']}: plan {model['revision']}, made {age_s:.0f} s ago from {model['lengths']} "
        f"requests and {model['in_flight']:.1f} in flight; quality model: {model['profile']}{obstacle}"
    ]
    lines += [_stage_line(number, stage) for number, stage in enumerate(model["stages"], start=1)]
    recent = model["boundary_moves"][-moves:] if moves else []
    return lines + [_move_line(move) for move in recent]


def _stage_line(number: int, stage: dict[str, Any]) -> str:
    instances = ", ".join(each["instance_id"] + ("" if each["alive"] else " (gone)") for each in stage["instances"])
    if not any(each["alive"] for each in stage["instances"]):
        return f"  stage {number}: {instances}; covered by its neighbour"
    last = f"{stage['last_tokens']}" if stage["last_tokens"] else "any"
    planned = f", planned {stage['planned_last_tokens']}" if stage["planned_last_tokens"] else ""
    return f"  stage {number}: {stage['first_tokens']} to {last} tokens{planned}: {instances}"


def _move_line(move: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(move["at_unix_ms"] / 1000))
    end = f"{move['boundary_tokens']:.0f} tokens" if move["boundary_tokens"] else "none"
    return f"  {at} the range of {move['instance_id']} ends at: {end}"


async def _stages(
    store: str | None, mesh: str, action: str | None, setting: stages_pb2.SetStagesRequest
) -> dict[str, Any]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        match action:
            case "plan":
                return await _ask(directory, opened, "PlanStages", stages_pb2.PlanStagesRequest())
            case "on" | "off":
                return await _ask(directory, opened, "SetStages", setting)
            case _:
                return await _ask(directory, opened, "GetStages", stages_pb2.GetStagesRequest())


async def _ask(directory: Directory, store: StateStore, method: str, request: Any) -> dict[str, Any]:
    planner = await answering_member(directory, store, "planner", STAGES)
    return plain(await call(planner, stages_pb2_grpc.StagePlannerStub, method, request))
