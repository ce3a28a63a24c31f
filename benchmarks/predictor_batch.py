"""How long a length predictor takes for a batch, at the sizes of the paper and of the demo models (STAR, table 1).

    python -m benchmarks.predictor_batch [--rounds 30] [--json FILE]

CPU time of one thread, medians of many batches; the network alone, without gRPC.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Final

import services.predictor  # noqa: F401  isort: skip  (one thread for NumPy, set before it is imported)

import numpy as np

from services.predictor.network import Network

SIZES: Final = {
    "paper (d = 3584, 2048-512-64)": (3584, 2048, 512, 64, 1),
    "demo-large (d = 256, 512-128-32)": (258, 512, 128, 32, 1),
}
BATCHES: Final = (1, 10, 32, 256)


def network(widths: tuple[int, ...]) -> Network:
    """A network of these layer widths with random weights: its speed does not depend on them."""
    draw = np.random.default_rng(0)
    shapes = list(zip(widths[1:], widths[:-1], strict=True))
    return Network(
        tuple(draw.normal(size=shape).astype(np.float32) / shape[1] ** 0.5 for shape in shapes),
        tuple(np.zeros(shape[0], np.float32) for shape in shapes),
    )


def cpu_ms(of: Network, requests: int, rounds: int) -> float:
    """Median CPU time of one batch; the first round only warms up."""
    inputs = np.random.default_rng(1).normal(size=(requests, of.input_width)).astype(np.float32)
    spent = []
    for _ in range(rounds + 1):
        before_s = time.process_time()
        of.remaining_tokens(inputs)
        spent.append(1e3 * (time.process_time() - before_s))
    return statistics.median(spent[1:])


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Measure the CPU time of a length predictor's batches.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for name, widths in SIZES.items():
        predictor = network(widths)
        times_ms = {str(requests): round(cpu_ms(predictor, requests, arguments.rounds), 3) for requests in BATCHES}
        result[name] = {"parameters": predictor.parameters, "cpu_ms_by_batch": times_ms}
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
