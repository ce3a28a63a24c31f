"""Lists of lengths as CSV: requests with these lengths, Poisson arrivals where the list has no times.

Three forms are known by their headers: prompts and answers; workload, arrival, prompts and answers; and answers of
several models with the characters of their prompts.
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from mesh.errors import TraceError
from simulator.traces.request import TraceRequest

RATE_PER_S = 1.0
"""Of arrivals that are drawn, so that --rate-scale is the rate in requests per second."""
CHARACTERS_OF_A_TOKEN = 3.5
"""To turn prompts that are given in characters into tokens."""


@dataclass(frozen=True, slots=True)
class _Form:
    columns: tuple[str, ...]
    part: Callable[[list[str]], str]
    """Name of the part of the list that a row belongs to."""
    arrival_s: Callable[[list[str]], float] | None
    tokens: Callable[[list[str]], tuple[int, int]]


_FORMS = (
    _Form(("num_prefill_tokens", "num_decode_tokens"), lambda _: "", None, lambda row: (int(row[0]), int(row[1]))),
    _Form(
        ("workload", "arrival_s", "input_toks", "output_toks"),
        lambda row: row[0],
        lambda row: float(row[1]),
        lambda row: (int(row[2]), int(row[3])),
    ),
    _Form(
        ("bench", "model", "uid", "prompt_chars", "output_token_len"),
        lambda row: row[1],
        None,
        lambda row: (max(1, round(int(row[3]) / CHARACTERS_OF_A_TOKEN)), int(row[4])),
    ),
)


def is_lengths_header(line: str) -> bool:
    """Whether `line`, the first of a file, announces one of these forms."""
    return _form_of(line) is not None


def parse_lengths(lines: Iterable[str], rng: np.random.Generator, part: str = "") -> Iterator[TraceRequest]:
    """Requests of the part whose name contains `part`; of the list's first part where none is named.

    Arrival times that the list has are kept; otherwise the rows come in an order, and at times, drawn by `rng`.
    Raises TraceError with the line number for a malformed line, and where no part has that name.
    """
    rows = iter(lines)
    header = next(rows, "")
    form = _form_of(header)
    if form is None:
        raise TraceError(f"line 1: no known list of lengths has the columns {header.strip()[:200]!r}")
    known: dict[str, None] = {}
    chosen: str | None = None
    requests: list[TraceRequest] = []
    for number, row in enumerate(csv.reader(rows), start=2):
        if not row:
            continue
        try:
            if len(row) != len(form.columns):
                raise ValueError(f"expected {len(form.columns)} columns, got {len(row)}")
            name = form.part(row)
            known[name] = None
            if chosen is None and part in name:
                chosen = name
            if name == chosen:
                input_tokens, output_tokens = form.tokens(row)
                arrival_s = form.arrival_s(row) if form.arrival_s else 0.0
                requests.append(TraceRequest(arrival_s, input_tokens, max(1, output_tokens)))
        except ValueError as error:
            raise TraceError(f"line {number}: {error}, in {','.join(row)[:200]!r}") from error
    if chosen is None and known:
        raise TraceError(f"no part of the list has {part!r} in its name; there are {', '.join(known)}")
    yield from sorted(requests, key=_arrival_s) if form.arrival_s else _poisson(requests, rng)


def _poisson(requests: list[TraceRequest], rng: np.random.Generator) -> Iterator[TraceRequest]:
    times_s = np.cumsum(rng.exponential(1 / RATE_PER_S, len(requests))).tolist()
    for arrival_s, row in zip(times_s, rng.permutation(len(requests)).tolist(), strict=True):
        request = requests[row]
        yield TraceRequest(arrival_s, request.input_tokens, request.output_tokens)


def _arrival_s(request: TraceRequest) -> float:
    return request.arrival_s


def _form_of(line: str) -> _Form | None:
    columns = tuple(column.strip() for column in line.split(","))
    return next((form for form in _FORMS if form.columns == columns), None)
