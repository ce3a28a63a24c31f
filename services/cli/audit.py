"""`penstock audit`: who ordered what."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

import click
import msgspec

from mesh.audit.log import read_orders
from mesh.audit.orders import Order
from services.cli.connection import mesh_store, run, store_options
from services.cli.since import since_option


@click.command()
@since_option
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(since: datetime | None, store: str | None, mesh: str, as_json: bool) -> None:
    """Show the orders that were given to the mesh: who, what, when, and what came of each.

    The state store remembers the last 512 of each role; the log of each process has all of its own.
    """
    orders = run(_orders(store, mesh, 0 if since is None else int(1000 * since.timestamp())))
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(orders), indent=2))
        return
    for order in orders:
        click.echo(_line(order))
    if not orders:
        click.echo("no orders")


def _line(order: Order) -> str:
    moment = datetime.fromtimestamp(order.unix_ms / 1000, UTC)
    parameters = "".join(f" {name}={value}" for name, value in sorted(order.parameters.items()))
    return f"{moment:%Y-%m-%d %H:%M:%S}Z  {order.who}: {order.order}{parameters} to {order.to}: {order.outcome}"


async def _orders(store: str | None, mesh: str, since_unix_ms: int) -> Sequence[Order]:
    async with mesh_store(store, mesh) as opened:
        return await read_orders(opened, since_unix_ms)
