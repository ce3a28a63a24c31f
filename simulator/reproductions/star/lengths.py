"""Lengths of prompts and answers as STAR's table 2 has them, drawn from quantile functions."""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mesh.errors import TraceError
from simulator.traces.request import TraceRequest

LONGEST_TOKENS = 32_768
"""Prompts and outputs of up to 32K tokens (section 6.1)."""
_SERVEGEN_KNOTS = 201


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of lengths by knots (share, tokens), log-linear between them."""

    knots: tuple[tuple[float, float], ...]

    def at(self, shares: NDArray[np.float64]) -> NDArray[np.int64]:
        """Lengths in tokens at these shares (0 to 1) of the distribution, log-linear between the knots; at least 1."""
        known, tokens = zip(*self.knots, strict=True)
        lengths: NDArray[np.int64] = np.rint(np.exp(np.interp(shares, known, np.log(tokens)))).astype(np.int64)
        return np.maximum(lengths, 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and answers, drawn independently: the paper says nothing of how they go together."""

    name: str
    prompts: Quantiles
    outputs: Quantiles


SHAREGPT = Workload(
    "ShareGPT",
    Quantiles(((0.0, 4), (0.5, 36), (0.72, 70), (0.9, 920), (0.95, 1609), (0.99, 3600), (1.0, 9000))),
    # 29.2 % below 1K and 17.3 % above 30K (section 2.2), P50, P90, P95 of table 2. Both ends and the knot at 0.8 are
    # ours, so that mean and standard deviation come out.
    Quantiles(
        (
            (0.0, 120),
            (0.292, 1000),
            (0.5, 1536),
            (0.8, 7600),
            (0.827, 30_000),
            (0.85, 32_640),
            (0.9, 32_670),
            (0.95, 32_679),
            (1.0, 32_700),
        )
    ),
)
ALPACA = Workload(
    "Alpaca",
    Quantiles(((0.0, 5), (0.5, 10), (0.9, 15), (0.95, 18), (1.0, 30))),
    # P50, P90, P95 of table 2; the share of answers at the limit follows from the standard deviation.
    Quantiles(
        (
            (0.0, 150),
            (0.5, 987),
            (0.745, 2400),
            (0.77, 31_000),
            (0.8, 32_680),
            (0.9, 32_690),
            (0.95, 32_691),
            (1.0, 32_700),
        )
    ),
)


def poisson_trace(workload: Workload, rate_per_s: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Arrivals of a Poisson process over `seconds`, each length drawn by itself. One seed draws the same requests at
    every rate."""
    arrivals, of_outputs, of_prompts = (np.random.default_rng((seed, stream)) for stream in range(3))
    count = max(1, round(rate_per_s * seconds))
    at_s = np.sort(arrivals.random(count)) * seconds
    outputs = workload.outputs.at(of_outputs.random(count))
    prompts = np.minimum(workload.prompts.at(of_prompts.random(count)), LONGEST_TOKENS - 1)
    return [
        TraceRequest(float(at), int(prompt), int(output))
        for at, prompt, output in zip(at_s, prompts, np.minimum(outputs, LONGEST_TOKENS - prompts), strict=True)
    ]


def servegen_workload(path: Path) -> Workload:
    """Lengths of the DeepSeek-R1 workload of ServeGen (Alibaba), all clients together, each weighted by its mean rate.

    Raises `TraceError` for a file of another form.
    """
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
    at = np.linspace(0, 1, _SERVEGEN_KNOTS)
    found = tokens[np.minimum(np.searchsorted(shares, at * shares[-1]), len(tokens) - 1)]
    return Quantiles(tuple(zip(at.tolist(), found.tolist(), strict=True)))
