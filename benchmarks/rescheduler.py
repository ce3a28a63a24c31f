"""CPU of one rescheduling decision: 256 instances with 64 requests each, and how it grows.

    python -m benchmarks.rescheduler [--runs 15] [--json OUT]

What is timed is `decide` of `Rescheduler` and `TrajectoryPlanner` on loads as workers report them; the worker's own
part (`decode_load`) is timed beside it. CPU time of the process, one thread (BLAS included), medians.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from time import process_time

for _threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_threads] = "1"  # before numpy is imported

import numpy as np  # noqa: E402

from controlplane.model.running_request import RunningRequest  # noqa: E402
from controlplane.policies.rescheduling.decode_load import decode_load  # noqa: E402
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters  # noqa: E402
from controlplane.policies.rescheduling.problem import DecodeInstance  # noqa: E402
from controlplane.policies.rescheduling.rescheduler import Rescheduler  # noqa: E402
from controlplane.policies.rescheduling.trajectory_planner import TrajectoryPlanner  # noqa: E402

SIZES = ((8, 64), (64, 64), (256, 64), (256, 256))
CAPACITY_TOKENS = 1_000_000


def main() -> None:
    """Print the table; with --json, write it too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="of each decision; the median counts")
    parser.add_argument(
        "--sizes", type=_size, nargs="+", default=SIZES, metavar="INSTANCESxREQUESTS", help="of the cluster"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(instances, requests, arguments.runs) for instances, requests in arguments.sizes]
    for row in rows:
        print(
            f"{row['instances']:>4} instances x {row['requests']:>3} requests: "
            f"predicted {row['predicted_ms']:6.2f} ms, 8 orders {row['predicted_8_ms']:6.2f} ms, "
            f"current {row['current_ms']:6.2f} ms, trajectories {row['trajectories_ms']:6.2f} ms "
            f"({row['candidates']} candidates); worker {row['worker_ms']:.3f} ms"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def _size(text: str) -> tuple[int, int]:
    instances, requests = text.split("x")
    return int(instances), int(requests)


def measure(instances: int, requests: int, runs: int) -> dict[str, float]:
    """One size of the cluster."""
    cluster = make_cluster(instances, requests, ReschedulerParameters())
    predicted = Rescheduler(ReschedulerMode.PREDICTED)
    several = Rescheduler(ReschedulerMode.PREDICTED, ReschedulerParameters(migrations=8))
    current = Rescheduler(ReschedulerMode.CURRENT)
    running = make_requests(np.random.default_rng(1), "i", requests)
    horizon = ReschedulerParameters().horizon
    return {
        "instances": instances,
        "requests": requests,
        "candidates": predicted.decide(cluster).candidates,
        "predicted_ms": cpu_ms(lambda: predicted.decide(cluster), runs),
        "predicted_8_ms": cpu_ms(lambda: several.decide(cluster), runs),
        "current_ms": cpu_ms(lambda: current.decide(cluster), runs),
        "trajectories_ms": cpu_ms(lambda: TrajectoryPlanner().decide(cluster), runs),
        "worker_ms": cpu_ms(lambda: decode_load(running, horizon), runs, repeat=100),
    }


def make_cluster(instances: int, requests: int, parameters: ReschedulerParameters) -> list[DecodeInstance]:
    """Reasoning-like requests: many short, some up to 32K tokens, in every phase of their life; every other instance
    has those that are three times as long, so that half of all are overloaded and half are not: the most work."""
    random = np.random.default_rng(0)
    return [
        DecodeInstance(
            f"i{number:03}",
            CAPACITY_TOKENS,
            20.0,
            True,
            decode_load(make_requests(random, f"i{number:03}", requests, 1 + 2 * (number % 2)), parameters.horizon),
        )
        for number in range(instances)
    ]


def make_requests(random: np.random.Generator, name: str, count: int, times: int = 1) -> list[RunningRequest]:
    """Running requests with log-normal lengths (scaled by `times`), at a random point of their life, with perfect
    predictions."""
    total = np.minimum(times * random.lognormal(8.0, 1.3, count), 32_768).astype(int) + 2
    generated = (random.random(count) * total).astype(int)
    return [
        RunningRequest(f"{name}-{at}", 300 + int(done), int(done), int(end - done))
        for at, (done, end) in enumerate(zip(generated, total, strict=True))
    ]


def cpu_ms(call: Callable[[], object], runs: int, repeat: int = 1) -> float:
    """Median CPU time of a call."""
    times = []
    for _ in range(runs):
        started = process_time()
        for _ in range(repeat):
            call()
        times.append(1000 * (process_time() - started) / repeat)
    return statistics.median(times)


if __name__ == "__main__":
    main()
