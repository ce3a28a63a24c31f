"""What it costs that several schedulers place requests and hear of each other late, in the simulator.

    python -m benchmarks.several_schedulers --data DATA [--schedulers 4 16] [--instances 64] [--seeds 5] [--json OUT]

Each request is placed by one of the schedulers, drawn by chance. The others count the placement `--share-ms` later, or
learn of it from the instances' reports alone (`never`). With bounces, an instance gives a request back where 1,024
prompt tokens more wait than its scheduler believed (controlplane/protocols/bouncing.py). The load is `--load` of what
one scheduler sustains with `lmetric_plus`. Means over seeds, with half of their 95 % interval; equal seeds have equal
requests. `unseen`: placements that a scheduler does not know of at a time, rate x staleness x (N - 1) / N. What is in
OUT already is not run again.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from controlplane.policies.registry import create_policy
from controlplane.protocols.bouncing import SLACK_TOKENS
from simulator.cluster.config import ClusterConfig, SchedulersConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.regret.suite import INSTANCES, OWN, TRACES, RegretSuite, SuiteTrace, sustained_rate, with_blocks_of
from simulator.report.interval import half_interval
from simulator.report.report import summarise
from simulator.reproductions.measurement import System, own_req_s, requests_of
from simulator.reproductions.page import markdown_table
from simulator.reproductions.parallel import run_jobs
from simulator.traces.reshape import scale_rate

POLICY: Final = "lmetric_plus"
INSTANCE: Final = InstanceConfig(kv_blocks=26_000, max_model_len_tokens=131_072)
"""As in `penstock compare`."""
TRACE_NAMES: Final = ("chat", "short answers")


class Figures(msgspec.Struct, frozen=True):
    """Of one run."""

    req_s: float
    ttft_ms: float
    ttft_p95_ms: float
    e2e_ms: float
    goodput_req_s: float
    bounces: int
    requests: int


def measure(data: Path, trace: SuiteTrace, scale: float, cluster: ClusterConfig, requests: int) -> Figures:
    """Simulate the first requests of a trace at `scale` times its rate."""
    workload = replace(trace.workload(data, quick=False), max_requests=requests)
    workload = replace(workload, recipe=replace(workload.recipe, clip_end_s=math.inf, seed=cluster.seed))
    cluster = with_blocks_of(trace, cluster)
    system = System(cluster, LinearCost(), POLICY)
    arrivals = list(scale_rate(requests_of(workload, system), scale))
    simulation = ClusterSimulation(arrivals, cluster, system.cost, create_policy(POLICY))
    report = summarise(simulation.run(), workload.slo, policy=POLICY, seed=cluster.seed)
    return Figures(
        own_req_s(workload, system) * scale,
        report.ttft_ms.mean or 0.0,
        report.ttft_ms.p95 or 0.0,
        report.e2e_ms.mean or 0.0,
        report.goodput_req_s,
        simulation.placements.bounces,
        len(arrivals),
    )


def sustained_scale(data: Path, trace: SuiteTrace, instances: int) -> float:
    """Of the trace's rate, what one scheduler sustains: found on as many instances as the regret suite has."""
    cluster = ClusterConfig(INSTANCES, INSTANCE)
    suite = RegretSuite(data, cluster, LinearCost(), (POLICY,), 1, quick=True, processes=1)
    return sustained_rate(suite, trace, OWN, (POLICY,)).scale * instances / INSTANCES


def main() -> None:
    """Print the table; with --json, keep every run's figures there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--traces", nargs="+", default=list(TRACE_NAMES), choices=[trace.name for trace in TRACES])
    parser.add_argument("--schedulers", type=int, nargs="+", default=[4, 16], help="besides one")
    parser.add_argument("--share-ms", type=float, nargs="+", default=[2.5], help="besides never")
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--scale", type=float, help="of the trace's rate, instead of --load of what is sustained")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    traces = [trace for trace in TRACES if trace.name in arguments.traces]
    known: dict[str, Figures] = {}
    if arguments.json is not None and arguments.json.exists():
        known = msgspec.json.decode(arguments.json.read_bytes(), type=dict[str, Figures])
    ways = [SchedulersConfig()] + [
        SchedulersConfig(count, share_ms, bounce_tokens)
        for count in arguments.schedulers
        for share_ms in (None, *arguments.share_ms)
        for bounce_tokens in (0, SLACK_TOKENS)
    ]
    jobs: dict[str, Callable[[], Figures]] = {}
    for trace in traces:
        scale = arguments.scale or arguments.load * sustained_scale(arguments.data, trace, arguments.instances)
        for seed in range(arguments.seeds):
            for way in ways:
                cluster = ClusterConfig(arguments.instances, INSTANCE, seed=seed, schedulers=way)
                job = partial(measure, arguments.data, trace, scale, cluster, arguments.requests)
                jobs[f"{trace.name} {way} #{seed}"] = job
    missing = [name for name in jobs if name not in known]
    batch = max(1, arguments.processes)
    for start in range(0, len(missing), batch):
        known |= run_jobs({name: jobs[name] for name in missing[start : start + batch]}, arguments.processes)
        if arguments.json is not None:
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
    rows = []
    for trace in traces:
        alone = [known[f"{trace.name} {ways[0]} #{seed}"] for seed in range(arguments.seeds)]
        for way in ways:
            runs = [known[f"{trace.name} {way} #{seed}"] for seed in range(arguments.seeds)]
            rows.append((trace.name, *_row(way, runs, alone)))
    header = ("trace", "schedulers", "hear after", "bounces", "unseen", "mean TTFT ms", "P95", "more TTFT", "goodput")
    print(markdown_table(header, rows))


def _row(way: SchedulersConfig, runs: list[Figures], alone: list[Figures]) -> tuple[str, ...]:
    cluster = ClusterConfig(1, INSTANCE)
    staleness_ms = cluster.report_interval_ms / 2 + cluster.report_delay_ms if way.share_ms is None else way.share_ms
    unseen = np.mean([run.req_s for run in runs]) * staleness_ms / 1000 * (way.count - 1) / way.count
    more = [100 * (run.ttft_ms / other.ttft_ms - 1) for run, other in zip(runs, alone, strict=True)]
    bounced = np.mean([100 * run.bounces / run.requests for run in runs])
    goodput = np.mean([run.goodput_req_s for run in runs]) / np.mean([run.goodput_req_s for run in alone])
    return (
        str(way.count),
        "-" if way.count == 1 else "never" if way.share_ms is None else f"{way.share_ms:g} ms",
        f"{bounced:.1f} %" if way.bounce_tokens else "off",
        f"{unseen:.2f}",
        f"{np.mean([run.ttft_ms for run in runs]):.0f}",
        f"{np.mean([run.ttft_p95_ms for run in runs]):.0f}",
        f"{np.mean(more):+.1f} +- {half_interval(more):.1f} %",
        f"{100 * goodput:.1f} %",
    )


if __name__ == "__main__":
    main()
