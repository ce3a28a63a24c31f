"""The cases as a table and as JSON."""

from collections.abc import Sequence

import msgspec
from rich.table import Table

from services.cli.validation.bounds import is_kept, limit_of
from simulator.validation.case import Case
from simulator.validation.throughput import METRIC as THROUGHPUT_METRIC


def encode_cases(cases: Sequence[Case]) -> bytes:
    """{"cases": [{"name", "metric", "measured", "simulated", "error"}]}."""
    return msgspec.json.format(msgspec.json.encode({"cases": cases}), indent=2) + b"\n"


def case_table(cases: Sequence[Case], *, every_row: bool) -> Table:
    """One line a case; single throughput rows only where they are asked for."""
    table = Table("case", "metric", "measured", "simulated", "error", "limit")
    for case in cases:
        if case.metric == THROUGHPUT_METRIC and not every_row:
            continue
        limit = limit_of(case)
        style = "" if is_kept(case) else "bold red"
        table.add_row(
            case.name,
            case.metric,
            f"{case.measured:,.1f}",
            f"{case.simulated:,.1f}",
            f"{case.error:+.1%}",
            "" if limit is None else f"{limit:.0%}",
            style=style,
        )
    return table
