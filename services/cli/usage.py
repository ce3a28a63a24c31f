"""`penstock usage PATH...`: what each tenant or model has used, by the records of frontends."""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.table import Table

from mesh.errors import ConfigurationError
from services.cli.since import since_option
from services.cli.terminal_table import print_table
from services.frontend.requests.usage import UsageRecord

GROUPS: Final = ("tenant", "model", "tier", "endpoint", "status")


class UsageSum(msgspec.Struct):
    """Of one tenant, model, ..."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    """Of the requests with a price."""
    without_price: int = 0
    """Requests that `cost` has nothing of."""

    def add(self, record: UsageRecord) -> None:
        """Count one request."""
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.output_tokens += record.output_tokens
        self.cost += record.cost or 0.0
        self.without_price += record.cost is None


def each_request_once(records: Iterable[UsageRecord]) -> dict[str, UsageRecord]:
    """By request id: the record with the most tokens, of those the latest. A stream that was resumed has several."""
    found: dict[str, UsageRecord] = {}
    for record in records:
        known = found.get(record.request_id)
        if known is None or _extent(record) > _extent(known):
            found[record.request_id] = record
    return found


def _extent(record: UsageRecord) -> tuple[int, int, int]:
    return record.output_tokens, record.prompt_tokens, record.unix_ms


def summed_by(group: str, records: Iterable[UsageRecord]) -> dict[str, UsageSum]:
    """By the value of a field, which is among GROUPS, in its order."""
    sums: dict[str, UsageSum] = {}
    for record in records:
        sums.setdefault(str(getattr(record, group)), UsageSum()).add(record)
    return dict(sorted(sums.items()))


def read_records(paths: Iterable[Path], unreadable: list[str]) -> Iterator[UsageRecord]:
    """Of files, and of all `*.jsonl` and rotated ones in directories. Lines that are none go to `unreadable`. Raises
    OSError."""
    decoder = msgspec.json.Decoder(UsageRecord)
    for path in paths:
        for file in sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.strip():
                        continue
                    try:
                        yield decoder.decode(line)
                    except msgspec.MsgspecError as error:
                        unreadable.append(f"{file}:{number}: {error}")


@click.command()
@click.argument(
    "paths",
    nargs=-1,
    required=True,
    envvar="PENSTOCK_SERVE_FRONTEND_USAGE_FOLDER",
    type=click.Path(exists=True, path_type=Path),
)
@click.option("--by", "group", type=click.Choice(GROUPS), default="tenant", show_default=True, help="A line for each.")
@since_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(paths: tuple[Path, ...], group: str, since: datetime | None, as_json: bool) -> None:
    """Sum up the records of usage in PATHS: folders of `--usage-folder`, or files.

    Each request counts once, also if its stream was broken off, moved or resumed elsewhere, for which the folders of
    all frontends have to be there.
    """
    unreadable: list[str] = []
    records = each_request_once(read_records(paths, unreadable)).values()
    since_unix_ms = 0 if since is None else int(1000 * since.timestamp())
    sums = summed_by(group, (record for record in records if record.unix_ms >= since_unix_ms))
    for line in unreadable[:3]:
        click.echo(f"no record of usage: {line}", err=True)
    if unreadable:
        click.echo(f"{len(unreadable)} lines could not be read and are not counted", err=True)
    if unreadable and not records:
        raise ConfigurationError("there is no record of usage in these files")
    if as_json:
        click.echo(json.dumps({"by": group, "sums": msgspec.to_builtins(sums)}, indent=2))
        return
    print_table(_table(group, sums))


def _table(group: str, sums: Mapping[str, UsageSum]) -> Table:
    table = Table(group, "requests", "prompt", "cached", "output", "cost")
    for name, each in sums.items():
        numbers = (each.requests, each.prompt_tokens, each.cached_tokens, each.output_tokens)
        cost = f"{each.cost:.6g}" if each.without_price < each.requests else "-"
        table.add_row(name or "-", *(f"{number:,}" for number in numbers), cost)
    return table
