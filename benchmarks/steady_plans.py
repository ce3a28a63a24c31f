"""How well a plan knows its own latencies: what its tables and its steady runs say beside what a long run takes.

    python -m benchmarks.steady_plans [--gpus 8] [--parts 0.5 0.7 0.9] [--requests 40000] [--json OUT]

Two tiers of Cascadia's experiments on H100s. A plan is made as `penstock plan cascade` makes it; its deployment is then
given as many requests as keep its busiest tier at each part of what that sustains. A long run has Poisson arrivals and
draws its requests at random, with a seed of its own.

Beside it, what a replica more does to a tier at 0.85 of what one replica sustains, under the mesh's default policy and
under that of the least load: the largest model alone, also on half as many GPUs where it fits on them.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cascade_planning import JUDGE_S, PART_OF_THE_WAY, RATE_PER_S_PER_GPU, TIERS, at_rate, sample_of
from controlplane.planning.cascade.bilevel import PlanRequest, PlanResult
from controlplane.planning.cascade.parallelism import Mix
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.cascade.routing import ESCALATE_ALL
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.tables import tier_tables
from simulator.cascade.curves import SimulatedCurves
from simulator.cascade.deployed import Deployed, poisson_arrivals, serve
from simulator.cascade.replica import saturation_per_s
from simulator.cascade.steady_plan import SimulatedDeployments, steady_plan
from simulator.cascade.tier import Tier

MODELS = 2
ADDED_PART = 0.85
LONG_SEED = 1000
_UNCOUNTED = 0.2
"""The part at the beginning of a long run; half as much at its end."""


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each tier that is reached, and for each part of what the busiest sustains."""
    tiers = [replace(tier, max_gpus=arguments.replica_gpus) for tier in TIERS[:MODELS]]
    sample = at_rate(sample_of(arguments.seed, arguments.sampled, MODELS), RATE_PER_S_PER_GPU * arguments.gpus)
    by_tier = sample.true_quality.mean(axis=0)
    quality = float(by_tier[0] + PART_OF_THE_WAY * (by_tier[-1] - by_tier[0]))
    source = SimulatedCurves(sample, tiers, seed=arguments.seed)
    request = PlanRequest(gpus=arguments.gpus, quality=quality, judge_s=JUDGE_S)
    began_s = time.process_time()
    deployments = SimulatedDeployments(sample, tiers, source, JUDGE_S, arguments.seed)
    planned = steady_plan(sample, source, deployments, request, 0.0, seed=arguments.seed).result
    planned_cpu_s = time.process_time() - began_s
    used = _used(sample, source, planned)
    for part in arguments.parts:
        loaded = at_rate(sample, sample.rate_per_s * part / max(used))
        yield from _rows(loaded, tiers, source, planned, part, arguments, round(planned_cpu_s, 1))


def _used(sample: CascadeSample, source: SimulatedCurves, planned: PlanResult) -> list[float]:
    tables = tier_tables(sample, planned.routed, source, 0, JUDGE_S)
    return [
        table.capacity.utilisation(mix, table.scaled_rate_per_s(planned.routed, sample.rate_per_s))
        for table, mix in zip(tables, planned.deployment.mixes, strict=True)
    ]


def _rows(
    loaded: CascadeSample,
    tiers: Sequence[Tier],
    source: SimulatedCurves,
    planned: PlanResult,
    part: float,
    arguments: argparse.Namespace,
    planned_cpu_s: float,
) -> Iterator[dict[str, Any]]:
    mixes, routed = planned.deployment.mixes, planned.routed
    tables = tier_tables(loaded, routed, source, 0, JUDGE_S)
    state = SimulatedDeployments(loaded, tiers, source, JUDGE_S, arguments.seed).measure(planned)
    deployed = Deployed(planned.thresholds, mixes, routed.quality, routed.shares)
    arrivals = poisson_arrivals(loaded, loaded.rate_per_s, arguments.requests / loaded.rate_per_s, LONG_SEED)
    served = serve(loaded, tiers, deployed, arrivals, JUDGE_S)
    first, last = _counted(len(arrivals.rows))
    for number, (table, mix) in enumerate(zip(tables, mixes, strict=True)):
        tier = served.tiers[number]
        counted = tier.latencies_s[(tier.requests >= first) & (tier.requests < last)]
        if not len(counted):
            continue
        long_s = float(np.quantile(counted, 0.95))
        steady_s = state.p95_s[number].mean or 0.0
        yield {
            "part": part,
            "tier": tiers[number].key,
            "replicas": _named(mix),
            "table_p95_s": table.latency_of_s(mix, routed, loaded.rate_per_s),
            "steady_p95_s": steady_s,
            "is_settled": state.is_settled,
            "long_p95_s": long_s,
            "steady_over_long": steady_s / long_s,
            "planned_cpu_s": planned_cpu_s,
        }


def added(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each mix of replicas and policy."""
    tiers = [replace(tier, max_gpus=arguments.replica_gpus) for tier in TIERS[:MODELS]]
    sample = sample_of(arguments.seed, arguments.sampled, MODELS)
    largest = {replica.shape: replica for replica in tiers[-1].replicas()}
    slow, usual = (ReplicaShape(arguments.replica_gpus // part) for part in (2, 1))
    rate = ADDED_PART * saturation_per_s(largest[usual], sample.input_tokens, sample.output_tokens[:, -1])
    loaded = at_rate(sample, rate)
    arrivals = poisson_arrivals(loaded, rate, arguments.requests / 4 / rate, LONG_SEED)
    with_slow: tuple[Mix, ...] = (((slow, 1), (usual, 1)), ((slow, 2), (usual, 1))) if slow in largest else ()
    mixes: tuple[Mix, ...] = (((usual, 1),), *with_slow, ((usual, 2),))
    first, last = _counted(len(arrivals.rows))
    for mix in mixes:
        for policy in ("penstock", "least_loaded"):
            deployed = Deployed((ESCALATE_ALL,), ((), mix), 0.0, (0.0, 1.0))
            latencies_s = serve(loaded, tiers, deployed, arrivals, 0.0, policy=policy).latencies_s[first:last]
            yield {
                "replicas": _named(mix),
                "policy": policy,
                "p95_s": float(np.quantile(latencies_s, 0.95)),
                "mean_s": float(latencies_s.mean()),
            }


def _counted(requests: int) -> tuple[int, int]:
    return int(_UNCOUNTED * requests), int((1 - _UNCOUNTED / 2) * requests)


def _named(mix: Mix) -> str:
    return " + ".join(f"{count} x ({shape})" for shape, count in mix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--replica-gpus", type=int, default=4, help="that a replica has at most")
    parser.add_argument("--parts", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--requests", type=int, default=40_000, help="of a long run")
    parser.add_argument("--sampled", type=int, default=300, help="requests of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for name, rows in (("plans", measure(arguments)), ("added", added(arguments))):
        for row in rows:
            found.setdefault(name, []).append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    document = json.dumps(found, indent=2) + "\n"
    if arguments.json is not None:
        arguments.json.write_text(document)
    print(document, end="")


if __name__ == "__main__":
    main()
