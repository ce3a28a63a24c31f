"""Lengths of published data sets with Poisson arrivals (CascadeInfer, section 6.1)."""

import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mesh.errors import TraceError
from simulator.traces.request import TraceRequest

Lengths = tuple[tuple[int, int], ...]


def read_sharegpt(path: Path) -> Lengths:
    """Turns with their history: `num_prefill_tokens,num_decode_tokens`. Raises `TraceError`."""
    try:
        with gzip.open(path, "rt") as lines:
            rows = csv.DictReader(lines)
            return tuple((int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in rows)
    except (OSError, KeyError, ValueError) as error:
        raise TraceError(f"{path}: lengths as num_prefill_tokens,num_decode_tokens were expected ({error})") from error


def read_mooncake(path: Path, longest_tokens: int) -> Lengths:
    """Conversations up to a length. Raises `TraceError`."""
    try:
        with gzip.open(path, "rt") as lines:
            rows = [json.loads(line) for line in lines]
        both = [(int(row["input_length"]), max(int(row["output_length"]), 1)) for row in rows]
    except (OSError, KeyError, ValueError) as error:
        raise TraceError(f"{path}: lines with input_length and output_length were expected ({error})") from error
    return tuple((inputs, outputs) for inputs, outputs in both if inputs + outputs <= longest_tokens)


def poisson_requests(
    lengths: Sequence[tuple[int, int]], rate_req_s: float, duration_s: float, rng: np.random.Generator
) -> list[TraceRequest]:
    """Poisson arrivals for the given time, with lengths drawn from the set."""
    arrivals = np.cumsum(rng.exponential(1 / rate_req_s, max(int(rate_req_s * duration_s * 1.5) + 50, 50)))
    chosen = rng.integers(0, len(lengths), len(arrivals))
    return [
        TraceRequest(arrival, *lengths[which])
        for arrival, which in zip(arrivals.tolist(), chosen.tolist(), strict=True)
        if arrival < duration_s
    ]
