"""The Azure LLM traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens (Azure/AzurePublicDataset).

The 2023 traces were published with Splitwise (Patel et al., ISCA 2024). They know nothing of shared prefixes.
"""

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime

from mesh.errors import TraceError
from simulator.traces.request import TraceRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def is_azure_header(line: str) -> bool:
    """Whether `line`, the first of a file, announces this format."""
    return tuple(column.strip() for column in line.split(",")) == COLUMNS


def parse_azure(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Requests in file order, the first one arriving at 0 s.

    Raises TraceError with the line number for a malformed line and for a time before the previous one.
    """
    rows = csv.reader(lines)
    header = next(rows, [])
    if tuple(column.strip() for column in header) != COLUMNS:
        raise TraceError(f"line 1: expected the columns {','.join(COLUMNS)}, got {','.join(header)!r}")
    first: datetime | None = None
    previous_s = 0.0
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise TraceError(f"line {rows.line_num}: not CSV ({error})") from error
        if row is None:
            return
        if not row:
            continue
        try:
            arrived = _timestamp(row)
            first = first or arrived
            request = TraceRequest((arrived - first).total_seconds(), int(row[1]), int(row[2]))
        except (ValueError, TypeError) as error:
            raise TraceError(f"line {rows.line_num}: {error}, in {','.join(row)[:200]!r}") from error
        if request.arrival_s < previous_s:
            raise TraceError(f"line {rows.line_num}: arrives before the line above; sort the trace by {COLUMNS[0]}")
        previous_s = request.arrival_s
        yield request


def _timestamp(row: list[str]) -> datetime:
    if len(row) != len(COLUMNS):
        raise ValueError(f"expected {len(COLUMNS)} columns, got {len(row)}")
    # Seven fractional digits (100 ns ticks) in the published files: fromisoformat cuts what it cannot hold.
    return datetime.fromisoformat(row[0].strip())
