"""`penstock budgets`: what keys and tenants of tokens have left of their tokens of a day or a month."""

import json
import time
from collections.abc import Iterable, Sequence

import click
import msgspec
from rich.table import Table

from services.cli.connection import mesh_store, run, store_options
from services.cli.terminal_table import print_table
from services.frontend.requests.key_budgets import BUDGETS_PREFIX, BudgetRecord, Period


class BudgetLine(msgspec.Struct, frozen=True):
    """One budget of one tenant."""

    tenant: str
    period: Period
    used: int
    budget: float
    left: float
    begins_anew: str
    """ISO 8601, UTC."""


def lines_of(records: Iterable[BudgetRecord], unix_s: float) -> list[BudgetLine]:
    """By tenant: the day in front of the month."""
    return [
        BudgetLine(
            record.tenant,
            period,
            used := record.used(period, unix_s),
            record.budgets[period],
            max(0.0, record.budgets[period] - used),
            f"{period.end(unix_s):%Y-%m-%dT%H:%M:%SZ}",
        )
        for record in sorted(records, key=lambda record: record.tenant)
        for period in Period
        if period in record.budgets
    ]


@click.command()
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(store: str | None, mesh: str, as_json: bool) -> None:
    """Show what keys, and tenants of tokens, have used of their budgets and have left, by the state store.

    Tokens stand there a second after their request has ended. Those that have taken nothing this month are not listed;
    a budget that was changed shows with the key's next request.
    """
    lines = run(_lines(store, mesh))
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(lines), indent=2))
        return
    if not lines:
        click.echo("no key has used anything of a budget")
        return
    table = Table("tenant", "per", "used", "budget", "left", "begins anew")
    for line in lines:
        numbers = (line.used, line.budget, line.left)
        table.add_row(line.tenant, line.period, *(f"{number:,.0f}" for number in numbers), line.begins_anew)
    print_table(table)


async def _lines(store: str | None, mesh: str) -> Sequence[BudgetLine]:
    async with mesh_store(store, mesh) as opened:
        listing = await opened.range(BUDGETS_PREFIX)
    records = [msgspec.json.decode(entry.value, type=BudgetRecord) for entry in listing.entries]
    return lines_of(records, time.time())
