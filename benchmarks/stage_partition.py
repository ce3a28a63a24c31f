"""CPU time of stage partition, and how far the two-phase heuristic is from the optimum.

    python -m benchmarks.stage_partition --json OUT

Lengths up to 128K tokens: lognormal inputs and outputs (medians of 800 and 200 tokens, sigma of 1.3 and 1), cut to the
context. `cuts_per_octave` of 1 is the paper's bucketing ([1, 2], [2, 4]...). CPU time of the process, all threads;
medians. Making the population's tables is part of it, once per plan.
"""

import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from controlplane.planning.population import Population
from controlplane.planning.qoe import QoeModel
from controlplane.planning.stage_partition import (
    PartitionMethod,
    PartitionProblem,
    exact_plan,
    find_plan,
    heuristic_plan,
    log_cuts,
)

CONTEXT_TOKENS = 131_072
REQUESTS = 5_000
IN_FLIGHT_PER_INSTANCE = 100
MODEL = QoeModel(base_ms=8.0, request_ms=0.05, input_token_ms=1e-5, input_token_squared_ms=1e-9, total_token_ms=1.5e-4)
TRANSFER_TOKEN_MS = 2.3e-3
"""114 KB of KV a token at 50 GB/s."""
BOUND_CPU_S = {16: 0.06, 256: 1.0}
"""Of the exact program over log buckets; CascadeInfer reports 0.06 s for its heuristic with 16 instances."""


@dataclass(frozen=True, slots=True)
class Timing:
    """CPU time of one partition method at one size, and the plan that it found."""

    instances: int
    cuts_per_octave: int
    method: str
    median_cpu_s: float
    stages: int
    quality: float


@dataclass(frozen=True, slots=True)
class Gap:
    """(heuristic - optimum) / optimum over many populations, the part of the quality that no plan changes left out."""

    instances: int
    populations: int
    mean: float
    worst: float
    optimal_share: float
    """Of populations for which the heuristic finds the optimum."""


def population(seed: int, instances: int) -> Population:
    """A population with log-normal lengths, the same for equal seeds."""
    rng = np.random.default_rng(seed)
    inputs = np.clip(np.round(rng.lognormal(np.log(800), 1.3, REQUESTS)), 1, CONTEXT_TOKENS - 2048)
    outputs = np.clip(np.round(rng.lognormal(np.log(200), 1.0, REQUESTS)), 1, 2048)
    return Population.of(inputs, outputs, instances * IN_FLIGHT_PER_INSTANCE)


def time_plan(instances: int, cuts_per_octave: int, method: PartitionMethod, repeats: int) -> Timing:
    people = population(0, instances)
    cpu_s = []
    for _ in range(repeats):
        before = time.process_time()
        cuts = log_cuts(CONTEXT_TOKENS, cuts_per_octave)
        plan = find_plan(PartitionProblem.of(people, MODEL, cuts, TRANSFER_TOKEN_MS), instances, method)
        cpu_s.append(time.process_time() - before)
    return Timing(instances, cuts_per_octave, method, statistics.median(cpu_s), plan.stages, plan.quality)


def measure_gap(instances: int, populations: int) -> Gap:
    gaps = []
    for seed in range(populations):
        people = population(seed, instances)
        problem = PartitionProblem.of(people, MODEL, log_cuts(CONTEXT_TOKENS), TRANSFER_TOKEN_MS)
        unavoidable = people.in_flight * MODEL.base_ms
        optimum = exact_plan(problem, instances).quality - unavoidable
        gaps.append((heuristic_plan(problem, instances).quality - unavoidable) / optimum - 1)
    found = np.array(gaps)
    return Gap(instances, populations, float(found.mean()), float(found.max()), float((found < 1e-9).mean()))


def bounds_broken(timings: Sequence[Timing]) -> list[str]:
    return [
        f"{timing.instances} instances: {timing.median_cpu_s:.3f} s of CPU, {BOUND_CPU_S[timing.instances]} allowed"
        for timing in timings
        if timing.method == PartitionMethod.EXACT
        and timing.cuts_per_octave == 1
        and timing.median_cpu_s > BOUND_CPU_S[timing.instances]
    ]


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--repeats", default=7, show_default=True)
@click.option("--populations", default=200, show_default=True, help="For the gap of the heuristic.")
def main(json_path: Path | None, repeats: int, populations: int) -> None:
    """Print CPU times and gaps; exit code 1 if a bound is broken."""
    timings = [
        time_plan(instances, cuts_per_octave, method, repeats)
        for instances in BOUND_CPU_S
        for cuts_per_octave in (1, 4)
        for method in (PartitionMethod.EXACT, PartitionMethod.HEURISTIC)
    ]
    for timing in timings:
        click.echo(
            f"{timing.instances:4d} instances, {timing.cuts_per_octave} cuts per octave, {timing.method:9s}: "
            f"{timing.median_cpu_s:.4f} s of CPU, {timing.stages} stages, quality {timing.quality:.1f}"
        )
    gaps = [measure_gap(instances, populations if instances < 256 else populations // 10) for instances in (4, 16, 256)]
    for gap in gaps:
        click.echo(
            f"{gap.instances:4d} instances: heuristic {gap.mean:.2%} above the optimum (worst {gap.worst:.2%}), "
            f"optimal for {gap.optimal_share:.0%} of {gap.populations} populations"
        )
    if json_path is not None:
        report = {
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "timings": [asdict(timing) for timing in timings],
            "gaps": [asdict(gap) for gap in gaps],
        }
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    broken = bounds_broken(timings)
    if broken:
        raise click.ClickException("; ".join(broken))


if __name__ == "__main__":
    main()
