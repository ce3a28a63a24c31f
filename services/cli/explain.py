"""`penstock explain REQUEST`: the indicators and scores behind a placement, and the moves that followed."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import click

from mesh.errors import PeerUnavailable, RpcError
from mesh.membership import Member
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.cli.connection import call, mesh_directory, mesh_store, only_member, run, store_options
from services.cli.proto_json import plain
from services.cli.rescheduler import order_line


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
    from rich.table import Table

    from services.cli.terminal_table import fitted, output_console

    scores = explanation["scores"]
    indicators = indicator_names(scores)
    title = f"{explanation['request_id']}: {explanation['policy']} ({explanation['rule']})"
    decodes = any("decode_score" in score for score in scores)
    pools = any(score["pool"] for score in scores)
    indicators = [name for name in indicators if not (pools and name == "pool")]  # its names say more than its codes
    optional = [*(["pool"] if pools else []), *(["decode score"] if decodes else [])]
    columns = ["instance", "score", *indicators, *optional, ""]
    table = Table(*columns)
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
    console = output_console()
    # Not as the table's title, which wraps at its width: the id is there to be copied.
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    console.print(fitted(table, console.width))
    if explanation["loaded_tokens"]:
        line = f"loads {explanation['loaded_tokens']:,} tokens from the memory of its host"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if explanation["decode_rule"]:
        line = f"decoded by {explanation['decode_instance_id']}: {explanation['decode_rule']}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if pull := explanation.get("pull"):
        console.print(pull_line(pull), markup=False, highlight=False, soft_wrap=True)
    if parts := explanation.get("vllm_parts"):
        line = f"of vLLM's own parts beside the frontend: {parts}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for move in explanation["moves"]:
        at = datetime.fromtimestamp(move["ordered_unix_ms"] / 1000).strftime("%H:%M:%S")
        console.print(f"{at} {order_line(move)}", markup=False, highlight=False, soft_wrap=True)


def indicator_names(scores: Iterable[Mapping[str, Any]]) -> list[str]:
    """All that any score is made of, in the order of the columns: by name, since on the wire they have no order."""
    return sorted({name for score in scores for name in score["indicators"]})


def pull_line(pull: Mapping[str, Any]) -> str:
    """Whose cached prefix the request begins with, and what that saves."""
    times = f"{pull['pull_ms']:.3g} ms instead of {pull['compute_ms']:.3g} ms"
    comes_ms = pull.get("comes_ms", 0)
    loads_tokens = pull.get("loads_tokens", 0)
    how = f"loaded {loads_tokens:,} of them from the memory of its host" if loads_tokens else "computed them"
    comes = f" once it has {how}, in some {comes_ms:.3g} ms" if comes_ms else ""
    return f"pulls {pull['tokens']:,} tokens from {pull['instance_id']}{comes}: {times}"


def _chosen_for(instance_id: str, explanation: dict[str, Any]) -> str:
    """What the instance was chosen for; empty if for nothing."""
    prefills = instance_id == explanation["chosen_instance_id"]
    decodes = instance_id == explanation["decode_instance_id"]
    if prefills and decodes:
        return "chosen"
    return "prefill" if prefills else "decode" if decodes else ""
