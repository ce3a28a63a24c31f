"""Arrivals over days, as numbers in equal steps: from requests, or from published rates (pure)."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh.errors import TraceError
from simulator.autoscale.curve import Lengths
from simulator.traces.request import TraceRequest

RATE_COLUMNS = ("minute_since_start", "req_per_min_low", "req_per_min_mid", "req_per_min_high")
CDF_COLUMNS = ("field", "cdf_percent", "tokens")
MINUTE_S = 60.0
DRAWN_LENGTHS = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """What came, and how long it was."""

    arrivals: NDArray[np.int64]
    """In each step."""
    lengths: Lengths


def is_rates_header(line: str) -> bool:
    """Whether the first line of a file announces rates over minutes."""
    return tuple(column.strip() for column in line.split(",")) == RATE_COLUMNS


def arrivals_of_rates(lines: Iterable[str], step_s: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Poisson arrivals in steps. Each minute's rate lies anywhere in the band that was published for its time.

    Raises `TraceError` for lines that are no rates.
    """
    table = _rows(lines, RATE_COLUMNS)
    try:
        minutes, low, _, high = np.array([[float(cell) for cell in row] for row in table]).T
    except ValueError as error:
        raise TraceError(f"rates need four numbers a line: {error}") from error
    if len(minutes) < 2 or (np.diff(minutes) <= 0).any() or (low < 0).any() or (high < low).any():
        raise TraceError("rates need two lines at least, ascending minutes, and 0 <= low <= high")
    each = np.arange(int(minutes[-1]))
    place = np.minimum(np.searchsorted(minutes, each), len(minutes) - 1)
    per_minute = rng.uniform(low[place], high[place])
    steps = int(len(each) * MINUTE_S / step_s)
    at = np.minimum((np.arange(steps) * step_s / MINUTE_S).astype(int), len(each) - 1)
    drawn: NDArray[np.int64] = rng.poisson(per_minute[at] * step_s / MINUTE_S).astype(np.int64)
    return drawn


def lengths_of_cdf(lines: Iterable[str], rng: np.random.Generator) -> Lengths:
    """Drawn from two published distributions, `input` and `output`, each by itself. Raises `TraceError`."""
    points: dict[str, list[tuple[float, float]]] = {"input": [], "output": []}
    for row in _rows(lines, CDF_COLUMNS):
        try:
            points[row[0]].append((float(row[1]) / 100, float(row[2])))
        except (KeyError, ValueError) as error:
            raise TraceError(f"a line of a distribution is input or output and two numbers, not {row}") from error
    if not all(points.values()):
        raise TraceError("distributions of both input and output are needed")
    drawn = []
    for found in points.values():
        shares, tokens = np.array(sorted(found)).T
        values = np.interp(rng.uniform(size=DRAWN_LENGTHS), shares, tokens)
        drawn.append(np.maximum(1, np.rint(values)).astype(np.int64))
    return Lengths(*drawn)


def workload_of_requests(requests: Iterable[TraceRequest], step_s: float) -> Workload:
    """Of a trace of single requests; the last step may be incomplete. Raises `TraceError` without a request."""
    rows = [(request.arrival_s, request.input_tokens, request.output_tokens) for request in requests]
    if not rows:
        raise TraceError("there are no requests to scale for")
    arrived_s, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    arrivals = np.bincount((arrived_s / step_s).astype(int)).astype(np.int64)
    return Workload(arrivals, Lengths(inputs.astype(np.int64), outputs.astype(np.int64)))


def _rows(lines: Iterable[str], columns: tuple[str, ...]) -> list[list[str]]:
    reader = csv.reader(lines)
    header = tuple(column.strip() for column in next(reader, []))
    if header != columns:
        raise TraceError(f"line 1: expected the columns {','.join(columns)}, got {','.join(header)!r}")
    rows = [row for row in reader if row]
    for row in rows:
        if len(row) != len(columns):
            raise TraceError(f"expected {len(columns)} columns, got {row!r}")
    return rows
