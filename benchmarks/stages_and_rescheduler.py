"""Stages and the rescheduler, each alone and both, on CascadeInfer's workload, in the simulator.

    python -m benchmarks.stages_and_rescheduler --data DATA [--rates 80] [--seconds 30] [--seeds 3] [--json OUT]

16 H20 with Llama-3.2-3B, ShareGPT lengths, chunks of 2,048. The rescheduler goes by trajectories, of lengths that are
known (what predictions cost is not in it) and of the fitted costs of steps. Stages are planned for each rate from the
data set's lengths, as in `penstock reproduce cascadeinfer`. Means over seeds, with half of their 95 % interval; equal
seeds have equal requests. What is in OUT already is not run again.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from controlplane.planning.stage_partition import PartitionMethod
from simulator.report.interval import half_interval
from simulator.reproductions.cascadeinfer.experiments import OURS, QUICK, SMALL
from simulator.reproductions.cascadeinfer.systems import Setting, SystemKind, Variant, profile_setting, run_system
from simulator.reproductions.page import markdown_table

ROUND_ROBIN = Variant(SystemKind.VLLM)
SYSTEMS = {
    "round robin": ROUND_ROBIN,
    "rescheduler": replace(ROUND_ROBIN, reschedules=True),
    "stages": OURS,
    "stages and rescheduler": replace(OURS, reschedules=True),
    "stages by prefill": replace(OURS, method=PartitionMethod.PREFILL),
    "stages by prefill and rescheduler": replace(OURS, method=PartitionMethod.PREFILL, reschedules=True),
}


class Figures(msgspec.Struct, frozen=True):
    """Of one run."""

    normalised_ms: float
    mean_ttft_ms: float
    p95_ttft_ms: float
    mean_tpot_ms: float
    throughput_tok_s: float
    moved: int
    """By stages and rescheduler."""
    rescheduled: int


def main() -> None:
    """Print the table; with --json, keep every run's figures there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with lengths/sharegpt_8k_llama2.csv.gz")
    parser.add_argument("--rates", type=float, nargs="+", default=[80.0], help="requests per second")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--seconds", type=float, default=30.0, help="in which requests arrive")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    known: dict[str, Figures] = {}
    if arguments.json is not None and arguments.json.exists():
        known = msgspec.json.decode(arguments.json.read_bytes(), type=dict[str, Figures])
    quality = profile_setting(Setting(SMALL, arguments.data), QUICK.profile).fit.model
    for seed in range(arguments.seeds):
        setting = Setting(SMALL, arguments.data, quality=quality, seed=seed)
        for rate in arguments.rates:
            for name in arguments.systems:
                run = _run_name(rate, name, seed)
                if run not in known:
                    known[run] = measure(setting, SYSTEMS[name], rate, arguments.seconds)
                if arguments.json is not None:
                    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
    header = ("req/s", "system", "normalised latency ms", "mean TTFT ms", "p95 TTFT ms", "mean TPOT ms")
    rows = []
    for rate in arguments.rates:
        for name in arguments.systems:
            runs = [known[_run_name(rate, name, seed)] for seed in range(arguments.seeds)]
            rows.append((f"{rate:g}", name, *_means(runs)))
    print(markdown_table((*header, "tokens/s", "moved", "of them by the rescheduler"), rows))


def measure(setting: Setting, variant: Variant, rate_req_s: float, seconds: float) -> Figures:
    """Simulate one system on one seed's requests, until all have ended."""
    result = run_system(setting, variant, rate_req_s, seconds)
    return Figures(
        result.normalised_ms,
        result.mean_ttft_ms,
        result.p95_ttft_ms,
        result.mean_tpot_ms,
        result.throughput_tok_s,
        result.moved + result.rescheduled,
        result.rescheduled,
    )


def _run_name(rate_req_s: float, name: str, seed: int) -> str:
    return f"{rate_req_s:g} {name} #{seed}"


def _means(runs: list[Figures]) -> list[str]:
    times = [[getattr(run, name) for run in runs] for name in ("normalised_ms", "mean_ttft_ms", "p95_ttft_ms")]
    shown = [f"{np.mean(each):.1f} +- {half_interval(each):.1f}" for each in times]
    rest = [np.mean([getattr(run, name) for run in runs]) for name in ("mean_tpot_ms", "throughput_tok_s")]
    moves = [np.mean([getattr(run, name) for run in runs]) for name in ("moved", "rescheduled")]
    return [*shown, f"{rest[0]:.1f}", f"{rest[1]:.0f}", *(f"{each:.0f}" for each in moves)]


if __name__ == "__main__":
    main()
