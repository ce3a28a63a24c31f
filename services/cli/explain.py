"""`penstock explain REQUEST`: the indicators and scores behind a placement, and the moves that followed."""

import asyncio
import json
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import click

from mesh.errors import PeerUnavailable, RpcError
from mesh.membership import Member
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.cli.connection import call, mesh_directory, mesh_store, only_member, run, store_options
from services.cli.proto_json import plain
from services.cli.rescheduler import order_line

WIDTH_WITHOUT_TERMINAL = 160


@click.command()
@click.argument("request_id")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(request_id: str, store: str | None, mesh: str, as_json: bool) -> None:
    """Show why REQUEST_ID (an answer's x-penstock-request-id) was placed where it was, and where it was moved since."""
    explanation = run(_explain(store, mesh, request_id))
    if as_json:
        click.echo(json.dumps(explanation, indent=2))
    else:
        _print(explanation)


async def _explain(store: str | None, mesh: str, request_id: str) -> dict[str, Any]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        only_member(directory, "scheduler")
        asked = directory.members("scheduler")
        answers = await asyncio.gather(*(_ask(scheduler, request_id) for scheduler in asked))
    return merged(request_id, dict(zip((each.member_id for each in asked), answers, strict=True)))


async def _ask(scheduler: Member, request_id: str) -> dict[str, Any] | RpcError:
    request = scheduler_pb2.ExplainRequest(request_id=request_id)
    try:
        return plain(await call(scheduler, scheduler_pb2_grpc.SchedulerStub, "Explain", request))
    except RpcError as error:
        return error


def merged(request_id: str, answers: Mapping[str, dict[str, Any] | RpcError]) -> dict[str, Any]:
    """One explanation of what each scheduler knows, by its name: the last placement, and the moves that any of them
    ordered. Raises PeerUnavailable if none knows the request, with what they said."""
    known = {name: answer for name, answer in answers.items() if not isinstance(answer, RpcError)}
    placements = [(answer["placed_unix_ms"], name) for name, answer in known.items() if answer["chosen_instance_id"]]
    if not placements:
        said = "; ".join(str(answer) for answer in answers.values() if isinstance(answer, RpcError))
        raise PeerUnavailable(f"no scheduler knows the placement of request {request_id!r}: {said}")
    _, name = max(placements, key=lambda placement: int(placement[0]))
    moves = sorted((move for answer in known.values() for move in answer["moves"]), key=_ordered_ms)
    return {**known[name], "moves": moves, "scheduler": name}


def _ordered_ms(move: dict[str, Any]) -> int:
    return int(move["ordered_unix_ms"])


def _print(explanation: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    scores = explanation["scores"]
    indicators = list(dict.fromkeys(name for score in scores for name in score["indicators"]))
    title = f"{explanation['request_id']}: {explanation['policy']} ({explanation['rule']})"
    decodes = any("decode_score" in score for score in scores)
    pools = any(score["pool"] for score in scores)
    indicators = [name for name in indicators if not (pools and name == "pool")]  # its names say more than its codes
    optional = [*(["pool"] if pools else []), *(["decode score"] if decodes else [])]
    columns = ["instance", "score", *indicators, *optional, ""]
    table = Table(*columns, title=title, title_justify="left")
    for score in sorted(scores, key=lambda score: (bool(score["excluded"]), score["score"])):
        chosen = _chosen_for(score["instance_id"], explanation)
        table.add_row(
            score["instance_id"],
            "-" if score["excluded"] else f"{score['score']:g}",
            *(f"{score['indicators'].get(name, 0):g}" for name in indicators),
            *([score["pool"]] if pools else []),
            *([f"{score['decode_score']:.4g}" if "decode_score" in score else "-"] if decodes else []),
            chosen or score["excluded"],
            style="bold green" if chosen else None,
        )
    # A pipe has no width of its own, and names cut short would not tell instances apart.
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL)
    console.print(table)
    if explanation["decode_rule"]:
        line = f"decoded by {explanation['decode_instance_id']}: {explanation['decode_rule']}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for move in explanation["moves"]:
        at = datetime.fromtimestamp(move["ordered_unix_ms"] / 1000).strftime("%H:%M:%S")
        console.print(f"{at} {order_line(move)}", markup=False, highlight=False, soft_wrap=True)


def _chosen_for(instance_id: str, explanation: dict[str, Any]) -> str:
    """What the instance was chosen for; empty if for nothing."""
    prefills = instance_id == explanation["chosen_instance_id"]
    decodes = instance_id == explanation["decode_instance_id"]
    if prefills and decodes:
        return "chosen"
    return "prefill" if prefills else "decode" if decodes else ""
