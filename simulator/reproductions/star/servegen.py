"""Lengths of the DeepSeek-R1 workload of ServeGen (Alibaba), all clients together."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from mesh.errors import TraceError
from simulator.reproductions.star.lengths import Quantiles, Workload

KNOTS = 201


def servegen_workload(path: Path) -> Workload:
    """Each client's lengths weigh by its mean rate. Raises `TraceError` for a file of another form."""
    prompts: dict[int, float] = defaultdict(float)
    outputs: dict[int, float] = defaultdict(float)
    try:
        with gzip.open(path, "rt") as file:
            for line in file:
                _add_client(json.loads(line), prompts, outputs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no ServeGen workload: {error!r}") from error
    return Workload("ServeGen DeepSeek-R1", _quantiles(prompts), _quantiles(outputs))


def _add_client(client: dict, prompts: dict[int, float], outputs: dict[int, float]) -> None:  # type: ignore[type-arg]
    rate = sum(window[1] for window in client["trace"])
    windows = list((client["dataset"] or {}).values())
    for window in windows:
        for lengths, name in ((prompts, "input_tokens"), (outputs, "output_tokens")):
            for tokens, share in window[name].items():
                lengths[max(1, round(float(tokens)))] += share * rate / len(windows)


def _quantiles(weights: dict[int, float]) -> Quantiles:
    tokens = np.array(sorted(weights))
    shares = np.cumsum([weights[each] for each in tokens.tolist()])
    at = np.linspace(0, 1, KNOTS)
    found = tokens[np.minimum(np.searchsorted(shares, at * shares[-1]), len(tokens) - 1)]
    return Quantiles(tuple(zip(at.tolist(), found.tolist(), strict=True)))
