"""The part of `penstock status` about the ranks of instances whose model is spread over several processes."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from mesh.errors import RpcError
from mesh.membership import Directory, Member
from penstock.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from services.cli.connection import call
from services.cli.proto_json import plain

_KINDS = (("tensor", "TP"), ("pipeline", "PP"), ("data", "DP"))


def shape(facts: Mapping[str, Any]) -> str:
    """Over how many ranks, by which parallelism, an instance is spread; empty for one."""
    degrees = {name: int(facts.get(f"{kind}_parallel") or 1) for kind, name in _KINDS}
    ranks = degrees["TP"] * degrees["PP"] * degrees["DP"]
    return f"{ranks} ({' x '.join(name for name, degree in degrees.items() if degree > 1)})" if ranks > 1 else ""


async def gather_ranks(directory: Directory) -> dict[str, list[dict[str, Any]]]:
    """By instance, those of several ranks: what each rank's KV transfer agent says; one item with an `error` where the
    worker does not answer or moves no requests."""
    spread = [member for member in directory.members("worker") if shape(member.attributes)]
    return dict(zip((each.member_id for each in spread), await asyncio.gather(*map(_ranks, spread)), strict=True))


async def _ranks(member: Member) -> list[dict[str, Any]]:
    try:
        status = await call(member, kv_transfer_pb2_grpc.KvTransferStub, "Status", kv_transfer_pb2.KvStatusRequest())
    except RpcError as error:
        return [{"error": str(error)}]
    return [plain(rank) for rank in status.ranks]


def ranks_table(instances: list[dict[str, Any]]) -> Table | None:
    """A row for each rank; None where no instance has several."""
    if not any(instance.get("ranks") for instance in instances):
        return None
    table = Table(
        "instance", "rank", "KV port", "moves", "pulls", "serves", "blocks offered", "pulled", "failed", "MB pulled",
        title="Ranks", title_justify="left",
    )  # fmt: skip
    for instance in instances:
        has_cores = int(instance.get("data_parallel") or 1) > 1
        for rank in instance.get("ranks", ()):
            if "error" in rank:
                table.add_row(instance["instance_id"], "-", "-", f"[red]{escape(rank['error'])}[/]")
                continue
            name = f"{rank['core']}.{rank['rank']}" if has_cores else str(rank["rank"])
            obstacle = f"[red]{escape(rank['obstacle'])}[/]" if rank["obstacle"] else "[green]yes[/]"
            counts = ("pulling", "serving", "exported_blocks", "pulls_total", "failed_pulls_total")
            megabytes = f"{int(rank['pulled_bytes_total']) / 1e6:.1f}"
            row = [str(rank[name]) for name in counts]
            table.add_row(instance["instance_id"], name, str(rank["port"]), obstacle, *row, megabytes)
    return table
